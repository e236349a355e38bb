"""Features for users' own work: written to a file, or looked at as nearest neighbours."""

from __future__ import annotations

import csv
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fastsiam.config.evaluate import FeaturesConfig, NeighboursConfig
from fastsiam.distributed import Place, gather_uneven
from fastsiam.errors import FastSiamError, NoSplitError
from fastsiam.evaluate.features import collected
from fastsiam.evaluate.knn import Nearest
from fastsiam.evaluate.subject import Subject, open_subject
from fastsiam.files import explained, written_whole
from fastsiam.pipelines import build_eval_loader, open_split
from fastsiam.pipelines.store import Split
from fastsiam.pipelines.subsets import open_whole
from fastsiam.report.pictures import Captioned, picture_grid, save_picture
from fastsiam.run.records import check_targets
from fastsiam.views.batch import EvalLoader

_GROUP_ROWS = 8192
"""Rows that a .parquet file holds together: what is in memory while it is written."""

Rows: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""(N, d) float32 features, (N,) int64 labels, and (N,) int64 positions of the images."""


@dataclass(frozen=True)
class _Images:
    """The images whose features are written, and what is written beside each."""

    loader: EvalLoader
    splits: NDArray[np.str_] | None = None
    """(images,) "train" or "val" where a holdout applies."""

    @cached_property
    def names(self) -> list[str]:
        """Names of all ranks' images."""
        return self.loader.names()

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of ``table``."""
        return ("name", "label", "class", *(() if self.splits is None else ("split",)))

    def table(self, labels: Tensor, positions: Tensor) -> list[list[Any]]:
        """Return the columns of N images.

        Args:
            labels: (N,) int64, -1 for none.
            positions: (N,) int64 among all images.
        """
        numbers, shown, classes = labels.tolist(), positions.tolist(), self.loader.classes
        columns = [
            [self.names[image] for image in shown],
            numbers,
            [classes[label] if label >= 0 and classes else "" for label in numbers],
        ]
        return columns if self.splits is None else [*columns, self.splits[shown].tolist()]


def write_features(path: Path, config: FeaturesConfig, place: Place) -> list[Path]:
    """Compute the features of every image, in the data set's order, into a file.

    ``.npy``: (images, d) float32, and beside it ``.npy.csv`` with row, name, label and class.
    ``.parquet``: the columns name, label, class, and feature, a list of d float32. ``.npz``: an
    array for each of these columns; it is written instead of ``.parquet`` if pyarrow is missing.
    With a holdout there is also a column split, "train" or "val", after class.
    The file is written as the features are computed, and takes its name when it is whole.

    Args:
        path: a run's folder, a checkpoint, or a file of another program.
        config: which images, which layer, and the file.
        place: this rank; rank 0 writes.

    Returns:
        The files that are written.

    Raises:
        FastSiamError: a file is there already, and ``force`` is not given; or none can be written.
    """
    files = _targets(config) if place.is_leader else _files(config)
    subject = open_subject(path, config, place, layer=config.layer)
    subject.introduce()
    images = _images(subject, config.split)
    parts = _in_order(subject, images.loader)
    if not place.is_leader:
        for _ in parts:
            pass
        return files
    out = files[0]
    if out.suffix != Path(config.out).suffix:
        subject.console.warn(
            f"{config.out} needs pyarrow, which is missing: writing {out} instead; "
            "pip install 'fastsiam[convert]' installs pyarrow"
        )
    with explained(FastSiamError, f"cannot write {out}"):
        _WRITERS[out.suffix](parts, subject.features, images, out)
    return files


def preflight(path: Path, config: FeaturesConfig) -> None:
    """Refuse what cannot work before ranks are started.

    Raises:
        FastSiamError: says what is wrong.
    """
    _targets(config)
    place = Place(0, config.gpus * config.max_nodes, torch.device("cpu"))
    _images(open_subject(path, config, place, layer=config.layer), config.split)


def _files(config: FeaturesConfig) -> list[Path]:
    """Return the files to write: .npz instead of .parquet if pyarrow is missing."""
    out = Path(config.out)
    if out.suffix == ".parquet" and not _has_pyarrow():
        out = out.with_suffix(".npz")
    return [out, _table_of(out)] if out.suffix == ".npy" else [out]


def _targets(config: FeaturesConfig) -> list[Path]:
    """Return the files to write, if they can be."""
    files = _files(config)
    if there := [file for file in files if file.exists() and not config.force]:
        raise FastSiamError(f"{there[0]} is there already: choose another, or give --force")
    check_targets(*files)
    return files


def _images(subject: Subject, split: Literal["auto", "train", "val"]) -> _Images:
    """Open the images whose features are written."""
    if not subject.data.holdout:
        return _Images(_loader(subject, "train" if split == "auto" else split))
    if split != "auto":
        loader = _loader(subject, split)
        return _Images(loader, np.full(loader.images, split))
    _, _, held = open_whole(subject.data)
    loader = _loader(replace(subject, data=replace(subject.data, holdout="")), "train")
    splits = np.full(loader.images, "train")
    splits[held] = "val"
    return _Images(loader, splits)


def _in_order(subject: Subject, loader: EvalLoader) -> Iterator[Rows]:
    """Yield the features, labels and positions of all ranks' images, in the data set's order.

    The ranks take batches in turn (``_loader``). One whose images are all bad is left out.
    """
    place, shown = subject.place, loader.rows()
    own = (
        (features, labels, torch.tensor(list(islice(shown, len(labels))), device=place.device))
        for features, labels in subject.extract(loader, "images")
    )
    if place.world == 1:
        yield from own
        return
    nothing = (
        torch.empty(0, subject.features, device=place.device),
        *(torch.empty(0, dtype=torch.int64, device=place.device) for _ in range(2)),
    )
    part = next(own, nothing)
    for first in range(0, loader.images, subject.batch * place.world):
        turn = first // subject.batch + place.rank
        has_it = len(part[2]) > 0 and int(part[2][0]) // subject.batch == turn
        features, labels, rows = (gather_uneven(x) for x in (part if has_it else nothing))
        yield features, labels, rows
        part = next(own, nothing) if has_it else part


def _table_of(out: Path) -> Path:
    """Return where the names and labels of an array's rows go."""
    return out.with_name(f"{out.name}.csv")


