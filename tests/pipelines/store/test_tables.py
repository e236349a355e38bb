"""Hugging Face data sets read in place: saved to disk, and parquet of every kind."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastsiam.errors import DataError, NoSplitError
from fastsiam.pipelines.store import BetonStore, open_store
from fastsiam.train.image_list import names_of
from tests.conversions import run
from tests.data_formats import write_hub_dataset
from tests.processes import python
from tests.sources import jpeg, put, tar
from tests.tables import Row, dataset, write_table


def test_file_without_labels_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = dataset([(jpeg(i), None, i) for i in range(2)], "ab")
    rows.to_parquet(tmp_path / "train-0.parquet")
    rows.remove_columns("label").to_parquet(tmp_path / "train-1.parquet")
    assert open_store(tmp_path, "train").labels.tolist() == [-1] * 4
    without = f"{tmp_path / 'train-1.parquet'} has no label column"
    warnings = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert warnings == [f"the images in {tmp_path} are unlabelled: {without}"]


def test_single_parquet_file_and_its_validation_split(images: Path, tmp_path: Path) -> None:
    root = write_hub_dataset(images / "train", tmp_path / "hub", validation=images / "val") / "data"
    assert len(open_store(root / "train-00001-of-00002.parquet", "train")) == 12
    assert len(open_store(root / "train-00001-of-00002.parquet", "val")) == 12
    alone = (root / "validation-00000-of-00002.parquet").rename(tmp_path / "mine.parquet")
    assert len(open_store(alone, "train")) == 6
    with pytest.raises(NoSplitError, match="no val split beside it"):
        open_store(alone, "val")


def test_folders_named_like_parquet_files(tmp_path: Path) -> None:
    """Spark gives such names to the folders of parts that it writes."""
    rows = dataset([(jpeg(i), None, i % 2) for i in range(3)], "ab")
    for name in ("train.parquet/0.parquet", "train.parquet/1.parquet", "val.parquet/0.parquet"):
        rows.to_parquet(put(tmp_path / name))
    assert len(open_store(tmp_path / "train.parquet", "train")) == 6
    assert len(open_store(tmp_path, "train")) == 6 and len(open_store(tmp_path, "val")) == 3
    rows.to_parquet(put(tmp_path / "split" / "train" / "x.parquet" / "0.parquet"))
    assert len(open_store(tmp_path / "split", "train")) == 3
    put(tmp_path / "x" / "a.tar" / "0.jpg", jpeg(0))
    assert open_store(tmp_path / "x", "train").name(0) == "a.tar/0.jpg"


def test_dictionary_encoded_images_are_read(tmp_path: Path) -> None:
    """A dictionary stores identical images once."""
    data = [jpeg(i % 3) for i in range(12)] + [jpeg(50 + i, quality=95) for i in range(9)]
    columns = {"jpg": data, "label": [0] * 21}
    write_table(tmp_path / "x.parquet", columns, compression="none", row_group_size=8)
    store = open_store(tmp_path, "train")
    assert [bytes(store.read(i)) for i in range(21)] == data


@pytest.mark.parametrize("first", [[], [None, None]])
def test_row_groups_without_images_are_read(first: list[None], tmp_path: Path) -> None:
    data = [jpeg(i) for i in range(6)]
    with pq.ParquetWriter(
        tmp_path / "train.parquet", pa.schema([("content", pa.binary())]), compression="none"
    ) as writer:
        for rows in (first, data[:3], [], data[3:]):
            writer.write_table(pa.table({"content": pa.array(rows, pa.binary())}))
    for sources in (False, True):
        store = open_store(tmp_path, "train", sources=sources)
        read = [bytes(store.read(i)) for i in range(len(first), len(store))]
        assert read == data and len(store) == len(first) + 6


def test_image_column_is_found_by_type(tmp_path: Path) -> None:
    rows: list[Row] = [(jpeg(i), None, 0) for i in range(3)]
    one = dataset(rows, ["a"], image="picture")
    one.save_to_disk(tmp_path / "one")
    store = open_store(tmp_path / "one", "train")
    assert bytes(store.read(1)) == jpeg(1) and store.name(1) == "a/row 1"
    one.remove_columns("label").save_to_disk(tmp_path / "bare")
    bare = open_store(tmp_path / "bare", "train")
    assert bare.classes == () and set(bare.labels) == {-1} and bare.name(0) == "row 0"
    two = one.add_column("mask", one.with_format("arrow")[:]["picture"].to_pylist())
    two.save_to_disk(tmp_path / "two")
    assert bytes(open_store(tmp_path / "two", "train").read(1)) == jpeg(1)


def test_images_of_type_binary_view(tmp_path: Path) -> None:
    import datasets

    data = [jpeg(i) for i in range(3)]
    table = pa.table({"jpg": pa.array(data, pa.binary_view())})
    pq.write_table(table, tmp_path / "train.parquet", compression="none")
    for sources in (False, True):
        store = open_store(tmp_path, "train", sources=sources)
        assert [bytes(store.read(i)) for i in range(3)] == data
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="images of type binary_view: save them as binary"):
        open_store(tmp_path / "saved", "train")


def test_several_columns_of_one_name(tmp_path: Path) -> None:
    images, labels = pa.array([jpeg(0)]), pa.array([0])
    for name, names in (("label", ["jpg", "label", "label"]), ("jpg", ["jpg", "label", "jpg"])):
        columns = [images if name == "jpg" else labels for name in names]
        pq.write_table(pa.table(columns, names), tmp_path / "x.parquet", compression="none")
        with pytest.raises(DataError, match=f"several columns named {name}: rename all but one"):
            open_store(tmp_path / "x.parquet", "train")
    pq.write_table(
        pa.table([images, labels, labels], ["jpg", "a", "a"]), tmp_path / "x.parquet",
        compression="none",
    )  # fmt: skip
    assert bytes(open_store(tmp_path / "x.parquet", "train").read(0)) == jpeg(0)


def test_row_group_is_never_fully_in_memory(tmp_path: Path) -> None:
    """Neither when its images are located, nor when they are read in order."""
    data = [os.urandom(50_000) for _ in range(2400)]
    write_table(
        tmp_path / "x.parquet", {"image": data}, compression="none", data_page_size=2**16,
        write_batch_size=1, use_dictionary=False,
    )  # fmt: skip
    code = (
        "import sys, threading, time; from pathlib import Path\n"
        "from pipelines.store import open_store\n"
        "import pyarrow.parquet\n"
        "def held(): return int(open('/proc/self/status').read().split('RssAnon:')[1].split()[0])\n"
        "def watch():\n"
        "    while True: most.append(held()); time.sleep(.002)\n"
        "before, most = held(), []\n"
        "threading.Thread(target=watch, daemon=True).start()\n"
        "for sources in False, True:\n"
        "    store = open_store(Path(sys.argv[1]), 'train', sources=sources)\n"
        "    assert sum(len(store.read(i)) for i in range(2400)) == 120_000_000\n"
        "print(max(most) - before)\n"
    )
    result = python(code, tmp_path / "x.parquet")
    assert result.returncode == 0 and int(result.stdout) < 80_000, result  # of 120,000


# Parquet that a conversion reads in order.


@pytest.mark.parametrize(
    "beside", ["features.parquet", "bytes.parquet", "emb/x.parquet", "notes.tar"]
)
@pytest.mark.parametrize("where", ["", "train"])
def test_image_files_are_read_if_tables_and_tars_have_none(
    where: str, beside: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("cat/0.jpg", "dog/deep/1.jpg"):
        put(tmp_path / where / name, jpeg(0))
    if beside.endswith(".tar"):
        tar(tmp_path / where / beside, [("notes.txt", b"")])
    elif beside == "bytes.parquet":
        import datasets

        other = datasets.Dataset.from_dict({"feature": [b"no", b"image"]})
        other.to_parquet(tmp_path / where / beside)
    else:
        write_table(tmp_path / where / beside, {"feature": [0.5, 1.0]})
    store = open_store(tmp_path, "train")
    assert names_of(store) == ["cat/0.jpg", "dog/deep/1.jpg"]
    assert store.classes == ("cat", "dog")
    if (where, beside) != ("train", "emb/x.parquet"):  # tables are not searched as deep as this
        assert beside in caplog.text
    with pytest.raises(NoSplitError):
        open_store(tmp_path, "val")
    rows = dataset([(jpeg(i), None, 0) for i in range(3)], "a")
    rows.to_parquet(put(tmp_path / "hub" / "data" / "train.parquet"))
    put(tmp_path / "hub" / "assets" / "logo.png")
    assert len(open_store(tmp_path / "hub", "train")) == 3


def test_label_columns_of_every_type(tmp_path: Path) -> None:
    images = [{"bytes": jpeg(i), "path": None} for i in range(3)]
    for number, (labels, classes, expected) in enumerate(
        [
            (pa.array([2, 0, 1], pa.uint8()), ("0", "1", "2"), [2, 0, 1]),
            (pa.array(["cat", "ant", "cat"]), ("ant", "cat"), [1, 0, 1]),
            (pa.array(["cat", "ant", None]).dictionary_encode(), ("ant", "cat"), [1, 0, -1]),
            (pa.array(["cat", "ant", None], pa.string_view()), ("ant", "cat"), [1, 0, -1]),
            (pa.array([1, None, 0], pa.int32()), ("0", "1"), [1, -1, 0]),
        ]
    ):
        columns = {"image": images, "label": labels}
        write_table(tmp_path / str(number) / "train.parquet", columns)
        store = open_store(tmp_path / str(number), "train", sources=True)
        assert store.classes == classes and store.labels.tolist() == expected
        assert store.name(0) == f"{classes[expected[0]]}/row 0"
    write_table(tmp_path / "x" / "train.parquet", {"image": images, "label": [0.5, 1.0, 2.0]})
    assert open_store(tmp_path / "x", "train", sources=True).labels.tolist() == [-1, -1, -1]


def test_row_group_is_read_on_after_another_is_damaged(tmp_path: Path) -> None:
    data, path = [jpeg(i) for i in range(6)], tmp_path / "train.parquet"
    write_table(path, {"jpg": data}, row_group_size=3)
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 30] = bytes(30)
    path.write_bytes(content)
    store = open_store(tmp_path, "train", sources=True)
    assert bytes(store.read(0)) == data[0]
    with pytest.raises(DataError, match="is damaged in row group 1"):
        store.read(4)
    assert bytes(store.read(2)) == data[2]


def test_binary_column_and_corruption_in_parquet(tmp_path: Path) -> None:
    data = [jpeg(i, quality=95) for i in range(200)]
    path = tmp_path / "a" / "x.parquet"
    write_table(path, {"jpg": data})
    (conversion,) = run("parquet", tmp_path / "a", tmp_path / "out")
    store = BetonStore(conversion.path)
    assert [bytes(store.read(i)) for i in range(200)] == data and store.name(7) == "row 7"
    content = bytearray(path.read_bytes())
    content[4:40] = bytes(36)
    path.write_bytes(content)
    with pytest.raises(DataError, match="is damaged in row group 0"):
        run("parquet", tmp_path / "a", tmp_path / "out2", skip_bad=True)
    with pytest.raises(DataError, match=r"holds no \.parquet files"):
        run("parquet", tmp_path / "out", tmp_path / "out3")
