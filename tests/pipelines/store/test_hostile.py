"""Archives whose members have hostile names, or are no files: nothing is written elsewhere."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from fastsiam.bench.images import Silent
from fastsiam.config import ConvertConfig
from fastsiam.errors import DataError
from fastsiam.pipelines.convert import convert
from fastsiam.pipelines.store import open_store

NAMES = ("../../evil/{}.jpg", "/tmp/fastsiam-evil/{}.jpg", "c/../../../evil/{}.jpg", "c0/{}.jpg")


def jpeg(seed: int) -> bytes:
    out = io.BytesIO()
    Image.effect_noise((20, 16), 60 + seed).convert("RGB").save(out, "JPEG")
    return out.getvalue()


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def hostile_tar(path: Path, *names: str) -> Path:
    with tarfile.open(path, "w") as tar:
        for number, name in enumerate(names):
            content = jpeg(number)
            info = tarfile.TarInfo(name.format(number))
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_names_of_members_are_no_paths(name: str, tmp_path: Path) -> None:
    """Neither reading nor converting writes anything where they lead to."""
    source = tmp_path / "a" / "b"
    source.mkdir(parents=True)
    hostile_tar(source / "train.tar", *[name] * 4)
    out, before = tmp_path / "a" / "out", files_below(tmp_path)
    try:
        store = open_store(source / "train.tar", "train")
        assert all(store.decode(i).size == (20, 16) for i in range(len(store)))
        convert("folder", ConvertConfig(source=str(source), out=str(out)), Silent())
    except DataError as error:
        assert "\n" not in str(error)
    assert not Path("/tmp/fastsiam-evil").exists()
    new = files_below(tmp_path) - before
    assert all(out in path.parents or path.parent == source for path in new), new
