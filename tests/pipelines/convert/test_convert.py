"""Any source into one file: what is kept, what is made anew, what is refused, what is resumed."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastsiam.config import ConvertConfig, TrainConfig
from fastsiam.errors import DataError
from fastsiam.pipelines.convert import BadImagesError, Written, blocks, convert, layout
from fastsiam.pipelines.convert.journal import Block
from fastsiam.pipelines.convert.prepare import prepare
from fastsiam.pipelines.store import BetonStore, FolderStore, JoinedStore, Store, open_store
from fastsiam.pipelines.store.beton import JPEG, RAW
from fastsiam.training.metrics import read_metrics
from tests.conftest import ROOT, fastsiam, flags, with_settings, write_images
from tests.pipelines.store.test_beton import Quiet, checked
from tests.sources import (
    CIFAR_CLASSES,
    VAL_WNIDS,
    WNIDS,
    cifar,
    encoded,
    evil_pickle,
    folder_members,
    imagenet,
    imagenet_train_tar,
    jpeg,
    parquet,
    picture,
    python2_pickle,
    rotated_jpeg,
    tar,
)


def run(kind: str, source: Path, out: Path, **options: object) -> list[Written]:
    config = ConvertConfig(source=str(source), out=str(out), **options)  # type: ignore[arg-type]
    return convert(kind, config, Quiet())  # type: ignore[arg-type]


def same_images(store: Store, other: Store) -> None:
    assert store.classes == other.classes
    np.testing.assert_array_equal(store.labels, other.labels)
    for i in range(len(other)):
        assert bytes(store.read(i)) == bytes(other.read(i))


# --- one image ------------------------------------------------------------------------------------


def how(data: bytes, **options: object) -> tuple[str, Image.Image]:
    """Return what was done to an image, and how it looks now."""
    record = prepare(data, None, ConvertConfig(**options))  # type: ignore[arg-type]
    if record.mode == RAW:
        pixels = np.frombuffer(record.data, np.uint8).reshape(record.height, record.width, 3)
        return record.how, Image.fromarray(pixels)
    image = Image.open(io.BytesIO(record.data))
    assert image.format == "JPEG" and image.mode == "RGB"
    assert image.size == (record.width, record.height)
    return record.how, image


@pytest.mark.parametrize(
    "data",
    [
        jpeg(0),
        jpeg(0, progressive=True),
        jpeg(0, quality=30, subsampling=0),
        jpeg(0, icc_profile=b"wide gamut" * 9000),
        jpeg(0) + b"padding after the end",
    ],
)
def test_a_plain_jpeg_keeps_its_bytes(data: bytes) -> None:
    record = prepare(memoryview(data), None, ConvertConfig())
    assert record.data == data and record.how == "unchanged" and record.mode == JPEG
    assert (record.width, record.height) == (40, 30)
    assert prepare(data, None, ConvertConfig(max_side=40, short_side=30)).data == data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encoded(picture(0), "PNG"), "not a JPEG"),
        (encoded(picture(0).convert("L")), "gray"),
        (encoded(picture(0).convert("CMYK"), quality=95), "CMYK"),
        (jpeg(0, keep_rgb=True, quality=95), "unusual JPEG"),
    ],
)
def test_others_are_encoded_once_and_look_the_same(data: bytes, reason: str) -> None:
    done, image = how(data)
    assert done == f"re-encoded: {reason}"
    source = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    assert np.abs(np.asarray(image) - source).mean() < 5


def test_a_rotation_is_left_out_without_recompression() -> None:
    data = rotated_jpeg(0)
    done, image = how(data)
    assert done == "EXIF rotation left out" and 0x112 not in image.getexif()
    np.testing.assert_array_equal(np.asarray(image), np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"max_side": 20}, (20, 15)),
        ({"short_side": 20}, (27, 20)),
        ({"max_side": 20, "short_side": 20}, (20, 15)),
        ({"max_side": 400, "short_side": 15}, (20, 15)),
    ],
)
def test_shrinking(options: dict[str, int], size: tuple[int, int]) -> None:
    data = encoded(picture(0), "JPEG", quality=100, subsampling=0)
    done, image = how(data, quality=100, **options)
    assert done == "re-encoded: resized" and image.size == size
    wanted = Image.open(io.BytesIO(data)).resize(size, Image.Resampling.LANCZOS)
    assert np.abs(np.asarray(image).astype(int) - np.asarray(wanted)).mean() < 6


def test_quality_makes_files_smaller() -> None:
    png = encoded(picture(0), "PNG")
    sizes = [len(prepare(png, None, ConvertConfig(quality=q)).data) for q in (40, 95)]
    assert sizes[0] < 0.7 * sizes[1]


def test_pixels_are_the_decoded_ones() -> None:
    done, image = how(jpeg(0), raw=True)
    assert done == "decoded to pixels"
    np.testing.assert_array_equal(np.asarray(image), np.asarray(Image.open(io.BytesIO(jpeg(0)))))


def test_a_declared_bomb_is_refused_before_it_is_decoded() -> None:
    data = bytearray(jpeg(0))
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = b"\xff\x00\xff\x00"
    with pytest.raises(ValueError, match="it declares 65,280 x 65,280 pixels"):
        prepare(bytes(data), None, ConvertConfig())


def test_many_rotating_segments_are_cut_at_once() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    body = exif.tobytes()
    segment = b"\xff\xe1" + (len(body) + 2).to_bytes(2, "big") + body
    data = jpeg(0)
    record = prepare(data[:2] + segment * 5000 + data[2:], None, ConvertConfig())
    assert record.data == data and record.how == "EXIF rotation left out"


def test_a_jpeg_that_ends_in_zeros_is_bad() -> None:
    """As a power cut leaves it: Pillow decodes it without a word."""
    data = jpeg(0)
    half = len(data) * 3 // 4
    with pytest.raises(ValueError, match="it has no end marker"):
        prepare(data[:half] + bytes(len(data) - half), None, ConvertConfig())


def test_shrunk_pixels_stay_pixels() -> None:
    pixels = np.asarray(picture(0)).tobytes()
    record = prepare(pixels, (30, 40), ConvertConfig(max_side=20))
    assert record.mode == RAW and (record.width, record.height) == (20, 15)
    assert prepare(pixels, (30, 40), ConvertConfig(raw=False)).mode == JPEG


def test_sides_that_jpeg_cannot_have() -> None:
    png = encoded(Image.new("RGB", (65_520, 1)), "PNG")
    with pytest.raises(ValueError, match="a side above 65,500"):
        prepare(png, None, ConvertConfig())


# --- whole data sets ------------------------------------------------------------------------------


def test_a_folder_with_two_splits(images: Path, tmp_path: Path) -> None:
    train, val = run("folder", images, tmp_path / "out")
    assert [train.path.name, val.path.name] == ["train.beton", "val.beton"]
    for split in ("train", "val"):
        same_images(open_store(tmp_path / "out", split), open_store(images, split))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["files"]["train.beton"] == train.about
    assert manifest["classes"] == ["class0", "class1", "class2"]
    count = len(open_store(images, "train"))
    about = train.about
    assert about["images"] == count and about["stored"] == {"unchanged": count}
    assert about["source"] == str(images / "train") and about["left_out"] == []
    assert sum(about["shorter_sides"].values()) == count
    assert sum(block["images"] for block in about["blocks"]) == count
    assert about["bytes"] == FolderStore(images / "train").sizes().sum()
    assert not list((tmp_path / "out").glob("*.partial")) + list((tmp_path / "out").glob("*.jour*"))
    assert checked(tmp_path / "out") == []


def test_a_flat_folder_has_no_labels(images: Path, tmp_path: Path) -> None:
    run("folder", images / "train" / "class1", tmp_path / "out")
    store = open_store(tmp_path / "out", "train")
    assert store.classes == () and set(store.labels.tolist()) == {-1}


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
    store = BetonStore(written.path)
    page = store.page_size
    assert (store.start // page == (store.start + store.bytes - 1) // page).all()
    assert checked(tmp_path / "1") == []


def test_the_same_file_from_a_folder_and_from_a_tar_of_tars(
    real_images: Path, tmp_path: Path
) -> None:
    imagenet_train_tar(tmp_path / "ILSVRC2012_img_train.tar", folder_members(real_images))
    (a,) = run("folder", real_images, tmp_path / "a")
    (b,) = run("imagenet", tmp_path, tmp_path / "b")
    one, two = BetonStore(a.path), BetonStore(b.path)
    same_images(one, two)
    assert [one.name(i) for i in range(len(one))] == [two.name(i) for i in range(len(two))]
    assert a.about["stored"] == b.about["stored"] == {"re-encoded: gray": 9, "unchanged": 491}
    assert [block["crc32"] for block in a.about["blocks"]]


def test_the_official_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no options: found under the data root, converted beside them, read from there."""
    monkeypatch.setenv("FASTSIAM_DATA", str(tmp_path))
    imagenet(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    done = fastsiam("convert", "imagenet")
    assert "train.beton: 9 images of 3 classes" in done.stdout
    left = {path.name for path in tmp_path.iterdir()} - before
    assert {name for name in left if not name.startswith(".")} == {
        "train.beton",
        "val.beton",
        "manifest.json",
    }
    train, val = open_store(tmp_path, "train"), open_store(tmp_path, "val")
    assert isinstance(train, BetonStore) and train.classes == val.classes == WNIDS
    assert [val.classes[label] for label in val.labels] == list(VAL_WNIDS)
    again = fastsiam("convert", "imagenet")
    assert "is there already" in again.stderr
    assert "whole" in fastsiam("convert", "verify", str(tmp_path), "--decode").stdout


@pytest.mark.parametrize("place", ["", "imagenet", "ILSVRC/Data/CLS-LOC"])
def test_imagenet_in_folders(place: str, tmp_path: Path) -> None:
    for wnid in WNIDS:
        for split in ("train", "val"):
            path = tmp_path / place / split / wnid / f"{wnid}_1.JPEG"
            path.parent.mkdir(parents=True)
            path.write_bytes(jpeg(1))
    written = run("imagenet", tmp_path, tmp_path / "out")
    assert [w.about["images"] for w in written] == [3, 3]


def test_nothing_found_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("x")
    with pytest.raises(DataError) as caught:
        run("imagenet", tmp_path, tmp_path)
    for word in ("ILSVRC2012_img_train.tar", "parquet", "image-net.org", "--source", str(tmp_path)):
        assert word in str(caught.value)
    with pytest.raises(DataError, match="cifar-10-python"):
        run("cifar10", tmp_path, tmp_path)
    with pytest.raises(DataError, match=r"no data at .*nowhere"):
        run("folder", tmp_path / "nowhere", tmp_path)


def test_hugging_faces_parquet(tmp_path: Path) -> None:
    rows = [(jpeg(i), f"{i}.JPEG", i % 3) for i in range(11)]
    names = ["tench", "goldfish", "shark"]
    for number, part in enumerate((rows[:7], rows[7:])):
        parquet(tmp_path / "data" / f"train-{number:05d}-of-00002.parquet", part, names)
    parquet(tmp_path / "data" / "validation-00000-of-00001.parquet", rows[:2], names)
    parquet(tmp_path / "data" / "test-00000-of-00001.parquet", [(jpeg(9), "t.JPEG", -1)], names)
    for kind in ("imagenet", "parquet"):
        train, val = run(kind, tmp_path, tmp_path / kind)
        store = BetonStore(train.path)
        assert store.classes == ("tench", "goldfish", "shark") and val.about["images"] == 2
        assert store.labels.tolist() == [i % 3 for i in range(11)]
        assert [bytes(store.read(i)) for i in range(11)] == [data for data, _, _ in rows]
        assert store.name(4) == "goldfish/4.JPEG"
        assert checked(tmp_path / kind) == []


def test_parquet_of_real_images(real_images: Path, tmp_path: Path) -> None:
    folder = FolderStore(real_images)
    rows: list[tuple[bytes | None, str, int]] = [
        (bytes(folder.read(i)), folder.name(i), i % 10) for i in range(0, 500, 5)
    ]
    parquet(tmp_path / "train.parquet", rows, [str(i) for i in range(10)], group=30)
    (written,) = run("parquet", tmp_path, tmp_path / "out", workers=2)
    store = BetonStore(written.path)
    unchanged = written.about["stored"]["unchanged"]
    assert sum(bytes(store.read(i)) == row[0] for i, row in enumerate(rows)) == unchanged > 90


def write_table(path: Path, **columns: object) -> None:
    import pyarrow as pa
    from pyarrow import parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def test_labels_of_other_types(tmp_path: Path) -> None:
    import pyarrow as pa

    images = [{"bytes": jpeg(i), "path": None} for i in range(3)]
    for number, (labels, classes, wanted) in enumerate(
        [
            (pa.array([2, 0, 1], pa.uint8()), ("0", "1", "2"), [2, 0, 1]),
            (pa.array(["cat", "ant", "cat"]), ("ant", "cat"), [1, 0, 1]),
            (pa.array(["cat", "ant", None]).dictionary_encode(), ("ant", "cat"), [1, 0, -1]),
            (pa.array([1, None, 0], pa.int32()), ("0", "1"), [1, -1, 0]),
        ]
    ):
        write_table(tmp_path / str(number) / "train.parquet", image=images, label=labels)
        (written,) = run("parquet", tmp_path / str(number), tmp_path / f"out{number}")
        store = BetonStore(written.path)
        assert store.classes == classes and store.labels.tolist() == wanted
        assert store.name(0) == f"{classes[wanted[0]]}/row 0"
    write_table(tmp_path / "x" / "train.parquet", image=images, label=[0.5, 1.0, 2.0])
    with pytest.raises(DataError, match="the labels in column 'label' are of type double"):
        run("parquet", tmp_path / "x", tmp_path / "outx")


def test_bare_bytes_and_damage_in_parquet(tmp_path: Path) -> None:
    data = [jpeg(i, quality=95) for i in range(200)]
    path = tmp_path / "a" / "x.parquet"
    write_table(path, jpg=data)
    (written,) = run("parquet", tmp_path / "a", tmp_path / "out")
    store = BetonStore(written.path)
    assert [bytes(store.read(i)) for i in range(200)] == data and store.name(7) == "row 7"
    whole = bytearray(path.read_bytes())
    whole[4:40] = bytes(36)
    path.write_bytes(whole)
    with pytest.raises(BadImagesError, match="none of the 200 images"):
        run("parquet", tmp_path / "a", tmp_path / "out2", skip_bad=True)
    with pytest.raises(DataError, match=r"holds no \.parquet files"):
        run("parquet", tmp_path / "out", tmp_path / "out3")


def test_odd_parquet(tmp_path: Path) -> None:
    rows: list[tuple[bytes | None, str, int]] = [(jpeg(0), "0", 0), (None, "1", 0)]
    parquet(tmp_path / "a" / "x.parquet", rows, ["one"])
    with pytest.raises(BadImagesError) as caught:
        run("parquet", tmp_path / "a", tmp_path / "out")
    assert "row has no bytes" in caught.value.bad[0][1]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match="is no whole parquet file"):
        run("parquet", tmp_path / "b", tmp_path / "out")
    with pytest.raises(DataError, match="convert parquet --source"):
        open_store(tmp_path / "a", "train")


