"""Write data sets as Arrow and parquet tables with Hugging Face's ``datasets``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.sources import jpeg, put

Row = tuple[bytes | None, str | None, int]
"""An image's bytes, path and label."""


def dataset(rows: Sequence[Row], classes: Sequence[str], *, image: str = "image") -> Any:
    """Return rows as a ``datasets.Dataset``. Without class names, the labels are plain integers."""
    import datasets

    datasets.disable_progress_bars()
    label = datasets.ClassLabel(names=list(classes)) if classes else datasets.Value("int64")
    features = datasets.Features({image: datasets.Image(), "label": label})
    columns = {
        image: [{"bytes": data, "path": path} for data, path, _ in rows],
        "label": [number for _, _, number in rows],
    }
    return datasets.Dataset.from_dict(columns, features=features)


def two_image_columns(rows: int = 6) -> Any:
    """Return a table with two image columns, two class labels, a string and a float column."""
    import datasets

    datasets.disable_progress_bars()
    kinds = {
        "photo": datasets.Image(),
        "mask": datasets.Image(),
        "species": datasets.ClassLabel(names=["ash", "oak", "elm"]),
        "genus": datasets.ClassLabel(names=["x", "y"]),
        "place": datasets.Value("string"),
        "weight": datasets.Value("float32"),
    }
    values = {
        "photo": [{"bytes": jpeg(i), "path": f"{i}.jpg"} for i in range(rows)],
        "mask": [{"bytes": jpeg(100 + i), "path": f"{i}.jpg"} for i in range(rows)],
        "species": [i % 3 for i in range(rows)],
        "genus": [i % 2 for i in range(rows)],
        "place": [f"site {i % 2}" for i in range(rows)],
        "weight": [0.5] * rows,
    }
    return datasets.Dataset.from_dict(values, features=datasets.Features(kinds))


def saved(folder: Path, splits: dict[str, Any], **shards: int) -> Path:
    """Save a ``DatasetDict`` with ``save_to_disk``; ``shards`` is the number of files per split."""
    import datasets

    datasets.DatasetDict(splits).save_to_disk(folder, num_shards=shards or None)
    return folder


def write_hub_splits(folder: Path, splits: dict[str, Any], *, shards: int = 2) -> Path:
    """Write parquet files in the layout of the Hub, with row groups of five rows."""
    (folder / "data").mkdir(parents=True)
    for split, rows in splits.items():
        for number in range(shards):
            name = f"{split}-{number:05d}-of-{shards:05d}.parquet"
            rows.shard(shards, number, contiguous=True).to_parquet(
                folder / "data" / name, batch_size=5
            )
    return folder


def write_parquet(
    path: Path, rows: Sequence[Row], classes: Sequence[str], *, compression: str = "snappy"
) -> Path:
    """Write images as parquet with pyarrow's defaults; ``datasets`` would not compress images."""
    from pyarrow import parquet as pq

    table = dataset(rows, classes).data.table
    pq.write_table(table, put(path), row_group_size=4, compression=compression)
    return path


def write_table(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    """Write columns as parquet with pyarrow, whose ``write_table`` gets the options."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    pq.write_table(pa.table(columns), put(path), **options)
    return path
