"""What launchers start for a run; and again after a loss: how many ranks there can be, and when."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from fastsiam.config import TrainConfig
from fastsiam.distributed import Work
from fastsiam.jobs.train import check_shares, run_folder
from fastsiam.training.folder import RunFolder, wait_until_free

_DEVICES = "CUDA_VISIBLE_DEVICES"
_PROBE = "import torch; assert torch.ones(8, device='cuda').sum().item() == 8"
_ANSWERS_IN = 120.0
"""Seconds in which a GPU has to have computed something: it starts CUDA, on a busy machine."""


@contextlib.contextmanager
def ranks_of(config: TrainConfig, recipe: str, arguments: Sequence[str]) -> Iterator[Work]:
    """Yield what the launchers of a run start, with ``arguments`` of the command line.

    At the end the run's folder is removed if it is new and the ranks wrote nothing into it.
    """
    folders: list[Path] = []
    stack = contextlib.ExitStack()

    def take_folder() -> Sequence[str]:
        folders.append(stack.enter_context(run_folder(config, recipe)))
        with RunFolder(folders[0]).taken():
            pass  # refused here, or rank 0 would be when all have begun
        return "--out", str(folders[0])

    shares = partial(check_shares, config)

    def again(ranks: int) -> tuple[int, Sequence[str]]:
        run = folders[0] if folders else None  # of several machines, one has it
        own = shares if config.run.nodes == 1 else lambda ranks: None
        return restarting(config, run, shares=own)(ranks)

    with stack:
        yield Work(
            arguments=arguments,
            gpus=config.run.gpus,
            shares=shares,
            restarts=config.run.max_restarts,
            more=take_folder,
            again=again,
        )


def restarting(
    config: TrainConfig, run: Path | None, *, shares: Callable[[int], None]
) -> Callable[[int], tuple[int, Sequence[str]]]:
    """Return what the launcher asks before it starts ranks again.

    Args:
        config: the run's.
        run: its folder, which those that are left may still have; None if it is not looked at.
        shares: raises ``ValueError`` for a number of ranks that the batch cannot be shared among.

    Returns:
        A function of the number of ranks so far: how many there shall be now, none if there cannot
        be any; and what to add to the command line.
    """

    def again(ranks: int) -> tuple[int, Sequence[str]]:
        there = ranks
        if config.run.device != "cpu" and (listed := _listed()):
            answering = [
                gpu for gpu, answers in zip(listed, _answers(listed), strict=True) if answers
            ]
            os.environ[_DEVICES] = ",".join(answering)
            there = len(answering)
            if not there:
                print("error: no GPU answers any more, so nothing is started", file=sys.stderr)
        if run and (who := wait_until_free(run)):
            print(f"error: {run} is still in use by {who}", file=sys.stderr)
            return 0, ()
        now = largest(min(ranks, there), shares)
        # A run that was not to find one there goes on with its own now.
        return now, (
            "--gpus",
            str(now),
            *(("--resume", "auto") if config.run.resume == "never" else ()),
        )

    return again


def largest(ranks: int, shares: Callable[[int], None]) -> int:
    """Return the largest number up to ``ranks`` among which the batch can be shared, or 0."""
    for number in range(ranks, 0, -1):
        with contextlib.suppress(ValueError):
            shares(number)
            return number
    return 0


def _listed() -> list[str]:
    """Return the names of the GPUs that torch sees."""
    if _DEVICES in os.environ:
        return [name for name in os.environ[_DEVICES].split(",") if name]
    return [str(number) for number in range(torch.cuda.device_count())]


def _answers(gpus: Sequence[str]) -> list[bool]:
    """Tell of each GPU whether it computes, in a process of its own: a lost one may hang that."""
    probes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROBE],
            env={**os.environ, _DEVICES: gpu},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for gpu in gpus
    ]
    return [_ends_well(probe) for probe in probes]


def _ends_well(probe: subprocess.Popen[bytes]) -> bool:
    try:
        return probe.wait(_ANSWERS_IN) == 0
    except subprocess.TimeoutExpired:
        probe.kill()  # not waited for: in a driver that hangs it would not end
        return False