def test_cifars_own_archive(tmp_path: Path) -> None:
    path = cifar(tmp_path / "cifar-10-python.tar.gz")
    train, val = run("cifar10", tmp_path, tmp_path / "out")
    assert train.about["stored"] == {"unchanged": 50} and train.about["raw"] == 50
    assert val.about["images"] == 5
    store, source = BetonStore(train.path), open_store(path, "train")
    assert store.classes == CIFAR_CLASSES and store.labels.tolist()[:12] == [*range(10), 0, 1]
    for i in range(50):
        np.testing.assert_array_equal(np.asarray(store.decode(i)), np.asarray(source.decode(i)))
    first = np.random.default_rng(0).integers(0, 256, (10, 3072), dtype=np.uint8)[0]
    np.testing.assert_array_equal(
        np.asarray(store.decode(0)), first.reshape(3, 32, 32).transpose(1, 2, 0)
    )
    (jpegs, _) = run("cifar10", tmp_path, tmp_path / "jpegs", raw=False)
    assert jpegs.about["stored"] == {"re-encoded: pixels": 50}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("evil", r"names posix\.mkdir, which CIFAR's files do not; nothing of it was run"),
        (b"\x80\x02garbage", "is damaged"),
        (python2_pickle([1, 2]), "is no file of CIFAR"),
        (python2_pickle({b"data": b"short", b"labels": [1]}), "is damaged"),
    ],
)
def test_a_pickle_runs_nothing(extra: str | bytes, message: str, tmp_path: Path) -> None:
    target = tmp_path / "made-by-the-pickle"
    content = evil_pickle(target) if extra == "evil" else bytes(extra)  # type: ignore[arg-type]
    cifar(tmp_path / "cifar-10-python.tar.gz", extra=content)
    with pytest.raises(DataError, match=message):
        run("cifar10", tmp_path, tmp_path / "out")
    assert not target.exists()


