"""Folders of every shape, images of every kind, and the messages for broken ones."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastsiam.errors import DataError
from fastsiam.pipelines.store import FolderStore, open_store
from tests.conftest import write_images
from tests.processes import fastsiam
from tests.sources import tar

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def save(path: Path, mode: str = "RGB", **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(PIXELS).convert(mode).save(path, **options)  # type: ignore[arg-type]
    return path


def test_class_folders_are_sorted_and_may_be_deep(tmp_path: Path) -> None:
    save(tmp_path / "zebra" / "a.jpg")
    save(tmp_path / "ant" / "deep" / "deeper" / "b.JPEG")
    save(tmp_path / "ant" / "c.PNG")
    (tmp_path / "empty").mkdir()
    (tmp_path / "ant" / "notes.txt").write_text("not an image")
    save(tmp_path / ".hidden" / "x.jpg")
    save(tmp_path / "ant" / "._c.jpg")
    store = FolderStore(tmp_path)
    assert store.classes == ("ant", "zebra")
    assert store.labels.tolist() == [0, 0, 1]
    assert [str(store.path(i).relative_to(tmp_path)) for i in range(3)] == [
        "ant/c.PNG",
        "ant/deep/deeper/b.JPEG",
        "zebra/a.jpg",
    ]
    assert store.read(2) == (tmp_path / "zebra" / "a.jpg").read_bytes()


def test_the_way_out_of_a_broken_image_is_one(tmp_path: Path) -> None:
    """The command that its message names is typed as it stands."""
    data = tmp_path / "it's mine"
    write_images(data / "train", classes=1, each=3)
    bad = data / "train" / "class0" / "001.jpg"
    bad.write_bytes(b"no image")
    with pytest.raises(DataError, match="it is not an image; repair or remove") as caught:
        open_store(data, "train").decode(1)
    command = shlex.split(str(caught.value).split("such: ")[1].split("; a run")[0])
    assert command[:3] == ["fastsiam", "convert", "folder"] and command[4] == str(data)
    fastsiam(*command[1:])
    assert len(open_store(tmp_path / "it's mine-beton", "train")) == 2
    bad.unlink()
    write_images(tmp_path / "more", classes=1, each=1)
    tar(tmp_path / "more.tar", [("a/0.jpg", b"none")])
    with pytest.raises(DataError, match=r"; repair the image, or .* --source .*more\.tar --skip"):
        open_store(tmp_path / "more.tar", "train").decode(0)


def test_links_that_lead_back_and_pipes_are_left_out(tmp_path: Path) -> None:
    save(tmp_path / "a" / "0.jpg")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    (tmp_path / "b").symlink_to(tmp_path / "a" / "0.jpg")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "1.jpg").symlink_to(tmp_path / "a" / "0.jpg")
    os.mkfifo(tmp_path / "a" / "pipe.jpg")
    store = FolderStore(tmp_path)
    assert [store.name(i) for i in range(len(store))] == ["a/0.jpg", "c/1.jpg"]
