"""Checkpoints: atomic writes, safe loading of plain tensors, and errors for other files."""

from __future__ import annotations

import errno
import os
import random
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastsiam.config import TrainConfig
from fastsiam.errors import CheckpointError, DamagedError
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.checkpoint import weights_hash
from tests.configs import make_checkpoint
from tests.conversions import stub_raising
from tests.disks import small_disk
from tests.train.runs import same_state


def test_save_and_load_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "run" / "checkpoints" / "last.pt"
    checkpoints.save(path, make_checkpoint())
    for place in (path, tmp_path / "run"):
        state = checkpoints.load(place)
        assert state.config == TrainConfig() and state.step == 3 and state.epoch == 0.75
        assert torch.equal(state.model["weight"], torch.full((10,), 3.0))
    assert [p.name for p in path.parent.iterdir()] == ["last.pt"]


def test_malicious_pickle_is_not_executed(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path}/executed",)

    torch.save({"format": 1, "model": Hostile()}, tmp_path / "last.pt")
    with pytest.raises(CheckpointError, match="corrupt or not a PyTorch file of plain tensors"):
        checkpoints.load(tmp_path / "last.pt")
    assert not (tmp_path / "executed").exists()


def test_missing_and_foreign_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a run folder"):
        checkpoints.load(tmp_path)
    checkpoints.save(
        checkpoints.previous(tmp_path), make_checkpoint(1)
    )  # must not be used as a fallback
    for foreign, is_zip in (
        ({"state_dict": 1}, True),
        ({"state_dict": 1}, False),
        ({"format": 99}, True),
    ):
        torch.save(foreign, checkpoints.last(tmp_path), _use_new_zipfile_serialization=is_zip)
        with pytest.raises(CheckpointError, match="not a checkpoint of this version"):
            checkpoints.load_newest(tmp_path)
    exported = tmp_path / "exported.pt"
    torch.save({"state_dict": {}, "fastsiam": {}}, exported)
    with pytest.raises(CheckpointError, match=f"is a weight file, .* pass --init {exported} inst"):
        checkpoints.load(exported)
    with pytest.raises(CheckpointError, match=f"is not a run folder.*; pass {tmp_path}$"):
        checkpoints.load(checkpoints.last(tmp_path).parent)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_damage_is_detected_or_harmless(tmp_path: Path) -> None:
    """For example, a flipped bit in the padding before a tensor is harmless."""
    path = checkpoints.last(tmp_path)
    checkpoints.save(path, make_checkpoint())
    original, expected, draw = path.read_bytes(), checkpoints.load(path), random.Random(0)
    detected = 0
    directory = len(original) - 1000  # the end of the file describes its entries
    for number in range(400):
        content = bytearray(original)
        first = draw.randrange(directory * (number % 2), len(original))
        if number % 3:
            content[first] ^= 1 << draw.randrange(8)
        else:
            content[first : first + 64] = draw.randbytes(len(original[first : first + 64]))
        path.write_bytes(content)
        try:
            state = checkpoints.load(path)
        except DamagedError:
            detected += 1
        else:
            assert state == replace(expected, model=state.model, optimizer=state.optimizer)
            assert same_state(state.model, expected.model)
            assert same_state(state.optimizer, expected.optimizer)
    assert detected > 100
    content = bytearray(original)
    entry = original.index(b"PK\x01\x02")  # the first entry, whose attributes follow 38 bytes later
    content[entry + 38] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(DamagedError):
        checkpoints.load(path)


def test_weights_hash_depends_on_names_and_values() -> None:
    state = {"a": torch.arange(6.0), "b": torch.tensor(1, dtype=torch.bfloat16)}
    changes = ({"a": torch.arange(6.0).flip(0)}, {"b": torch.tensor(2)}, {"c": torch.zeros(0)})
    assert len({weights_hash(state), *(weights_hash(state | one) for one in changes)}) == 4
    assert weights_hash(dict(reversed(state.items()))) == weights_hash(state)


@pytest.mark.parametrize("has_links", [True, False])
def test_previous_checkpoint_is_kept_and_used(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", stub_raising(errno.EPERM))
    path, before = checkpoints.last(tmp_path), checkpoints.previous(tmp_path)
    assert checkpoints.load_newest(tmp_path) == (None, "")
    for step in (1, 2, 3):
        checkpoints.save(path, make_checkpoint(step), keep=before)
    assert (checkpoints.load(path).step, checkpoints.load(before).step) == (3, 2)
    assert sorted(one.name for one in path.parent.iterdir()) == ["last.pt", "previous.pt"]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedError, match=r"; the previous checkpoint is \S+previous\.pt$"):
        checkpoints.load(tmp_path)
    state, message = checkpoints.load_newest(tmp_path)
    assert state is not None and state.step == 2
    assert message.endswith("last.pt is corrupt: resuming from the previous checkpoint, at step 2")
    checkpoints.rename_corrupt(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(CheckpointError, match=r"; the previous checkpoint is \S+$"):
        checkpoints.load(tmp_path)
    state, message = checkpoints.load_newest(tmp_path)
    assert (
        state is not None and "last.pt is missing: resuming from the previous checkpoint" in message
    )
    checkpoints.save(path, make_checkpoint(3), keep=before)
    assert (checkpoints.load(path).step, checkpoints.load(before).step) == (3, 2)
    before.write_bytes(b"")
    path.write_bytes(b"")
    with pytest.raises(DamagedError, match=r"last\.pt"):
        checkpoints.load_newest(tmp_path)


def test_previous_checkpoint_is_kept_if_last_is_symlink(tmp_path: Path) -> None:
    path, before = checkpoints.last(tmp_path), checkpoints.previous(tmp_path)
    with small_disk(tmp_path / "disk", 2) as disk:
        path.parent.mkdir()
        path.symlink_to(disk / "last.pt")
        for step in (1, 2, 3):
            checkpoints.save(path, make_checkpoint(step), keep=before)
        assert (checkpoints.load(path).step, checkpoints.load(before).step) == (3, 2)
        assert sorted(one.name for one in path.parent.iterdir()) == ["last.pt", "previous.pt"]
        assert path.is_symlink() and [one.name for one in disk.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/last.pt"])
def test_checkpoint_on_unmounted_disk_is_error(name: str, tmp_path: Path) -> None:
    link = tmp_path / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "disk" / name)
    message = (
        rf"^cannot read {tmp_path}: {link} is a link to \S+, which does not exist \(is its disk"
    )
    for function in (checkpoints.exists, checkpoints.load_newest, checkpoints.load):
        with pytest.raises(CheckpointError, match=message):
            function(tmp_path)


def test_checkpoint_that_cannot_be_checked_is_not_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run must not resume from the previous one, and rename the last."""
    for step in (1, 2):
        checkpoints.save(
            checkpoints.last(tmp_path), make_checkpoint(step), keep=checkpoints.previous(tmp_path)
        )
    monkeypatch.setattr(zipfile.ZipFile, "testzip", stub_raising(errno.EIO))
    with pytest.raises(CheckpointError, match=r"last\.pt: Input/output error; check the disk"):
        checkpoints.load_newest(tmp_path)


def test_failed_fsync_keeps_both_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, before = checkpoints.last(tmp_path), checkpoints.previous(tmp_path)
    for step in (1, 2):
        checkpoints.save(path, make_checkpoint(step), keep=before)
    monkeypatch.setattr(os, "fsync", stub_raising(errno.ENOSPC))
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoints.save(path, make_checkpoint(3), keep=before)
    assert (checkpoints.load(path).step, checkpoints.load(before).step) == (2, 1)