def test_cifar10_as_files_becomes_pixels(cifar10: Path, tmp_path: Path) -> None:
    """The zip of JPEGs, unzipped -> folder -> .beton."""
    train, val = run("cifar10", cifar10, tmp_path / "out", raw=True, limit=2000)
    store = BetonStore(train.path)
    assert np.bincount(store.labels).tolist() == [200] * 10 and val.about["images"] == 2000
    folder = FolderStore(cifar10 / "train")
    place = {folder.name(i): i for i in range(len(folder))}
    for i in range(0, 2000, 97):
        source = folder.decode(place[store.name(i)])
        np.testing.assert_array_equal(np.asarray(store.decode(i)), np.asarray(source))


def test_limit_keeps_the_balance_and_the_seed_chooses(tmp_path: Path) -> None:
    write_images(tmp_path / "images", classes=2, each=30)
    write_images(tmp_path / "more", classes=1, each=40)
    shutil.move(tmp_path / "more" / "class0", tmp_path / "images" / "class9")
    names: list[list[str]] = []
    for seed in (0, 0, 1):
        out = tmp_path / f"out{len(names)}"
        (written,) = run("folder", tmp_path / "images", out, limit=20, seed=seed)
        store = BetonStore(written.path)
        assert np.bincount(store.labels).tolist() == [6, 6, 8]
        names.append([store.name(i) for i in range(20)])
    assert names[0] == names[1] != names[2] and names[0] == sorted(names[0])


