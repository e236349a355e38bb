"""Archives whose members have hostile names, or are no files: nothing is written beside the target."""

from __future__ import annotations

import io
import os
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


def hostile_tar(path: Path, *names: str, links: bool = False) -> Path:
    with tarfile.open(path, "w") as tar:
        for number, name in enumerate(names):
            content = jpeg(number)
            info = tarfile.TarInfo(name.format(number))
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        if links:
            link = tarfile.TarInfo("c0/link.jpg")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(link)
            device = tarfile.TarInfo("c0/device.jpg")
            device.type, device.devmajor, device.devminor = tarfile.CHRTYPE, 1, 5
            tar.addfile(device)
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


def test_links_and_devices_in_a_tar_are_no_images(tmp_path: Path) -> None:
    path = hostile_tar(tmp_path / "train.tar", "c0/{}.jpg", "c0/{}.jpg", links=True)
    store = open_store(path, "train")
    assert [store.name(i) for i in range(len(store))] == ["c0/0.jpg", "c0/1.jpg"]


def test_a_link_in_a_folder_is_read_as_what_it_leads_to(tmp_path: Path) -> None:
    """As data sets are put together; a link into nowhere is no image."""
    real = tmp_path / "real.jpg"
    real.write_bytes(jpeg(1))
    folder = tmp_path / "data" / "c0"
    folder.mkdir(parents=True)
    os.symlink(real, folder / "0.jpg")
    os.symlink(tmp_path / "nowhere.jpg", folder / "1.jpg")
    store = open_store(tmp_path / "data", "train")
    assert store.decode(0).size == (20, 16) and len(store) == 1
