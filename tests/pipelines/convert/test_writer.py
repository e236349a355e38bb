"""Writing of .beton files: bad images of every kind, existing files and write errors."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fastsiam import cli
from fastsiam.errors import DataError, WorkerError
from fastsiam.pipelines.convert import writer
from fastsiam.pipelines.store import BetonStore, open_store
from tests.conftest import write_images
from tests.conversions import find_problems, run, stub_raising
from tests.processes import Forked, fastsiam
from tests.sources import encoded, jpeg, picture, put
from tests.tiers import rest_slow


def test_existing_file_is_never_overwritten(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("folder", images, out)
    before = (out / "train.beton").read_bytes()
    with pytest.raises(DataError, match=r"already exists, but was converted with other options"):
        run("folder", images, out, max_side=10)
    os.utime(images / "train" / "class0" / "000.jpg", (1, 1))
    with pytest.raises(DataError, match="from other images, or from files with other modification"):
        run("folder", images, out)
    assert (out / "train.beton").read_bytes() == before
    assert sorted(os.listdir(out)) == ["manifest.json", "train.beton", "val.beton"]


def test_full_disk_is_one_line_error_without_partial_file(tmp_path: Path) -> None:
    """A file size limit simulates a full disk. Without it, the conversion resumes."""
    write_images(tmp_path / "images", classes=2, each=100, side=80)
    out = tmp_path / "out"
    arguments = ("convert", "folder", "--source", str(tmp_path / "images"), "--out", str(out))
    result = Forked(with_small_files, arguments).wait(120)
    assert result.returncode == 1
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert re.search(r"no space for .* needs about \d\.\d MB more, and .* free.* to resume", line)
    assert "Traceback" not in result.stderr and not (out / "train.beton").exists()
    fastsiam(*arguments)
    assert find_problems(out) == []


def test_failed_fsync_leaves_conversion_unfinished(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operating system may report a write error only at fsync."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", stub_raising(errno.EIO))
        with pytest.raises(DataError, match=r"cannot write .*train.beton: "):
            run("folder", images, out)
    assert sorted(os.listdir(out)) == ["train.beton.journal", "train.beton.partial"]
    run("folder", images, out)
    assert find_problems(out) == []


@pytest.mark.parametrize("is_killed", rest_slow([False, True]))
def test_failed_block_ends_workers_of_later_blocks(
    is_killed: bool, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for its place in the file: after an error, or if its worker is killed."""
    prepare = writer.Job._prepare

    def fail(job: Any, images: list[int]) -> Any:
        if 5 in images:
            while job._advanced._sleeping_count.get_value() < 2:  # until both other workers wait
                time.sleep(0.01)
            if is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise DataError("unreachable")
        return prepare(job, images)

    monkeypatch.setattr(writer, "BLOCK_BYTES", 4_000)
    with monkeypatch.context() as patch:
        patch.setattr(writer.Job, "_prepare", fail)
        error, message = (WorkerError, "worker") if is_killed else (DataError, "unreachable")
        with pytest.raises(error, match=message):
            run("folder", images, tmp_path / "out", workers=3)
    run("folder", images, tmp_path / "out")
    assert find_problems(tmp_path / "out") == []


