"""Run commands on several ranks, which are forked, and check what ranks compute together."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fastsiam.config import TrainConfig
from fastsiam.errors import RANK_LOST
from tests.configs import flags, with_settings
from tests.processes import Forked, command, fastsiam, fault_environment

LATE_RANK = r"error: another rank did not answer within --rank-timeout; "
FAULTS = {
    "error": (
        1,
        r"\[rank 1\] rank 1 failed with an unexpected error\n\[rank 1\] Traceback (?s:.*)"
        r"\n\[rank 1\] ZeroDivisionError: ",
    ),
    "hang": (RANK_LOST, LATE_RANK),
    "SIGKILL": (
        128 + signal.SIGKILL,
        r"error: rank 1 was killed by SIGKILL, perhaps because memory",
    ),
    "SIGABRT": (
        128 + signal.SIGABRT,
        r"Fatal Python error: Aborted\n(?s:.*) in _fault\n(?s:.*)"
        r"error: rank 1 was killed by SIGABRT \(a crash, or NCCL",
    ),
    "SIGSTOP": (RANK_LOST, LATE_RANK),
}
"""The launcher's exit code and message for each way in which a rank can fail."""
_TIMEOUTS = {"hang": 5.0, "SIGSTOP": 15.0}
"""``--rank-timeout`` in seconds, by fault."""
_RUN_TIMEOUT = 240
"""Timeout in seconds for a run, from startup on a busy machine to its exit."""
WIDE = {"dim": 768, "predictor_dim": 256}
"""Heads whose gradients fill several buckets."""


def fastsiam_on_ranks(
    world: int, *arguments: str, code: int = 0, begin: Callable[..., Forked] = command
) -> list[subprocess.CompletedProcess[str]]:
    """Run a command line on several ranks; check that at least one exits with ``code``.

    ``begin`` starts a rank, like ``command``.
    """
    # This process acts as the launcher, whose store is the ranks' rendezvous.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "localhost", 0, is_master=True, wait_for_workers=False
    )
    meeting = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(world),
    }
    processes = [
        begin(*arguments, environment={**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]
    results = [one.wait(300) for one in processes]
    codes = [one.returncode for one in results]
    assert code in codes and (code or not any(codes)), "\n".join(one.stderr for one in results)
    return results


def check_failing_run(config: TrainConfig, fault: str) -> None:
    """Run two ranks and let rank 1 fail in the middle; the cause must be reported exactly once."""
    code, message = FAULTS[fault]
    config = with_settings(config, gpus=2, knn_every=0)
    if fault in _TIMEOUTS:
        config = with_settings(config, rank_timeout=_TIMEOUTS[fault])
    fails = fault_environment(FAULT=fault, FAULT_RANK="1")
    result = fastsiam("train", *flags(config), code=code, timeout=_RUN_TIMEOUT, environment=fails)
    stderr = result.stderr
    assert len(re.findall(message, stderr)) == 1, stderr
    assert stderr.count("Traceback") == (fault == "error")


def check_same_training(together: list[Any], alone: dict[str, Any]) -> None:
    """Compare the results of the ranks with those of one process."""
    torch.testing.assert_close(
        torch.stack([r["loss"] for r in together]).mean(0), alone["loss"], atol=1e-5, rtol=1e-5
    )
    for result in together:
        for got, expected in zip(result["gradient"], alone["gradient"], strict=True):
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-3)
        for name, value in alone["state"].items():
            torch.testing.assert_close(result["state"][name], value, atol=1e-4, rtol=1e-3, msg=name)
            torch.testing.assert_close(
                result["state"][name], together[0]["state"][name], atol=0, rtol=0
            )