def test_a_small_limit_takes_classes_at_random(tmp_path: Path) -> None:
    write_images(tmp_path / "images", classes=12, each=2)
    chosen = set()
    for seed in range(3):
        (written,) = run("folder", tmp_path / "images", tmp_path / str(seed), limit=6, seed=seed)
        chosen.add(tuple(BetonStore(written.path).labels.tolist()))
    assert len(chosen) > 1 and all(len(set(labels)) == 6 for labels in chosen)


def test_long_records_lie_within_one_page(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for name, width in (("a", 100), ("b", 2100), ("c", 300), ("d", 3100), ("e", 200)):
        picture(0, width=width, height=2000).save(tmp_path / "images" / f"{name}.jpg")
    (written,) = run("folder", tmp_path / "images", tmp_path / "out", raw=True, workers=2)
    store = BetonStore(written.path)
    page = store.page_size
    assert store.bytes.max() > 2**23 and page == 2**25
    assert (store.start // page == (store.start + store.bytes - 1) // page).all()


def test_a_block_that_grows_is_written_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same file."""
    write_images(tmp_path / "images", classes=3, each=40, side=40)
    monkeypatch.setattr(layout, "BLOCK_BYTES", 20_000)
    files = []
    for number, held in enumerate((2**26, 10_000)):
        monkeypatch.setattr(blocks, "_HELD_BYTES", held)
        out = tmp_path / str(number)
        (written,) = run("folder", tmp_path / "images", out, raw=True, workers=3)
        files.append(written.path.read_bytes())
    assert files[0] == files[1] and len(written.about["blocks"]) > 3


def test_a_damaged_file_as_the_source(images: Path, tmp_path: Path) -> None:
    (written, _) = run("folder", images, tmp_path / "first")
    store = BetonStore(written.path)
    data = bytearray(written.path.read_bytes())
    data[store.start[2] + 50] ^= 1
    written.path.write_bytes(data)
    with pytest.raises(BadImagesError) as caught:
        run("folder", tmp_path / "first", tmp_path / "second")
    assert caught.value.bad[0][1] == "its bytes are not those that were written into its file"


@pytest.mark.parametrize("options", [{"max_side": 10}, {"limit": 9}, {"quality": 50}])
def test_parts_of_different_conversions_are_refused(
    options: dict[str, int], images: Path, tmp_path: Path
) -> None:
    run("folder", images, tmp_path / "out", part="1/2")
    run("folder", images, tmp_path / "out", part="2/2", **options)
    with pytest.raises(DataError, match="of different images or with different options"):
        open_store(tmp_path / "out", "train")


def test_a_split_too_small_for_its_parts_is_the_first_parts(tmp_path: Path) -> None:
    write_images(tmp_path / "images" / "train", each=5)
    write_images(tmp_path / "images" / "val", classes=2, each=1)
    for number in (3, 2, 1):
        run("folder", tmp_path / "images", tmp_path / "out", part=f"{number}/3")
    assert len(open_store(tmp_path / "out", "train")) == 15
    assert len(open_store(tmp_path / "out", "val")) == 2
    assert checked(tmp_path / "out") == []


def test_fewer_images_than_parts(tmp_path: Path) -> None:
    write_images(tmp_path / "images", classes=2, each=1)
    arguments = ["convert", "folder", "--source", str(tmp_path / "images")]
    arguments += ["--out", str(tmp_path / "out"), "--part"]
    assert "part 2/3 has no images" in fastsiam(*arguments, "2/3").stdout
    fastsiam(*arguments, "1/3")
    assert len(open_store(tmp_path / "out", "train")) == 2


def test_imagenet_without_validation_labels(tmp_path: Path) -> None:
    imagenet(tmp_path)
    (tmp_path / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    quiet = Quiet()
    config = ConvertConfig(source=str(tmp_path), out=str(tmp_path / "out"))
    assert [w.path.name for w in convert("imagenet", config, quiet)] == ["train.beton"]
    assert quiet.said[0].startswith("no val.beton: ") and "devkit" in quiet.said[0]


def test_where_it_goes_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what was found: two data sets under one root do not meet."""
    monkeypatch.setenv("FASTSIAM_DATA", str(tmp_path))
    imagenet(tmp_path / "imagenet")
    (tmp_path / "cifar10").mkdir()
    cifar(tmp_path / "cifar10" / "cifar-10-python.tar.gz")
    for kind in ("imagenet", "cifar10"):
        written = convert(kind, ConvertConfig(), Quiet())
        assert {w.path.parent for w in written} == {tmp_path / kind}
    with pytest.raises(DataError, match="holds data sets of their own: name one"):
        open_store(tmp_path, "train")


def test_the_demos_images(tmp_path: Path) -> None:
    done = fastsiam("convert", "demo", "--out", str(tmp_path / "demo"))
    assert "train.beton: 4,000 images of 10 classes" in done.stdout
    assert len(open_store(tmp_path / "demo", "val")) == 1000
    done = fastsiam("convert", "demo", "--source", str(tmp_path), code=1)
    assert done.stderr == "error: the demo makes its images itself: leave --source out\n"


def test_parts_are_one_data_set(images: Path, tmp_path: Path) -> None:
    """As a SLURM array makes them; then merged into one file."""
    out = tmp_path / "parts"
    for number in (2, 1):
        run("folder", images, out, part=f"{number}/3")
    with pytest.raises(DataError, match="lacks of the 3 parts of its train images: 3"):
        open_store(out, "train")
    run("folder", images, out, part="3/3")
    assert sorted(path.name for path in out.glob("*.beton"))[0] == "train-00001-of-00003.beton"
    store = open_store(out, "train")
    assert isinstance(store, JoinedStore)
    same_images(store, open_store(images, "train"))
    same_images(open_store(out, "val"), open_store(images, "val"))
    assert store.where(len(store) - 1).startswith("image ")
    assert checked(out) == []
    run("folder", out, tmp_path / "merged")
    run("folder", images, tmp_path / "whole")
    merged, whole = (BetonStore(tmp_path / n / "train.beton") for n in ("merged", "whole"))
    same_images(merged, whole)
    assert merged.name(3) == whole.name(3)
    (out / "val-00002-of-00003.beton").unlink()
    assert "lacks of the 3 parts of its val images: 2" in checked(out)[0]


def test_a_converted_set_shows_the_same_views(images: Path, tmp_path: Path) -> None:
    """Training from the folder, its tar and its .beton is the same to the last bit."""
    from fastsiam.config import AugmentConfig, DataConfig
    from fastsiam.pipelines import build_loader

    run("folder", images, tmp_path / "out")
    run("folder", images, tmp_path / "raw", raw=True)
    tar(tmp_path / "train.tar", folder_members(images / "train"))
    for pipeline in ("torchvision", "memory"):
        batches = []
        for data in (images, tmp_path / "out", tmp_path / "raw", tmp_path / "train.tar"):
            loader = build_loader(
                DataConfig(data=str(data), pipeline=pipeline, workers=1),
                AugmentConfig.alike(crop=16),
                batch=8,
            )
            batches.append(next(iter(loader.epoch(1))))
            loader.close()
        for batch in batches[1:]:
            np.testing.assert_array_equal(batch.view1.numpy(), batches[0].view1.numpy())
            np.testing.assert_array_equal(batch.view2.numpy(), batches[0].view2.numpy())


def test_a_tar_of_tars_trains_as_its_converted_file_does(
    small: TrainConfig, images: Path, tmp_path: Path
) -> None:
    """From the command line: nothing has to be converted, and it changes nothing."""
    path = imagenet_train_tar(tmp_path / "train.tar", folder_members(images / "train"))
    fastsiam("convert", "folder", "--source", str(path), "--out", str(tmp_path / "out"))
    losses = []
    for number, data in enumerate((path, tmp_path / "out")):
        run_folder = tmp_path / str(number)
        config = with_settings(small, data=str(data), out=str(run_folder), max_steps=3)
        fastsiam("train", *flags(config))
        losses.append([line["loss"] for line in read_metrics(run_folder)])
    assert losses[0] == losses[1] and len(losses[0]) == 3


@pytest.mark.dali
def test_dali_decodes_the_records_in_place(images: Path, tmp_path: Path) -> None:
    from nvidia.dali import Pipeline, fn

    (written, _) = run("folder", images, tmp_path / "out")
    store = BetonStore(written.path)
    records = [np.frombuffer(store.read(i), np.uint8) for i in range(8)]

    pipe = Pipeline(batch_size=8, num_threads=1, device_id=None)
    with pipe:
        data = fn.external_source(source=lambda: records, no_copy=True)
        pipe.set_outputs(fn.decoders.image(data, device="cpu"))
    pipe.build()
    (output,) = pipe.run()
    for i in range(8):
        difference = np.asarray(output.at(i)).astype(int) - np.asarray(store.decode(i))
        assert np.abs(difference).max() <= 1


# --- bad images -----------------------------------------------------------------------------------


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
        import re

        assert re.search(reason, line), line
    assert not (tmp_path / "out" / "train.beton").exists()
    assert "Traceback" not in done.stderr
    done = fastsiam(*arguments, "--skip-bad")
    assert "going on with train.beton: 18 images are done, and checked" in done.stderr
    assert "bad and left out: 6" in done.stdout
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    left_out = manifest["files"]["train.beton"]["left_out"]
    assert {Path(item["name"]).name for item in left_out} == set(reasons)
    store = open_store(tmp_path / "out", "train")
    assert len(store) == 12 and store.labels.tolist() == [0] * 6 + [1] * 6
    assert checked(tmp_path / "out") == []


def test_only_bad_images(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.jpg").write_bytes(b"")
    with pytest.raises(BadImagesError, match="none of the 1 images"):
        run("folder", tmp_path / "images", tmp_path / "out", skip_bad=True)


def test_damage_inside_a_jpeg_is_found_by_decoding(tmp_path: Path) -> None:
    """Pillow decodes a JPEG with a wrong byte; what it cannot decode, verify --decode names."""
    write_images(tmp_path / "images", classes=1, each=3)
    bad = tmp_path / "images" / "class0" / "001.jpg"
    data = bad.read_bytes()
    # Without its tables the header is whole and the end is there, but nothing can be decoded.
    start = data.index(b"\xff\xdb")
    end = data.index(b"\xff\xc0")
    bad.write_bytes(data[:start] + data[end:])
    run("folder", tmp_path / "images", tmp_path / "out")
    assert checked(tmp_path / "out", decode=False) == []
    (line,) = checked(tmp_path / "out", decode=True)
    assert "image 1 of" in line and "class0/001.jpg" in line
    done = fastsiam("convert", "verify", str(tmp_path / "out"), "--decode", code=1)
    assert "class0/001.jpg" in done.stderr and "NOT whole (1 fault)" in done.stdout


# --- verify ---------------------------------------------------------------------------------------


def test_verify_holds_files_against_the_manifest(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("folder", images, out)
    run("folder", images, tmp_path / "other", limit=9)
    shutil.copy(tmp_path / "other" / "train.beton", out / "train.beton")
    assert checked(out) == [f"{out / 'train.beton'} is another file than its manifest describes"]
    (out / "val.beton").unlink()
    assert f"{out / 'val.beton'} is in the manifest and not there" in checked(out)
    (out / "manifest.json").write_text("{")
    assert "cannot be read" in checked(out)[0]
    assert "no .beton files" in checked(images)[0]


def test_verify_from_the_command_line(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("folder", images, out)
    assert fastsiam("convert", "verify", str(out)).stdout.count("whole") == 2
    path = out / "val.beton"
    store = BetonStore(path)
    data = bytearray(path.read_bytes())
    data[store.start[2] + 5] ^= 1
    path.write_bytes(data)
    done = fastsiam("convert", "verify", str(path), code=1)
    assert "image 2 of" in done.stderr and "not those that were written" in done.stderr


# --- when it goes wrong ---------------------------------------------------------------------------

SLOW = """
import sys, time, signal
from pathlib import Path
from fastsiam.pipelines.convert import blocks, layout
from fastsiam.config import ConvertConfig, TrainConfig
layout.BLOCK_BYTES = 20_000
original = blocks._written
def slow(job, number):
    block = original(job, number)
    time.sleep(0.15)
    return block
blocks._written = slow
from fastsiam.jobs.convert import convert_data
from fastsiam import cli
sys.argv = ["fastsiam", *sys.argv[1:]]
cli.main()
"""


def start_slowly(source: Path, out: Path, *extra: str) -> subprocess.Popen[str]:
    """Start a conversion of many blocks, each taking a while."""
    arguments = ["convert", "folder", "--source", str(source), "--out", str(out), *extra]
    return subprocess.Popen(
        [sys.executable, "-c", SLOW, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_blocks(out: Path, count: int) -> None:
    journal = out / "train.beton.journal"
    deadline = time.monotonic() + 60
    while not journal.exists() or journal.read_bytes().count(b"\n") <= count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_killed_and_started_again_it_goes_on(number: signal.Signals, tmp_path: Path) -> None:
    """SIGKILL hits the parent alone; Ctrl-C and a scheduler's SIGTERM hit the workers too."""
    write_images(tmp_path / "images", classes=3, each=150, side=60)
    out = tmp_path / "out"
    process = start_slowly(tmp_path / "images", out, "--workers", "2")
    wait_for_blocks(out, 5)
    if number == signal.SIGKILL:
        process.kill()
    else:
        os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        assert errors.splitlines()[-1] == "stopped; the same command goes on from here"
    assert "Traceback" not in errors and not (out / "train.beton").exists()
    assert (out / "train.beton.partial").exists()
    time.sleep(0.5)  # the workers of a killed parent are gone by then, and its lock with them
    process = start_slowly(tmp_path / "images", out, "--workers", "3")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "going on with train.beton: " in errors
    said = int(errors.split("going on with train.beton: ")[1].split(" ")[0])
    assert 20 < said < 450
    process = start_slowly(tmp_path / "images", tmp_path / "straight")
    assert process.wait(timeout=120) == 0
    assert (out / "train.beton").read_bytes() == (
        tmp_path / "straight" / "train.beton"
    ).read_bytes()
    assert checked(out) == []


def half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Stop a conversion after some blocks; return source and target."""
    monkeypatch.setattr(layout, "BLOCK_BYTES", 10_000)
    source, out = tmp_path / "images", tmp_path / "out"
    write_images(source, classes=3, each=100, side=60)

    class Stop(Quiet):
        def progress(self, images: int, size: int) -> None:
            if images > 100:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert("folder", ConvertConfig(source=str(source), out=str(out)), Stop())
    return source, out


def go_on(source: Path, out: Path, **options: object) -> list[str]:
    quiet = Quiet()
    config = ConvertConfig(source=str(source), out=str(out), **options)  # type: ignore[arg-type]
    convert("folder", config, quiet)
    return quiet.said


def test_another_source_or_other_options_start_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = half_done(tmp_path, monkeypatch)
    for name in ("train.beton.partial", "train.beton.journal"):
        shutil.copy(out / name, tmp_path / name)
    (said,) = go_on(source, out, quality=80)
    assert said.startswith("starting train.beton anew: the source or the options are others")
    (out / "train.beton").unlink()
    for name in ("train.beton.partial", "train.beton.journal"):
        shutil.copy(tmp_path / name, out / name)
    jpeg_path = source / "class1" / "000.jpg"
    jpeg_path.write_bytes(jpeg(5))
    (said,) = go_on(source, out)
    assert said.startswith("starting train.beton anew")
    assert checked(out) == []


def test_starting_anew_leaves_nothing_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = half_done(tmp_path, monkeypatch)
    (out / "train.beton.journal").write_bytes(b"\xff\xfe of another time\n\xff")
    go_on(source, out)
    go_on(source, tmp_path / "fresh")
    assert (out / "train.beton").read_bytes() == (tmp_path / "fresh" / "train.beton").read_bytes()


def test_what_could_not_be_read_is_tried_again(tmp_path: Path) -> None:
    """A folder that was away for a while is not left out for good."""
    source, out = tmp_path / "images", tmp_path / "out"
    write_images(source, classes=2, each=10)
    stat = FolderStore(source).sizes()
    assert len(stat) == 20

    class Away(Quiet):
        def begin(self, name: str, images: int, size: int) -> None:
            (source / "class1").rename(tmp_path / "away")

    with pytest.raises(BadImagesError, match="10 of 20"):
        convert("folder", ConvertConfig(source=str(source), out=str(out)), Away())
    (tmp_path / "away").rename(source / "class1")
    go_on(source, out, skip_bad=True)
    assert len(BetonStore(out / "train.beton")) == 20


def test_damaged_leftovers_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = half_done(tmp_path, monkeypatch)
    partial, journal = out / "train.beton.partial", out / "train.beton.journal"
    lines = journal.read_text().splitlines(keepends=True)
    second = Block.parse(sorted(lines[1:], key=lambda x: json.loads(x[9:])[0])[1])
    data = bytearray(partial.read_bytes())
    data[second.start + 100] ^= 1
    partial.write_bytes(data)
    journal.write_text("".join(lines) + lines[-1][:50])  # and the last line is torn
    (said,) = go_on(source, out)
    first_images = int(said.split(": ")[1].split(" ")[0])
    assert first_images < 20  # only the first block was whole up to the damage
    assert checked(out) == []
    same_images(BetonStore(out / "train.beton"), FolderStore(source))


def test_two_at_once_do_not_disturb_each_other(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with (out / "train.beton.journal").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"another conversion is writing train\.beton"):
            run("folder", images, out)


def test_an_existing_file_is_never_overwritten(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("folder", images, out)
    before = (out / "train.beton").read_bytes()
    with pytest.raises(DataError, match=r"exists already and was made with another --max-side"):
        run("folder", images, out, max_side=10)
    os.utime(images / "train" / "class0" / "000.jpg", (1, 1))
    with pytest.raises(DataError, match="of other images, or of files with other times"):
        run("folder", images, out)
    assert (out / "train.beton").read_bytes() == before


def test_a_full_disk_is_one_line_and_no_half_file(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk's end; afterwards it goes on."""
    write_images(tmp_path / "images", classes=2, each=100, side=80)
    out = tmp_path / "out"
    arguments = ["convert", "folder", "--source", str(tmp_path / "images"), "--out", str(out)]

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))

    done = subprocess.run(
        [sys.executable, "-m", "fastsiam", *arguments],
        cwd=ROOT,
        preexec_fn=limited,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert "no room for" in line and "goes on from here" in line
    assert "Traceback" not in done.stderr and not (out / "train.beton").exists()
    fastsiam(*arguments)
    assert checked(out) == []


def test_a_disk_too_small_is_said_at_once(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    quiet = Quiet()
    convert("folder", ConvertConfig(source=str(images), out=str(tmp_path / "out")), quiet)
    assert "has 0 MB free and train.beton may take" in quiet.said[0]


def test_a_source_that_vanishes(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(images, "train")
    image = store.where(3)
    stat = FolderStore.sizes

    def then_gone(self: FolderStore, *, what: Callable[[], object]) -> object:
        sizes = stat(self)
        what()
        return sizes

    monkeypatch.setattr(
        FolderStore,
        "sizes",
        lambda self: then_gone(self, what=lambda: Path(image).unlink(missing_ok=True)),
    )
    with pytest.raises(BadImagesError) as caught:
        run("folder", images / "train", tmp_path / "out")
    assert caught.value.bad[0][0] == image and "No such file" in caught.value.bad[0][1]
    monkeypatch.setattr(
        FolderStore,
        "sizes",
        lambda self: then_gone(self, what=lambda: shutil.rmtree(images / "train", True)),
    )
    with pytest.raises(DataError, match="train is gone"):
        run("folder", images / "train", tmp_path / "out2")


def test_a_folder_that_cannot_be_written(images: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot make the folder"):
        run("folder", images, tmp_path / "file" / "out")
    (tmp_path / "out" / "train.beton.journal").mkdir(parents=True)
    with pytest.raises(DataError, match=r"cannot write .*train\.beton: Is a directory"):
        run("folder", images, tmp_path / "out")


def test_a_worker_that_dies_is_one_line(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(blocks, "prepare", die)
    with pytest.raises(DataError, match="a process was killed at its work"):
        run("folder", images, tmp_path / "out")


def test_an_error_in_one_block_is_the_one_that_is_told(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks that waited for it say nothing."""
    monkeypatch.setattr(layout, "BLOCK_BYTES", 1000)
    original = blocks._write_all

    def fail(file: int, data: bytes, at: int) -> None:
        if at > 8000:
            time.sleep(0.1)
            raise OSError(errno.EIO, "Input/output error")
        original(file, data, at)

    monkeypatch.setattr(blocks, "_write_all", fail)
    with pytest.raises(DataError, match=r"cannot write .*train\.beton: Input/output error"):
        run("folder", images, tmp_path / "out", workers=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--quality", "0"], "quality must be 1 to 100, not 0"),
        (["--part", "3"], "part must be such as 2/8"),
        (["--part", "0/8"], "part must be such as 2/8"),
        (["--max-side", "-1"], "max-side must be 0 or more"),
        (["--workers", "0"], "workers must be -1 or at least 1"),
    ],
)
def test_wrong_usage(options: list[str], message: str) -> None:
    assert message in fastsiam("convert", "folder", *options, code=2).stderr


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    """100,000 small images from a tar, in one worker: its peak and the parent's."""
    data = [jpeg(i) for i in range(50)]
    tar(tmp_path / "t.tar", [(f"c{i % 7}/{i:06d}.jpg", data[i % 50]) for i in range(100_000)])
    script = (
        "import resource, sys; from fastsiam import cli\n"
        "sys.argv[1:] = ['convert', 'folder', '--source', sys.argv[1], '--out', sys.argv[2]]\n"
        "cli.app(standalone_mode=False)\n"
        "lines = open('/proc/self/status').read().splitlines()\n"
        "print(*(line.split()[1] for line in lines if line.startswith('VmHWM')))\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "t.tar"), str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "100,000 images of 7 classes" in done.stdout
    parent, child = map(int, done.stdout.split()[-2:])
    assert max(parent, child) < 400_000  # kilobytes; 154,000 of them are the mapped tar
