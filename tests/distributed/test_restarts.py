"""A rank or the launcher is killed at some point; the run continues as if undisturbed.

Results are bitwise equal on the same number of ranks, and equal up to float32 rounding otherwise.
"""

from __future__ import annotations

import faulthandler
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from fastsiam import child_process
from fastsiam.config import TrainConfig
from fastsiam.errors import RANK_LOST
from fastsiam.run import checkpoint as checkpoints
from tests.configs import flags, with_settings
from tests.processes import Forked, command, fault_environment, wait_until
from tests.ranks import fastsiam_on_ranks
from tests.tiers import rest_slow
from tests.train.runs import history

FAULTS = [
    ("SIGKILL", "1", "4"),
    ("SIGKILL", "0", "save"),
    ("SIGKILL", "1", "evaluation"),
    ("SIGKILL", "1", "compiling"),
    ("hang", "1", "4"),
]
"""How a rank is lost, which one, and where: at a step of this start or during an operation.

Only rank 0 saves.
"""


@pytest.fixture
def config(small: TrainConfig) -> TrainConfig:
    return with_settings(small, gpus=2, save_every=2, knn_every=2)


@pytest.mark.parametrize(("fault", "rank", "where"), rest_slow(FAULTS))
def test_run_restarts_after_rank_is_lost(
    fault: str, rank: str, where: str, config: TrainConfig, tmp_path: Path
) -> None:
    if where == "compiling":
        config = with_settings(config, compile="on")
    if fault == "hang":
        config = with_settings(config, rank_timeout=30.0)
    once = str(tmp_path / "fault")  # only the first start of the run fails
    faults = fault_environment(FAULT=fault, FAULT_RANK=rank, FAULT_AT=where, FAULT_ONCE=once)
    disturbed = command("train", *flags(config), "--max-restarts", "1", environment=faults)
    result = disturbed.wait(300)
    assert result.returncode == 0, result.stderr
    fastsiam_on_ranks(2, "train", *flags(config), "--out", str(tmp_path / "whole"))
    # On a busy machine the launcher may first see the exit of the other rank.
    named = rf"failed \(exitcode: (-9\) local_rank: {rank}|{RANK_LOST}\) local_rank: \d) \(pid"
    assert re.search(named, result.stderr), result.stderr
    assert "restart 1 of 1, from the last checkpoint\n" in result.stderr
    assert Path(once).exists() and len(history(tmp_path / "whole")) == 12
    assert history(tmp_path / "run") == history(tmp_path / "whole")


def test_ranks_save_and_exit_if_launcher_is_killed(config: TrainConfig, tmp_path: Path) -> None:
    """The ranks save and exit; the same command continues from there."""
    config = with_settings(config, epochs=3000, save_every=10**6, knn_every=0)
    run = tmp_path / "run"
    process = command("train", *flags(config), session=True)
    wait_until(process, lambda: len(history(run)) >= 3)
    leader = int((run / "lock").read_text().split()[1])
    process.send(signal.SIGKILL)
    while Path(f"/proc/{leader}").exists():
        time.sleep(0.05)
    assert process.wait().returncode == -signal.SIGKILL
    state = checkpoints.load(run)
    assert state.step >= 3 and not (run / "lock").exists()
    fastsiam_on_ranks(2, "train", *flags(with_settings(config, max_steps=state.step + 1)))
    assert checkpoints.load(run).step == state.step + 1


@pytest.mark.parametrize(("first", "then"), rest_slow([(3, [[3], [2]]), (2, [[3]]), (3, [[1, 3]])]))
def test_run_resumes_on_other_number_of_ranks(
    first: int, then: Sequence[Sequence[int]], small: TrainConfig, tmp_path: Path
) -> None:
    """With three or more ranks, rounding of a sum depends on its position in the all-reduce."""
    config = with_settings(small, batch=12, knn_every=0)  # 8 steps
    reference = tmp_path / "whole"
    fastsiam_on_ranks(first, "train", *flags(config), "--out", str(reference))
    assert len(history(reference)) == 8
    parts = 1 + len(then[0])
    first_run = tmp_path / "begun"
    start = flags(with_settings(config, max_steps=8 // parts))
    fastsiam_on_ranks(first, "train", *start, "--out", str(first_run))
    for worlds in then:
        run = Path(shutil.copytree(first_run, tmp_path / f"then {worlds}"))
        for number, world in enumerate(worlds, start=2):
            arguments = flags(with_settings(config, max_steps=8 * number // parts))
            fastsiam_on_ranks(world, "train", *arguments, "--out", str(run))
        if worlds == [first]:
            assert history(run) == history(reference)
            continue
        for one, other in zip(history(run), history(reference), strict=True):
            assert one[:2] == other[:2] and one[5] == other[5]  # step, epoch, learning rate
            assert one[2:4] == pytest.approx(other[2:4], abs=2e-3)  # loss, std


def test_missing_rank_ends_run_after_timeout(small: TrainConfig, tmp_path: Path) -> None:
    config = with_settings(small, batch=12, rank_timeout=2.0)
    alone = fastsiam_on_ranks(
        3, "train", *flags(config), code=RANK_LOST, begin=start_all_but_rank_1
    )
    assert "another rank did not answer" in alone[0].stderr
    assert alone[2].returncode == RANK_LOST


def start_all_but_rank_1(*arguments: str, environment: Mapping[str, str]) -> Forked:
    if environment["RANK"] == "1":
        return Forked(time.sleep, 0)
    return command(*arguments, environment=environment)


def test_stderr_of_nonzero_ranks_has_rank_prefix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(faulthandler, "enable", lambda file: None)  # pytest has enabled it
    monkeypatch.setattr(child_process, "die_with_parent", lambda parent: lambda: None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    for rank in ("0", "2"):
        monkeypatch.setattr(sys, "stderr", sys.stderr)  # restores it after the test
        monkeypatch.setenv("RANK", rank)
        child_process.begin()
        print("one\ntwo", file=sys.stderr)
        sys.stderr.write("half ")
        sys.stderr.write("a line")
        sys.stderr.flush()
    first, second = "one\ntwo\nhalf a line", "[rank 2] one\n[rank 2] two\n[rank 2] half a line\n"
    assert capsys.readouterr().err == first + second
