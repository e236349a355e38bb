"""A run folder belongs to one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest

from fastsiam.config import TrainConfig
from fastsiam.errors import CheckpointError, FastSiamError
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from fastsiam.run.run_folder import RunFolder, create_folder
from fastsiam.views.batch import Batch
from tests.configs import flags, with_settings
from tests.conversions import stub_raising
from tests.disks import fill, small_disk
from tests.processes import Forked, command, fastsiam, wait_until
from tests.tiers import slow
from tests.train.runs import train_run


def hold_lock(path: Path) -> None:
    """Lock a folder until killed. A forked child stays alive."""
    with RunFolder(path).lock():
        if not os.fork():
            (path / "child").write_text(str(os.getpid()))
            time.sleep(600)
        (path / "held").touch()
        time.sleep(600)


def test_lock_is_exclusive_and_released_on_kill(tmp_path: Path) -> None:
    """The lock is released even if a forked child of the killed process is still alive."""
    holder = Forked(hold_lock, tmp_path)
    wait_until(holder, lambda: {"held", "child"} <= {*os.listdir(tmp_path)})
    who = rf"in use by process {holder.pid} on \S+ since \d{{4}}-\d\d-\d\d \d\d:\d\d; wait for it"
    with pytest.raises(FastSiamError, match=who), RunFolder(tmp_path).lock():
        pass
    holder.send(signal.SIGKILL)
    holder.wait()
    child = int((tmp_path / "child").read_text())
    os.kill(child, 0)  # it still exists
    with RunFolder(tmp_path).lock():
        assert f"process {os.getpid()} on" in (tmp_path / "lock").read_text()
    assert not (tmp_path / "lock").exists()
    os.kill(child, signal.SIGKILL)


def test_new_empty_folder_is_removed(tmp_path: Path) -> None:
    """New parents are removed too. A stale lock file does not count as content."""
    run = tmp_path / "runs" / "deep" / "run"
    with create_folder(run):
        (run / "lock").write_text("of a rank that was killed")
    assert os.listdir(tmp_path) == []
    with create_folder(run):
        (run / "config.json").touch()
    assert (run / "config.json").exists()
    (run / "config.json").unlink()
    with create_folder(run):
        pass
    assert run.is_dir()  # it existed before


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_second_run_in_folder_is_rejected(ranks: int, small: TrainConfig, tmp_path: Path) -> None:
    config = with_settings(small, epochs=3000, save_every=2, knn_every=0, gpus=ranks)
    run = tmp_path / "run"
    first = command("train", *flags(config), session=True)
    wait_until(first, checkpoints.last(run).exists)
    for second in {1, ranks}:
        stderr = fastsiam("train", *flags(with_settings(config, gpus=second)), code=1).stderr
        (line,) = stderr.splitlines()
        assert line.startswith(f"error: {run} is in use by process ")
        assert line.endswith("; wait for it, or choose another --out")
    fastsiam("report", str(run))
    if ranks == 1:
        assert "kNN" in fastsiam("eval", "knn", str(run), "--device", "cpu").stdout
    os.kill(int((run / "lock").read_text().split()[1]), signal.SIGKILL)  # rank 0
    first.wait()
    assert (run / "lock").exists()
    step = checkpoints.load(run).step
    fastsiam("train", *flags(with_settings(config, max_steps=step + 2, gpus=1)))
    assert checkpoints.load(run).step == step + 2 and not (run / "lock").exists()


def test_lock_of_other_process_is_kept(tmp_path: Path) -> None:
    """The folder was deleted meanwhile, and another run created and locked it again."""
    folder = RunFolder(tmp_path)
    with folder.lock():
        (tmp_path / "lock").unlink()
        (tmp_path / "other").write_text("another run")
        (tmp_path / "other").rename(tmp_path / "lock")
    assert (tmp_path / "lock").read_text() == "another run"


def test_missing_lock_support_causes_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fcntl, "flock", stub_raising(errno.ENOLCK))
    with RunFolder(tmp_path).lock():
        pass
    assert "cannot be locked (No locks available); make sure" in capfd.readouterr().err


@pytest.mark.usefixtures("ample_memory")  # no other alarm
@pytest.mark.parametrize("freed", [True, False])
def test_run_continues_while_disk_is_full(
    freed: bool, small: TrainConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run that cannot save continues and retries. Only the last save must succeed."""
    config = with_settings(small, knn_every=0, save_every=2)
    with small_disk(tmp_path / "disk", 2) as disk:
        run = disk / "run"

        def fill_or_free(step: int, batch: Batch) -> None:
            if step == 3:
                fill(disk)
            if step == 9 and freed:
                (disk / "filler").unlink()

        if freed:
            train_run(config, fill_or_free, out=run)
            lines = read_metrics(run)
            assert [x["step"] for x in lines if x["kind"] == "train"] == list(range(1, 13))
            assert [x["name"] for x in lines if x["kind"] == "alarm"] == ["disk"]
        else:
            full = r"cannot save \S+last\.pt: No space left on device; free some space"
            with pytest.raises(CheckpointError, match=full):
                train_run(config, fill_or_free, out=run)
        assert checkpoints.load(run).step == (12 if freed else 2)
        saved = {"last.pt", "previous.pt"} if freed else {"last.pt"}
        assert {*os.listdir(run / "checkpoints")} == saved
    stderr = capfd.readouterr().err
    assert "training continues, and the last good checkpoint is" in stderr and "(step 2)" in stderr
    assert "Traceback" not in stderr
