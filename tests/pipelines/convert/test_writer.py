"""One file from any number of processes; bad images and deaths; what cannot be written."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from pathlib import Path

import pytest

from fastsiam import cli
from fastsiam.errors import DataError, WorkerError
from fastsiam.pipelines.convert import layout, prepare
from fastsiam.pipelines.store import BetonStore, open_store
from tests.conftest import write_images
from tests.conversions import checked, run
from tests.processes import Forked, fastsiam
from tests.sources import encoded, jpeg, picture


def test_an_existing_file_is_never_overwritten(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("folder", images, out)
    before = (out / "train.beton").read_bytes()
    with pytest.raises(DataError, match=r"exists already and was made with other options"):
        run("folder", images, out, max_side=10)
    os.utime(images / "train" / "class0" / "000.jpg", (1, 1))
    with pytest.raises(DataError, match="of other images, or of files with other times"):
        run("folder", images, out)
    assert (out / "train.beton").read_bytes() == before


def test_a_full_disk_is_one_line_and_no_half_file(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk's end; afterwards it continues."""
    write_images(tmp_path / "images", classes=2, each=100, side=80)
    out = tmp_path / "out"
    arguments = ("convert", "folder", "--source", str(tmp_path / "images"), "--out", str(out))
    done = Forked(with_small_files, arguments).wait(120)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert re.search(r"no space for .* needs about \d\.\d MB more, and .* free.* to resume", line)
    assert "Traceback" not in done.stderr and not (out / "train.beton").exists()
    fastsiam(*arguments)
    assert checked(out) == []


def with_small_files(arguments: tuple[str, ...]) -> None:
    """Run a command that may not write a file of more than 200 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    sys.argv = ["fastsiam", *arguments]
    cli.main()


def test_the_file_is_the_same_for_any_number_of_workers(
    real_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "BLOCK_BYTES", 2**20)  # many blocks
    files = []
    for workers in (1, 2, 5):
        (written,) = run("folder", real_images, tmp_path / str(workers), workers=workers)
        files.append(written.path.read_bytes())
    assert files[0] == files[1] == files[2]
    assert len(written.about["blocks"]) > 30
    assert checked(tmp_path / "1") == []


def test_long_records_lie_within_one_page(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for name, width in (("a", 100), ("b", 2100), ("c", 300), ("d", 3100), ("e", 200)):
        picture(0, width=width, height=2000).save(tmp_path / "images" / f"{name}.jpg")
    (written,) = run("folder", tmp_path / "images", tmp_path / "out", raw=True, workers=2)
    store = BetonStore(written.path)
    page = store.page_size
    assert store.size.max() > 2**23 and page == 2**25
    assert (store.start // page == (store.start + store.size - 1) // page).all()


def spoil(folder: Path) -> dict[str, str]:
    """Put one image of every bad kind among good ones; return name -> reason."""
    write_images(folder, classes=2, each=6)
    huge = bytearray(jpeg(0))
    place = huge.index(b"\xff\xc0") + 5
    huge[place : place + 4] = b"\xff\x00\xff\x00"
    damaged = bytearray(jpeg(0))
    start = damaged.index(b"\xff\xc4")
    damaged[start + 2 : start + 4] = b"\x00\x01"
    for name, data in {
        "corrupt.jpg": bytes(damaged),
        "truncated.jpg": jpeg(0)[: len(jpeg(0)) * 2 // 3],
        "zero.jpg": b"",
        "huge.jpg": bytes(huge),
        "text.jpg": b"this is no image",
        "cut.png": encoded(picture(0), "PNG")[:300],
    }.items():
        (folder / "class1" / name).write_bytes(data)
    return {
        "corrupt.jpg": "header",
        "truncated.jpg": "truncated",
        "zero.jpg": "it is empty",
        "huge.jpg": "it declares 65,280 x 65,280 pixels",
        "text.jpg": "it is not an image",
        "cut.png": "truncated|broken|unrecognized",
    }


def test_bad_images_are_all_listed_and_can_be_left_out(tmp_path: Path) -> None:
    reasons = spoil(tmp_path / "images")
    arguments = ["convert", "folder", "--source", str(tmp_path / "images"), "--out"]
    arguments += [str(tmp_path / "out"), "--workers", "2"]
    done = fastsiam(*arguments, code=1)
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("error: 6 of 18 images of ") and "--skip-bad" in lines[-1]
    for name, reason in reasons.items():
        (line,) = [line for line in lines if name in line]
        assert re.search(reason, line), line
    assert not (tmp_path / "out" / "train.beton").exists()
    assert "Traceback" not in done.stderr
    done = fastsiam(*arguments, "--skip-bad")
    assert "resuming train.beton: 18 images are done and verified" in done.stderr
    assert "bad and left out: 6" in done.stdout
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    left_out = manifest["files"]["train.beton"]["left_out"]
    assert {Path(item["name"]).name for item in left_out} == set(reasons)
    store = open_store(tmp_path / "out", "train")
    assert len(store) == 12 and store.labels.tolist() == [0] * 6 + [1] * 6
    assert checked(tmp_path / "out") == []


def test_a_worker_that_dies_is_one_line(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(prepare, "prepare", die)
    with pytest.raises(WorkerError, match=r"a worker process died .*: lower --workers"):
        run("folder", images, tmp_path / "out")


@pytest.mark.parametrize("name", ["train.beton.partial", "manifest.json"])
def test_a_folder_in_the_place_of_a_file(name: str, images: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    with pytest.raises(DataError, match=r"^cannot write .*: Is a directory; check the path"):
        run("folder", images, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json.tmp").exists()