def _write_npy(parts: Iterable[Rows], dims: int, images: _Images, out: Path) -> None:
    table = _table_of(out)
    shape = {"shape": (images.loader.images, dims), "descr": "<f4", "fortran_order": False}
    with (
        written_whole(out) as temporary,
        written_whole(table) as temporary_table,
        temporary.open("wb") as array,
        temporary_table.open("w", newline="") as file,
    ):
        np.lib.format.write_array_header_2_0(array, shape)
        rows = csv.writer(file)
        rows.writerow(("row", *images.columns))
        row = count()
        for features, labels, shown in parts:
            array.write(features.cpu().numpy().astype("<f4").tobytes())
            for values in zip(*images.table(labels, shown), strict=True):
                rows.writerow((next(row), *values))
        # Bad images may have been left out. The header has room for any number of rows.
        array.seek(0)
        shape["shape"] = (next(row), dims)
        np.lib.format.write_array_header_2_0(array, shape)


def _write_parquet(parts: Iterator[Rows], dims: int, images: _Images, out: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = [pa.int64() if name == "label" else pa.string() for name in images.columns]
    feature = ("feature", pa.list_(pa.float32(), dims))
    schema = pa.schema([*zip(images.columns, kinds, strict=True), feature])
    with written_whole(out) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for group in _grouped(parts):
            features, labels, shown = (torch.cat(x).cpu() for x in zip(*group, strict=True))
            flat = pa.array(features.numpy().reshape(-1))
            columns = [
                *images.table(labels, shown),
                pa.FixedSizeListArray.from_arrays(flat, dims),
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def _grouped(parts: Iterable[Rows]) -> Iterator[list[Rows]]:
    """Yield batches together that have enough rows."""
    group: list[Rows] = []
    for part in parts:
        group.append(part)
        if sum(len(labels) for _, labels, _ in group) >= _GROUP_ROWS:
            yield group
            group = []
    if group:
        yield group


def _has_pyarrow() -> bool:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        return False
    return True


def _write_npz(parts: Iterable[Rows], dims: int, images: _Images, out: Path) -> None:
    columns: dict[str, list[Any]] = {name: [] for name in images.columns}
    with (
        written_whole(out) as temporary,
        tempfile.TemporaryFile(dir=temporary.parent) as array,
        zipfile.ZipFile(temporary, "w") as archive,
    ):
        for features, labels, shown in parts:
            array.write(features.cpu().numpy().astype("<f4").tobytes())
            for column, values in zip(columns.values(), images.table(labels, shown), strict=True):
                column += values
        for name, values in columns.items():
            kind = np.int64 if name == "label" else np.str_
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.array(values, kind))
        shape = {"shape": (len(columns["name"]), dims), "descr": "<f4", "fortran_order": False}
        array.seek(0)
        with archive.open(zipfile.ZipInfo("feature.npy"), "w", force_zip64=True) as file:
            np.lib.format.write_array_header_2_0(file, shape)
            shutil.copyfileobj(array, file)


_WRITERS = {".npy": _write_npy, ".parquet": _write_parquet, ".npz": _write_npz}
"""What writes a file, by its ending."""


def write_neighbours(path: Path, config: NeighboursConfig, place: Place, *, out: Path) -> None:
    """Draw neighbours into a file; whether that is possible is tried first.

    Args:
        path: a run's folder, a checkpoint, or a file of another program.
        config: which images and how many.
        place: this process, alone.
        out: the picture.

    Raises:
        FastSiamError: the file cannot be written.
    """
    check_targets(out)
    save_picture(draw_neighbours(path, config, place), out)


def draw_neighbours(path: Path, config: NeighboursConfig, place: Place) -> Image.Image:
    """Draw some images, each with the training images whose features are nearest to its own.

    Queries are validation images. Without a validation split they are training images, and an
    image is not its own neighbour.

    Args:
        path: a run's folder, a checkpoint, or a file of another program.
        config: which images and how many.
        place: this process, alone.
    """
    subject = open_subject(path, config, place)
    subject.introduce()
    bank = open_split(subject.data, "train")
    split: Split = "val"
    try:
        store = open_split(subject.data, "val")
    except NoSplitError:
        store, split = bank, "train"
    shuffled = torch.randperm(len(store), generator=torch.Generator().manual_seed(config.seed))
    chosen = shuffled[: config.images].sort().values.numpy()
    most = config.k + (split == "train")  # a training image is nearest to itself
    asked, known = _loader(subject, split, chosen), _loader(subject, "train")
    queries, _ = collected(subject.extract(asked, "queries"))
    chosen = chosen[list(asked.rows())]
    nearest, rows_known = Nearest(queries, most=most), known.rows()
    for features, _ in subject.extract(known, "bank: images"):
        nearest.add(features, torch.tensor(list(islice(rows_known, len(features)))))
    nearest.finish()
    rows = []
    for query, tags, cosines in zip(
        chosen.tolist(), nearest.tag.tolist(), nearest.similarity.tolist(), strict=True
    ):
        kind = store.class_name(query)
        row: list[Captioned] = [(store.decode(query), kind, None)]
        for tag, cosine in zip(tags, cosines, strict=True):
            if len(row) <= config.k and not (split == "train" and tag == query):
                own = bank.class_name(tag)
                alike = own == kind if own and kind else None  # without labels nobody knows
                row.append((bank.decode(tag), f"{cosine:.2f} {own}", alike))
        rows.append(row)
    return picture_grid(rows)


def _loader(subject: Subject, split: Split, chosen: NDArray[np.int64] | None = None) -> EvalLoader:
    return build_eval_loader(
        subject.data,
        split,
        subject.augment,
        resize=subject.resize,
        batch=subject.batch,
        rank=subject.place.rank,
        world=subject.place.world,
        in_turn=True,
        device=subject.place.device,
        chosen=chosen,
    )
