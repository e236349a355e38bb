"""Export of features to files, and pictures of nearest neighbours."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fastsiam.config.evaluate import FeaturesConfig, NeighboursConfig
from fastsiam.console import format_count
from fastsiam.contact_sheets import Captioned, check_outside, picture_grid, save_picture
from fastsiam.distributed import Place, gather_uneven
from fastsiam.errors import BackendError, DataError, FastSiamError, NoSplitError
from fastsiam.evaluate.features import concat_batches, group_batches, no_features
from fastsiam.evaluate.knn import nearest
from fastsiam.evaluate.subject import Subject, open_subject
from fastsiam.files import as_utf8, atomic_write, os_errors_as
from fastsiam.pipelines import open_split
from fastsiam.pipelines.store import Split
from fastsiam.pipelines.subsets import open_with_holdout
from fastsiam.run.records import check_targets
from fastsiam.views.batch import EvalLoader

_GROUP_ROWS = 8192
"""Minimum number of rows in a row group of a .parquet file, which is buffered in memory."""

Rows: TypeAlias = tuple[NDArray[np.float32], dict[str, list[Any]]]
"""(N, d) features, and other columns of N values by name."""


def write_features(path: Path, config: FeaturesConfig, place: Place) -> list[Path]:
    """Compute the features of all images and write them to a file, in the data set's order.

    ``.npy``: (images, d) float32, with row, name, label and class in a separate ``.npy.csv``.
    ``.parquet``: columns name, label, class, and feature, a list of d float32. With a holdout, a
    column split ("train" or "val") follows class. The features are streamed to a temporary file,
    which is renamed when it is complete.

    Returns:
        On rank 0, the files written; on other ranks, an empty list.

    Raises:
        FastSiamError: a file exists and ``force`` is not set, or a file cannot be written.
    """
    files = _targets(config) if place.is_leader else []
    subject = open_subject(path, config, place)
    subject.print_summary()
    loader, splits = _images(subject, config.split)
    subject.check_same(loader)
    rows = _rows(subject, loader, splits)
    if not place.is_leader:
        for _ in rows:
            pass
        return files
    with os_errors_as(FastSiamError, f"cannot write {config.out}"):
        if len(files) > 1:
            _write_npy(rows, *files)
        else:
            _write_parquet(rows, *files)
    return files


def preflight(path: Path, config: FeaturesConfig) -> None:
    """Check the network's file, the data and the output files, before ranks are started.

    Raises:
        FastSiamError: one of them cannot be used.
    """
    _targets(config)
    place = Place(0, config.gpus * config.max_nodes, torch.device("cpu"))
    _images(open_subject(path, config, place), config.split)


def _targets(config: FeaturesConfig) -> list[Path]:
    """Return the files to write, after checking that they can be written."""
    out = Path(config.out)
    files = [out]
    if out.suffix == ".npy":
        files.append(out.with_name(f"{out.name}.csv"))
    else:
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise BackendError(
                f"{out} needs pyarrow: pip install 'fastsiam[convert]', or write a .npy file"
            ) from error
    if existing_files := [file for file in files if file.exists() and not config.force]:
        raise FastSiamError(
            f"{existing_files[0]} already exists: choose another path, or pass --force"
        )
    check_targets(*files)
    return files


def _images(
    subject: Subject, split: Literal["auto", "train", "val"]
) -> tuple[EvalLoader, NDArray[np.str_] | None]:
    """Open the images to compute features of; with a holdout, also return the split of each."""
    if not subject.data.holdout:
        return subject.loader("train" if split == "auto" else split, in_turn=True), None
    if split != "auto":
        loader = subject.loader(split, in_turn=True)
        return loader, np.full(loader.images, split)
    val_positions = open_with_holdout(subject.data).holdout
    full_subject = replace(subject, data=replace(subject.data, holdout=""))
    loader = full_subject.loader("train", in_turn=True)
    splits = np.full(loader.images, "train")
    splits[val_positions] = "val"
    return loader, splits


def _rows(subject: Subject, loader: EvalLoader, splits: NDArray[np.str_] | None) -> Iterator[Rows]:
    """Yield the features of all ranks with their other columns, in the data set's order.

    The ranks take batches in turn. A batch without a readable image is left out.
    """
    names, classes = [
        [as_utf8(name) for name in texts] for texts in (loader.names(), loader.classes)
    ]
    place, batches = subject.place, subject.extract(loader, "images")
    empty = no_features(subject.network.features, place.device)
    part, count = next(batches, empty), 0
    for first in range(0, loader.images, subject.batch * place.world):
        batch_number = first // subject.batch + place.rank
        has_turn = len(part[2]) > 0 and int(part[2][0]) // subject.batch == batch_number
        features, *tensors = (gather_uneven(x) for x in (part if has_turn else empty))
        labels, indices = (x.tolist() for x in tensors)
        if indices:
            count += len(indices)
            columns: dict[str, list[Any]] = {
                "name": [names[image] for image in indices],
                "label": labels,
                "class": [classes[label] if label >= 0 and classes else "" for label in labels],
            }
            if splits is not None:
                columns["split"] = splits[indices].tolist()
            yield features.cpu().numpy(), columns
        part = next(batches, empty) if has_turn else part
    if not count:
        raise DataError(f"no image of {subject.data.root} can be decoded: check the data")
    images = format_count(loader.images, "image")
    subject.console.say(f"{format_count(count, 'row')} of {images}, features: {features.shape[1]}")


def _write_npy(rows: Iterator[Rows], out: Path, table_of_rows: Path) -> None:
    with (
        atomic_write(out) as temporary,
        atomic_write(table_of_rows) as temporary_table,
        temporary.open("wb") as array,
        temporary_table.open("w", encoding="utf-8", newline="") as file,
    ):
        table, count, header = csv.writer(file), 0, {"descr": "<f4", "fortran_order": False}
        for features, columns in rows:
            if count == 0:
                table.writerow(("row", *columns))
                # NumPy pads the header, so that the final number of rows fits into the same space.
                np.lib.format.write_array_header_2_0(array, header | {"shape": features.shape})
            array.write(features.astype("<f4").tobytes())
            for number, values in enumerate(zip(*columns.values(), strict=True), start=count):
                table.writerow((number, *values))
            count += len(features)
        array.seek(0)
        shape = (count, features.shape[1])
        np.lib.format.write_array_header_2_0(array, header | {"shape": shape})


def _write_parquet(rows: Iterator[Rows], out: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with atomic_write(out) as temporary, ExitStack() as stack:
        writer = None
        for group in group_batches(rows, _GROUP_ROWS):
            features = np.concatenate([part for part, _ in group])
            columns: dict[str, Any] = {
                name: [value for _, part in group for value in part[name]] for name in group[0][1]
            }
            flat = pa.array(features.reshape(-1))
            columns["feature"] = pa.FixedSizeListArray.from_arrays(flat, features.shape[1])
            batch = pa.record_batch(columns)
            if writer is None:
                writer = stack.enter_context(pq.ParquetWriter(temporary, batch.schema))
            writer.write_batch(batch)


def write_neighbours(path: Path, config: NeighboursConfig, place: Place, *, out: Path) -> None:
    """Draw random query images, each with the training images that have the nearest features.

    Queries are validation images. Without a validation split they are training images, and an
    image is not shown as its own neighbour.

    Raises:
        FastSiamError: the picture ``out`` cannot be written.
    """
    check_targets(out)
    subject = open_subject(path, config, place)
    check_outside(out, subject.data.places)
    subject.print_summary()
    bank = open_split(subject.data, "train")
    split: Split = "val"
    try:
        store = open_split(subject.data, "val")
    except NoSplitError:
        store, split = bank, "train"
    shuffled = torch.randperm(len(store), generator=torch.Generator().manual_seed(config.seed))
    chosen = shuffled[: config.images].sort().values.numpy()
    count = config.k + (split == "train")  # a training image is nearest to itself
    query_loader, bank_loader = subject.loader(split, chosen=chosen), subject.loader("train")
    queries, _, positions = concat_batches(subject.extract(query_loader, "queries"))
    bank_parts = (
        (features, position)
        for features, _, position in subject.extract(bank_loader, "bank: images")
    )
    similarity, neighbours, _ = nearest(queries, bank_parts, most=count)
    rows = []
    for query, tags, cosines in zip(
        positions.tolist(), neighbours.tolist(), similarity.tolist(), strict=True
    ):
        query_class = store.class_name(query)
        row: list[Captioned] = [(store.decode(query), query_class, None)]
        for tag, cosine in zip(tags, cosines, strict=True):
            if len(row) <= config.k and not (split == "train" and tag == query):
                name = bank.class_name(tag)
                is_same = name == query_class if name and query_class else None  # None: no labels
                row.append((bank.decode(tag), f"{cosine:.2f} {name}", is_same))
        rows.append(row)
    save_picture(picture_grid(rows), out)
