"""Where records go: into the run, into the user's file, or into one of them with a warning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastsiam.console import Console
from fastsiam.distributed import Place
from fastsiam.errors import FastSiamError
from fastsiam.evaluate.record_files import RecordFiles
from fastsiam.run.records import Record, read_records
from tests.conftest import ROOT
from tests.disks import fill, small_disk

RECORD = read_records(ROOT / "bench" / "results" / "cifar10-evaluation")[0]


def files(run: Path | None, asked: Path | str = "") -> RecordFiles:
    here = Place(0, 1, torch.device("cpu"))
    return RecordFiles(run, RECORD, asked=str(asked), place=here, console=Console())


def block(folder: Path) -> None:
    """Have a file stand where a folder was."""
    folder.rename(folder.with_name("moved"))
    folder.write_text("")


@pytest.mark.parametrize("asked", [False, True])
def test_a_run_that_cannot_be_written_in_the_end_is_a_warning(
    asked: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The state stays, unless the record is in the user's file."""
    own = files(tmp_path / "run", tmp_path / "mine" / "x.json" if asked else "")
    own.save_state(1, lambda: {}, last=True)
    assert own.load_state()
    block(tmp_path / "run" / "eval")
    shown: list[Record] = []
    own.keep(RECORD, shown.append)
    said = capfd.readouterr().err
    assert "the result is not kept with its run" in said and shown == [RECORD]
    assert ("--json FILE keeps it" in said) != asked
    if asked:
        assert f", but goes to {tmp_path / 'mine' / 'x.json'}" in said
        (tmp_path / "mine").rename(tmp_path / "eval")
        assert read_records(tmp_path) == [RECORD]
    else:
        assert list((tmp_path / "run" / "moved").glob("*.partial"))


def test_the_users_file_must_be_written(tmp_path: Path) -> None:
    own = files(tmp_path / "run", tmp_path / "mine" / "x.json")
    block(tmp_path / "mine")
    with pytest.raises(FastSiamError, match=r"^cannot write .*mine/x\.json: .+$"):
        own.keep(RECORD)
    assert read_records(tmp_path / "run") == [RECORD]


def test_what_can_be_known_before_is_said_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        asked = tmp_path / "x.json"
        whole = files(disk, asked)
        assert whole.record and whole.record.parent == disk / "eval"
        assert not capfd.readouterr().err
        fill(disk)
        assert files(disk, asked).record == asked
        assert "json: No space left" in capfd.readouterr().err
        with pytest.raises(FastSiamError, match=r"^cannot write .*x\.json: No space left"):
            files(None, disk / "x.json")
