"""Folders of every shape, images of every kind, and what is said of the broken ones."""

from __future__ import annotations

import logging
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


def test_flat_folder_has_no_labels(tmp_path: Path) -> None:
    for name in ("b.jpg", "a.JPG", "ü.webp"):
        save(tmp_path / name)
    store = FolderStore(tmp_path)
    assert len(store) == 3 and store.classes == () and store.labels.tolist() == [-1, -1, -1]
    assert [store.path(i).name for i in range(3)] == ["a.JPG", "b.jpg", "ü.webp"]


@pytest.mark.parametrize(
    ("name", "mode", "options"),
    [
        ("rgb.jpg", "RGB", {}),
        ("progressive.jpg", "RGB", {"progressive": True}),
        ("full-chroma.jpg", "RGB", {"subsampling": 0}),
        ("gray.jpg", "L", {}),
        ("cmyk.jpg", "CMYK", {}),
        ("png-in-disguise.jpg", "RGBA", {"format": "PNG"}),
        ("palette.png", "P", {}),
        ("alpha.webp", "RGBA", {}),
    ],
)
def test_every_kind_decodes_to_rgb_as_pil_does(
    name: str, mode: str, options: dict[str, object], tmp_path: Path
) -> None:
    path = save(tmp_path / name, mode, **options)
    image = FolderStore(tmp_path).decode(0)
    assert image.mode == "RGB" and image.size == (30, 20)
    np.testing.assert_array_equal(np.asarray(image), np.asarray(Image.open(path).convert("RGB")))


def test_exif_rotation_is_left_alone_as_torchvision_does(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    save(tmp_path / "turned.jpg", exif=exif)
    assert FolderStore(tmp_path).decode(0).size == (30, 20)


def test_splits(tmp_path: Path) -> None:
    write_images(tmp_path / "train", each=2)
    write_images(tmp_path / "test", each=1)
    assert len(open_store(tmp_path, "train")) == 6
    assert open_store(tmp_path, "val").root == tmp_path / "test"
    assert len(open_store(tmp_path / "train", "train")) == 6
    with pytest.raises(DataError, match="no val/ or test/ folder"):
        open_store(tmp_path / "train", "val")


def broken(kind: str, path: Path) -> None:
    good = save(path).read_bytes()
    path.write_bytes(
        {"truncated": good[: len(good) // 2], "empty": b"", "text": b"this is no image at all"}[
            kind
        ]
    )


@pytest.mark.parametrize("kind", ["truncated", "empty", "text"])
def test_a_broken_image_is_named_in_one_line(kind: str, tmp_path: Path) -> None:
    broken(kind, tmp_path / "bad.jpg")
    with pytest.raises(DataError) as caught:
        FolderStore(tmp_path).decode(0)
    text = str(caught.value)
    assert text.startswith(f"cannot decode {tmp_path / 'bad.jpg'}: ") and "\n" not in text
    assert text.endswith(
        "; repair or remove the file, or convert all but such: fastsiam convert folder --source "
        f"{tmp_path} --skip-bad"
    )


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


def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "big.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match=r"big\.png"):
        FolderStore(tmp_path).decode(0)


def test_a_vanished_image_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "gone.jpg")
    store = FolderStore(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"cannot read .*gone\.jpg: No such file"):
        store.decode(0)


def test_unusable_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no data at"):
        open_store(tmp_path / "nowhere", "train")
    with pytest.raises(DataError, match="holds no images"):
        open_store(tmp_path, "train")
    with pytest.raises(DataError, match="is neither a folder of images nor a"):
        open_store(save(tmp_path / "one.jpg"), "train")
    save(tmp_path / "class" / "two.jpg")
    with pytest.raises(
        DataError, match=r"both by themselves \(one.jpg\) and in folders \(class/\)"
    ):
        open_store(tmp_path, "train")

    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"cannot list .*: Permission denied"):
        open_store(tmp_path, "train")


def test_links_that_lead_back_and_pipes_are_left_out(tmp_path: Path) -> None:
    save(tmp_path / "a" / "0.jpg")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    (tmp_path / "b").symlink_to(tmp_path / "a" / "0.jpg")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "1.jpg").symlink_to(tmp_path / "a" / "0.jpg")
    os.mkfifo(tmp_path / "a" / "pipe.jpg")
    store = FolderStore(tmp_path)
    assert [store.name(i) for i in range(len(store))] == ["a/0.jpg", "c/1.jpg"]


def test_no_program_is_started_for_an_image(tmp_path: Path) -> None:
    """Pillow would call Ghostscript for PostScript, whatever the file's name."""
    (tmp_path / "0.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    with pytest.raises(DataError, match="it is not an image"):
        FolderStore(tmp_path).decode(0)


def test_images_of_other_formats_are_left_out_and_named(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    FolderStore(images / "train")
    assert not caplog.records
    root = images / "val"
    for name in ("class0/a.HEIC", "class0/b.heic", "class1/c.gif", "class1/notes.txt"):
        (root / name).touch()
    for _ in range(2):
        FolderStore(root)
    assert [record.message for record in caplog.records] == [
        f"{root}: 1 .gif, 2 .heic files are left out; save them as JPEG or PNG to use them"
    ]
    (tmp_path / "phone").mkdir()
    (tmp_path / "phone" / "a.heic").touch()
    with pytest.raises(DataError, match=r"holds no images .*; save its 1 .heic files as JPEG"):
        FolderStore(tmp_path / "phone")
