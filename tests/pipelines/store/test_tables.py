"""Data sets of Hugging Face's ``datasets`` in place: saved to disk, and parquet of every kind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastsiam.errors import NoSplitError
from fastsiam.pipelines.store import open_store
from tests.conftest import ROOT
from tests.forms import as_on_the_hub, rows_of
from tests.sources import jpeg
from tests.tables import Row, dataset

CLASSES = ("class0", "class1", "class2")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_one_saved_dataset(images: Path, tmp_path: Path) -> None:
    dataset(rows_of(images / "train"), ()).save_to_disk(tmp_path / "one")
    store = open_store(tmp_path / "one", "train")
    assert len(store) == 24 and store.classes == ("0", "1", "2")
    with pytest.raises(NoSplitError):
        open_store(tmp_path / "one", "val")
    one = dataset(rows_of(images / "train"), ()).remove_columns("label")
    one.save_to_disk(tmp_path / "bare")
    bare = open_store(tmp_path / "bare", "train")
    assert bare.classes == () and set(bare.labels) == {-1} and bare.name(0) == "000.jpg"


def test_one_parquet_file(images: Path, tmp_path: Path) -> None:
    root = as_on_the_hub(images / "train", tmp_path / "hub", validation=images / "val") / "data"
    assert len(open_store(root / "train-00001-of-00002.parquet", "train")) == 12
    assert len(open_store(root / "train-00001-of-00002.parquet", "val")) == 12
    alone = (root / "validation-00000-of-00002.parquet").rename(tmp_path / "mine.parquet")
    assert len(open_store(alone, "train")) == 6
    with pytest.raises(NoSplitError, match="no val split beside it"):
        open_store(alone, "val")


def test_images_that_are_alike_are_found(tmp_path: Path) -> None:
    """A dictionary holds one of them."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    data = [jpeg(i % 3) for i in range(12)] + [jpeg(50 + i, quality=95) for i in range(9)]
    table = pa.table({"jpg": data, "label": [0] * 21})
    pq.write_table(table, tmp_path / "x.parquet", compression="none", row_group_size=8)
    store = open_store(tmp_path, "train")
    assert [bytes(store.read(i)) for i in range(21)] == data


def test_an_image_column_is_found_by_its_type(tmp_path: Path) -> None:
    rows: list[Row] = [(jpeg(i), None, 0) for i in range(3)]
    one = dataset(rows, ["a"], image="picture")
    one.save_to_disk(tmp_path / "one")
    store = open_store(tmp_path / "one", "train")
    assert bytes(store.read(1)) == jpeg(1) and store.name(1) == "a/row 1"
    two = one.add_column("mask", one.with_format("arrow")[:]["picture"].to_pylist())
    two.save_to_disk(tmp_path / "two")
    assert bytes(open_store(tmp_path / "two", "train").read(1)) == jpeg(1)


def test_a_row_group_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    """Not when its images are looked up, and not when they are read in order."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    data = [os.urandom(50_000) for _ in range(2400)]
    table = pa.table({"image": pa.array(data, pa.binary())})
    pq.write_table(
        table, tmp_path / "x.parquet", compression="none", data_page_size=2**16,
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
    grown = subprocess.check_output([sys.executable, "-c", code, tmp_path / "x.parquet"], cwd=ROOT)
    assert int(grown) < 80_000  # of 120,000
