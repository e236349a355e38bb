"""Parquet files as a source, whole and odd ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastsiam.errors import DataError
from fastsiam.pipelines.store import BetonStore, open_parquet
from tests.conversions import run
from tests.sources import jpeg, parquet


def test_images_that_are_read_in_order_can_be_read_again(tmp_path: Path) -> None:
    data = [jpeg(i) for i in range(10)]
    parquet(tmp_path / "x.parquet", [(own, "x", 0) for own in data], ["a"])
    store = open_parquet(tmp_path, "train", in_order=True)
    order = [5, 5, 4, 9, 0, 1, 8]
    assert [bytes(store.read(i)) for i in order] == [data[i] for i in order]


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
    (written,) = run("parquet", tmp_path / "x", tmp_path / "outx")
    assert BetonStore(written.path).labels.tolist() == [-1, -1, -1]


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
    with pytest.raises(DataError, match="is damaged in row group 0"):
        run("parquet", tmp_path / "a", tmp_path / "out2", skip_bad=True)
    with pytest.raises(DataError, match=r"holds no \.parquet files"):
        run("parquet", tmp_path / "out", tmp_path / "out3")
