"""A rank that fails in the middle of a run ends the run quickly, with a message that says why.

By default a run waits two minutes for a late rank; the tests use shorter timeouts.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from fastsiam import cli
from fastsiam.config import TrainConfig
from fastsiam.distributed import closing_unless_lost, peer_is_gone, peer_is_late
from fastsiam.distributed.launch import _exit_code
from fastsiam.errors import RANK_LOST, DataError
from tests.conversions import stub_raising
from tests.ranks import FAULTS, check_failing_run
from tests.tiers import rest_slow


@pytest.mark.parametrize("fault", rest_slow([*FAULTS], fast=2))
def test_failing_rank_ends_run(fault: str, small: TrainConfig) -> None:
    check_failing_run(small, fault)


class RankExit(Exception):
    """Replaces the exit of a rank in these tests."""


@pytest.mark.parametrize(
    ("ending", "code", "printed"),
    [
        (ValueError("a bug"), 1, "ValueError: a bug"),
        (SystemExit(2), 2, None),
        (SystemExit(130), 130, None),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt"),
        (RuntimeError("gloo: Connection closed by peer [127.0.0.1]"), RANK_LOST, None),
        (dist.DistBackendError("NCCL error: unhandled cuda error"), 1, "unhandled cuda error"),
        (dist.DistStoreError("wait timeout after 3000ms"), RANK_LOST, "another rank did"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failed_rank_calls_os_exit(
    ending: BaseException,
    code: int,
    printed: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A failed rank calls ``os._exit`` with the exit code that the interpreter would have used."""
    app, leave = Mock(side_effect=ending), Mock(side_effect=RankExit)
    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(cli, "begin", lambda: None)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(RankExit):
        cli.main()
    leave.assert_called_once_with(code)
    stderr = capsys.readouterr().err
    assert (printed in stderr) if printed else not stderr
    app.side_effect = SystemExit(0)  # a rank that succeeded exits normally
    with pytest.raises(SystemExit):
        cli.main()
    leave.assert_called_once()


@pytest.mark.parametrize("rank", [0, 1])
def test_first_rank_of_machine_prints_error_before_others(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Meanwhile the launcher ends the others, so an error of all ranks is printed once."""
    printed_before_wait = []
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setattr(cli, "app", Mock(side_effect=DataError("a broken image")))
    monkeypatch.setattr(
        time, "sleep", lambda _: printed_before_wait.append(capsys.readouterr().err)
    )
    with pytest.raises(SystemExit):
        cli._run()
    assert printed_before_wait == [""] * rank
    assert capsys.readouterr().err == "error: a broken image\n"


def test_unrelated_errors_do_not_count_as_lost_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    for text in ("DataLoader timed out after 5 seconds", "a file: broken pipe", "anything"):
        assert not peer_is_gone(RuntimeError(text)) and not peer_is_late(RuntimeError(text))
    for late in (
        dist.DistStoreError("Timed out after 4 seconds waiting for clients. 1/2 clients joined."),
        dist.DistBackendError("NCCL operation timed out"),
    ):
        assert peer_is_late(late) and not peer_is_gone(late)
    monkeypatch.delenv("LOCAL_RANK")
    assert not peer_is_late(late)


def test_loader_is_not_closed_after_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing GPU memory waits for running kernels, and NCCL's kernels wait for the lost rank."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    for text, closes in (("gloo: connection closed by peer", 0), ("out of memory", 1)):
        used = Mock()
        with pytest.raises(RuntimeError, match=text), closing_unless_lost(used):
            raise RuntimeError(text)
        assert used.close.call_count == closes
    with closing_unless_lost(used := Mock()):
        used.close.assert_not_called()
    used.close.assert_called_once()


@pytest.mark.parametrize(
    ("failures", "killed", "code"),
    [
        ({0: (1, 0)}, None, 1),
        ({1: (2, 0), 0: (-signal.SIGTERM, 0)}, None, 2),
        ({0: (1, 0), 1: (-signal.SIGKILL, 0)}, 1, 137),
        ({2: (-signal.SIGABRT, 5), 0: (1, 5)}, 2, 134),
        ({0: (1, 0), 1: (-signal.SIGKILL, 30)}, None, 1),
        ({0: (75, 0), 1: (1, 5), 2: (75, 0)}, None, 1),
        ({1: (-signal.SIGTERM, 0)}, 1, 143),
        ({0: (RANK_LOST, 0), 1: (1, 0.5)}, None, 1),
        ({0: (RANK_LOST, 0), 2: (RANK_LOST, 0)}, None, RANK_LOST),
    ],
)
def test_exit_code_is_that_of_root_cause(
    failures: Mapping[int, tuple[int, int]],
    killed: int | None,
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Failures by rank: the exit code of the process, and the second in which it was observed.

    torch's agent sends SIGTERM first, and SIGKILL after half a minute.
    """
    errors: Any = {
        rank: SimpleNamespace(exitcode=exit, timestamp=at) for rank, (exit, at) in failures.items()
    }
    assert _exit_code(errors) == code
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"error: rank {killed} was killed by SIG") if killed else not stderr
    monkeypatch.setattr(sys, "stderr", Mock(write=stub_raising(errno.ENOSPC)))
    assert _exit_code(errors) == code