def with_small_files(arguments: tuple[str, ...]) -> None:
    """Run a command with a file size limit of 200 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    sys.argv = ["fastsiam", *arguments]
    cli.main()


def test_long_records_lie_within_one_page(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for name, width in (("a", 100), ("b", 2100), ("c", 300), ("d", 3100), ("e", 200)):
        picture(0, width=width, height=2000).save(tmp_path / "images" / f"{name}.jpg")
    (conversion,) = run("folder", tmp_path / "images", tmp_path / "out", raw=True, workers=2)
    store = BetonStore(conversion.path)
    page = store.page_size
    assert store.size.max() > 2**23 and page == 2**25
    assert (store.start // page == (store.start + store.size - 1) // page).all()


PLACE = jpeg(0).index(b"\xff\xc0") + 5
CODES = jpeg(0).index(b"\xff\xc4") + 2
BAD = {
    "corrupt.jpg": (jpeg(0)[:CODES] + b"\x00\x01" + jpeg(0)[CODES + 2 :], "header"),
    "truncated.jpg": (jpeg(0)[: len(jpeg(0)) * 2 // 3], "truncated"),
    "zero.jpg": (b"", "it is empty"),
    "huge.jpg": (
        jpeg(0)[:PLACE] + b"\xff\x00\xff\x00" + jpeg(0)[PLACE + 4 :],
        "it declares 65,280 x 65,280 pixels",
    ),
    "te\x1bxt.jpg": (b"this is no image", "it is not an image"),
    "damaged.jpg": (jpeg(0)[:-99] + b"\xff\xd8" + jpeg(0)[-97:], "broken data stream"),
    "cut.png": (encoded(picture(0), "PNG")[:300], "truncated|broken|unrecognized"),
}
"""Bad images of every kind, and a pattern for the reported reason."""


def test_all_bad_images_are_listed_and_can_be_skipped(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", classes=2, each=6)
    for name, (data, _) in BAD.items():
        (folder / "class1" / name).write_bytes(data)
    out = tmp_path / "out"
    arguments = ["convert", "folder", "--source", str(folder), "--out", str(out), "--workers", "2"]
    result = fastsiam(*arguments, code=1)
    lines = result.stderr.splitlines()
    assert lines[-1].startswith("error: 7 of 19 images of ") and "--skip-bad" in lines[-1]
    for name, (_, reason) in BAD.items():
        (line,) = [line for line in lines if repr(name)[1:-1] in line]
        assert re.search(reason, line), line
    assert not (out / "train.beton").exists() and "Traceback" not in result.stderr
    result = fastsiam(*arguments, "--skip-bad")
    assert "resuming train.beton: 19 images are done and verified" in result.stderr
    assert "bad images left out: 7" in result.stdout
    manifest = json.loads((out / "manifest.json").read_text())
    left_out = manifest["files"]["train.beton"]["left_out"]
    assert {Path(item["name"]).name for item in left_out} == set(BAD)
    store = open_store(out, "train")
    assert len(store) == 12 and store.labels.tolist() == [0] * 6 + [1] * 6
    assert find_problems(out) == []


@pytest.mark.parametrize("name", ["train.beton.partial", "manifest.json"])
def test_folder_in_place_of_file_is_error(name: str, images: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    with pytest.raises(DataError, match=r"^cannot write .*: Is a directory; check the path"):
        run("folder", images, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json.tmp").exists()


SMALL_JPEG = base64.b64decode(
    """
    /9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAFA3PEY8MlBGQUZaVVBfeMiCeG5uePWvuZHI////////////////////////
    ////////////////////////////2wBDAVVaWnhpeOuCguv/////////////////////////////////////////////
    ////////////////////////////wAARCAAQABgDASIAAhEBAxEB/8QAFwAAAwEAAAAAAAAAAAAAAAAAAAMEAv/EABYQ
    AQEBAAAAAAAAAAAAAAAAAAADQv/EABUBAQEAAAAAAAAAAAAAAAAAAAEC/8QAGhEAAgIDAAAAAAAAAAAAAAAAAAEDEhEx
    Yf/aAAwDAQACEQMRAD8AwVbJgUo+i5MrRMFINCLH/9k=
    """
)
"""24 x 16 pixels. Its bytes are fixed here, because encoders differ between versions of libjpeg."""


@pytest.mark.parametrize(
    ("ending", "options", "digest"),
    [
        ("jpg", {}, "eb75d07872c7927cc500d04ce5034b4c6cb4372e75bbb1b18f9813b58d926f63"),
        ("ppm", {"raw": True}, "b1457005e0bbe52197c4f0475219c1021925e4db64266a18a5d12e8e3f0e49a7"),
    ],
)
def test_bytes_of_converted_file_are_pinned(
    ending: str,
    options: dict[str, bool],
    digest: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A change of these bytes is a change of the format: earlier files must remain readable.

    The version, the address of the source and the modification times are held fixed. The annex's
    arrays are written without the .npz archive, whose bytes depend on zlib, Python and NumPy.
    """

    def write_arrays(file: IO[bytes], **arrays: NDArray[Any]) -> None:
        for name, array in arrays.items():
            file.write(f"{name} {array.dtype.str}\n".encode() + array.tobytes())

    for number, label in enumerate("aab"):
        data = {
            "jpg": SMALL_JPEG[:2] + b"\xff\xfe\0\x03" + bytes([number]) + SMALL_JPEG[2:],
            "ppm": b"P6 5 4 255\n" + bytes(range(number, number + 60)),
        }
        image = put(tmp_path / "images" / label / f"{number}.{ending}", data[ending])
        os.utime(image, (10**9, 10**9))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fastsiam.__version__", "0")
    monkeypatch.setattr(np, "savez_compressed", write_arrays)
    (conversion,) = run("folder", "images", Path("out"), **options)
    assert hashlib.sha256(conversion.path.read_bytes()).hexdigest() == digest
