"""``convert --yuv``: JPEGs become planes of the same pixels, in files that FFCV itself refuses."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fastsiam.config import ConvertConfig
from fastsiam.errors import BackendError
from fastsiam.jobs.convert import convert_data
from fastsiam.kernels import planes
from fastsiam.pipelines.convert import convert, layout, plan
from fastsiam.pipelines.convert.prepare import prepare
from fastsiam.pipelines.store import BetonStore, open_store
from fastsiam.pipelines.store.beton import JPEG, PLANES, RAW
from fastsiam.pipelines.store.decode import decode
from tests.conftest import write_images
from tests.conversions import Quiet, checked, go_on, run, same_images
from tests.sources import encoded, jpeg, picture, rotated_jpeg

YUV = ConvertConfig(yuv=True)


pytestmark = pytest.mark.usefixtures("planes_compiled")


def pixels(data: bytes | memoryview) -> NDArray[np.uint8]:
    return np.asarray(decode(data))


@pytest.mark.parametrize(
    "data",
    [
        jpeg(0),
        jpeg(0, progressive=True),
        jpeg(0, quality=30, subsampling=0),
        jpeg(0) + b"padding after the end",
        encoded(picture(0).convert("L")),
        rotated_jpeg(0),
    ],
    ids=["plain", "progressive", "full chroma", "padded", "gray", "rotated"],
)
def test_a_jpeg_of_any_coding_keeps_its_pixels(data: bytes) -> None:
    record = prepare(memoryview(data), None, YUV)
    assert (record.mode, record.how) == (PLANES, "planes")
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert (record.height, record.width) == expected.shape[:2]
    np.testing.assert_array_equal(pixels(record.data), expected)


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (encoded(picture(0), "PNG"), {}),
        (encoded(picture(0).convert("CMYK"), quality=95), {"quality": 60}),
        (jpeg(0, keep_rgb=True, quality=95), {}),
        (jpeg(0), {"short_side": 20}),
        (encoded(picture(0).convert("L")), {"max_side": 20, "quality": 70}),
    ],
    ids=["PNG", "CMYK", "RGB", "shrunk", "gray and shrunk"],
)
def test_others_are_planes_of_the_jpeg_that_would_be_stored(
    data: bytes, options: dict[str, int]
) -> None:
    config = ConvertConfig(**options)  # type: ignore[arg-type]
    as_jpeg, as_planes = prepare(data, None, config), prepare(data, None, replace(config, yuv=True))
    assert (as_jpeg.mode, as_planes.mode) == (JPEG, PLANES)
    assert as_planes.how == f"{as_jpeg.how}, planes"
    assert (as_planes.height, as_planes.width) == (as_jpeg.height, as_jpeg.width)
    np.testing.assert_array_equal(pixels(as_planes.data), pixels(as_jpeg.data))


def test_a_doubtful_jpeg_stays_one() -> None:
    data = jpeg(0, quality=95)[:-200] + b"\xff\xd9"  # decoders make up what lacks
    record = prepare(data, None, YUV)
    assert (record.mode, record.how, bytes(record.data)) == (JPEG, "unchanged", data)


def test_planes_that_give_other_pixels_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    data, made = jpeg(0), planes.to_pixels
    monkeypatch.setattr(planes, "to_pixels", lambda record: made(record) ^ 1)
    record = prepare(data, None, YUV)
    assert record.mode == JPEG and record.data == data


def test_what_comes_as_pixels_stays_so() -> None:
    data = np.asarray(picture(0)).tobytes()
    assert prepare(data, (30, 40), YUV).mode == RAW
    assert prepare(data, (30, 40), replace(YUV, short_side=20)).mode == RAW
    record = prepare(data, (30, 40), replace(YUV, raw=False))
    assert (record.mode, record.how) == (PLANES, "re-encoded: pixels, planes")


def test_yuv_and_raw_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        ConvertConfig(yuv=True, raw=True)


def mixed(folder: Path) -> Path:
    """Write images of which one stays a JPEG."""
    write_images(folder / "train", each=5)
    data = jpeg(7, quality=95)
    (folder / "train" / "class1" / "doubtful.jpg").write_bytes(data[:-200] + b"\xff\xd9")
    return folder / "train"


def test_a_file_of_planes_and_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = mixed(tmp_path / "images"), tmp_path / "out"
    config = ConvertConfig(source=str(source), out=str(out), yuv=True, workers=1)
    (written,) = convert_data("folder", config)
    said = capsys.readouterr().out
    assert "15 planes, 1 unchanged" in said and "FFCV's own readers refuse" in said
    assert written.about["planes"] == 15 and written.about["raw"] == 0
    store, folder = BetonStore(written.path), open_store(source, "train")
    assert sorted(store.modes.tolist()) == [JPEG] + [PLANES] * 15
    for index in range(len(store)):
        if store.modes[index] == PLANES:
            ours, theirs = store.decode(index), folder.decode(index)
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert checked(out, decode=False) == []
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["files"]["train.beton"] == written.about
    go_on(source, out, yuv=True, workers=2)  # it is there already
    with pytest.raises(Exception, match="made with another --yuv"):
        go_on(source, out)


def test_the_same_bytes_however_many_workers(tmp_path: Path) -> None:
    source = mixed(tmp_path / "images")
    (one,) = run("folder", source, tmp_path / "one", yuv=True, workers=1)
    (two,) = run("folder", source, tmp_path / "two", yuv=True, workers=3)
    assert one.path.read_bytes() == two.path.read_bytes()


def test_stopped_it_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Quiet):
        def progress(self, images: int, size: int) -> None:
            if images > 4:
                raise KeyboardInterrupt

    source, out = mixed(tmp_path / "images"), tmp_path / "out"
    monkeypatch.setattr(layout, "BLOCK_BYTES", 2_000)
    with pytest.raises(KeyboardInterrupt):
        convert("folder", ConvertConfig(source=str(source), out=str(out), yuv=True), Stop())
    assert any("going on with train.beton" in line for line in go_on(source, out, yuv=True))
    (straight,) = run("folder", source, tmp_path / "straight", yuv=True)
    assert (out / "train.beton").read_bytes() == straight.path.read_bytes()


def test_parts_and_a_file_of_them(tmp_path: Path) -> None:
    source = write_images(tmp_path / "images" / "train", each=5)
    for part in ("1/2", "2/2"):
        run("folder", source, tmp_path / "parts", yuv=True, part=part)
    (whole,) = run("folder", source, tmp_path / "whole", yuv=True)
    (joined,) = run("folder", tmp_path / "parts", tmp_path / "joined", yuv=True)
    same_images(BetonStore(joined.path), BetonStore(whole.path))
    assert joined.about["stored"] == {"unchanged": 15} and joined.about["planes"] == 15


def test_planes_as_a_source_of_jpegs_and_of_pixels(tmp_path: Path) -> None:
    source = write_images(tmp_path / "images" / "train", each=2)
    (made,) = run("folder", source, tmp_path / "planes", yuv=True)
    (raw,) = run("folder", made.path, tmp_path / "raw", raw=True)
    (back,) = run("folder", made.path, tmp_path / "jpegs")
    store = BetonStore(raw.path)
    assert set(store.modes.tolist()) == {RAW}
    assert set(BetonStore(back.path).modes.tolist()) == {JPEG}
    for index in range(len(store)):
        expected = np.asarray(open_store(source, "train").decode(index))
        np.testing.assert_array_equal(np.asarray(store.decode(index)), expected)


def test_damage_is_found(tmp_path: Path) -> None:
    source = write_images(tmp_path / "images" / "train", each=2)
    (made,) = run("folder", source, tmp_path / "out", yuv=True)
    assert checked(made.path) == []
    start, data = int(BetonStore(made.path).start[3]), bytearray(made.path.read_bytes())
    data[start + 4] += 1  # its height
    made.path.write_bytes(data)
    (found,) = checked(made.path)
    assert "image 3" in found and "not those that were written" in found
    with pytest.raises(Exception, match=r"cannot decode image 3 .*not as large as it says"):
        BetonStore(made.path).decode(3)


def test_without_the_code_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise BackendError("no compiled code")

    monkeypatch.setattr(planes, "_maker", missing)
    source = write_images(tmp_path / "images" / "train", each=2)
    with pytest.raises(BackendError, match="no compiled code"):
        run("folder", source, tmp_path / "out", yuv=True)
    assert not (tmp_path / "out").exists()
    run("folder", source, tmp_path / "out")


def test_files_of_versions_without_the_option_are_taken_for_done() -> None:
    assert "yuv" not in plan._options(ConvertConfig()) and "yuv" in plan._options(YUV)


@pytest.mark.ffcv
def test_ffcv_refuses_planes_and_nothing_else(tmp_path: Path) -> None:
    from ffcv.reader import Reader

    source = write_images(tmp_path / "images" / "train", each=2)
    (made,) = run("folder", source, tmp_path / "planes", yuv=True)
    with pytest.raises(ValueError, match="custom field image"):
        Reader(str(made.path))
    (jpegs,) = run("folder", source, tmp_path / "jpegs")
    assert Reader(str(jpegs.path)).num_samples == 6
