"""What is fuzzed: which files, and the program's own reader of each."""

from __future__ import annotations

import contextlib
import io
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import yaml
from PIL import Image

from fastsiam.bad_image_list import BadImage, format_list, read_bad_images
from fastsiam.bench.images import Silent
from fastsiam.config import ConvertConfig, TrainConfig
from fastsiam.config.files import read_settings, to_toml
from fastsiam.interchange import export_weights, load_pretrained
from fastsiam.kernels.library import jpeg as jpeg_library
from fastsiam.pipelines.convert import convert
from fastsiam.pipelines.convert.verify import verify
from fastsiam.pipelines.store import Store, open_store
from fastsiam.pipelines.store.index import ROW, keep, pack_texts
from fastsiam.pipelines.store.index import load as load_index
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.checkpoint import Checkpoint
from tests import sources, tables
from tests.conftest import write_images
from tests.fuzz import encoded_images
from tests.interchange.networks import TINY, untrained
from tests.kernels.decoders import Decoder

_PIXELS = 1 << 22
Files = dict[str, bytes]
"""Contents by their paths within a folder."""


@dataclass(frozen=True, slots=True)
class Target:
    """One reader."""

    corpus: Callable[[Path], Sequence[bytes]]
    """Makes valid files, in a folder that it may use; returns their contents."""
    place: str
    """Where a damaged one lies within the case's folder."""
    read: Callable[[Path], object]
    """Reads it; gets the case's folder."""
    beside: Callable[[Path], Files] = lambda _: {}
    """Makes other files of a case, which are whole."""
    wrap: Callable[[bytes], bytes] = bytes
    """Puts what was damaged into the file that is read."""


def all_of(store: Store) -> None:
    """Read and decode every image of a store; a bad one ends it, as it does a run."""
    _ = store.labels, store.classes, store.dimensions()
    for index in range(len(store)):
        store.name(index)
        store.decode(index)


def _train(folder: Path) -> None:
    all_of(open_store(folder, "train"))


@cache
def _converted(folder: Path) -> Path:
    images, out = folder / "images", folder / "beton"
    write_images(images / "train", classes=2, each=3)
    convert("folder", ConvertConfig(source=str(images), out=str(out)), Silent())
    return out


def _bytes_of(path: Path) -> list[bytes]:
    return [path.read_bytes()]


def _tars(folder: Path) -> list[bytes]:
    members = [(f"c{i % 2}/{i}.jpg", sources.jpeg(i)) for i in range(3)]
    return [
        sources.tar_bytes(members, kind=kind) for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
    ]


def _jpegs(folder: Path) -> list[bytes]:
    return [
        sources.jpeg(0),
        sources.jpeg(1, progressive=True),
        sources.jpeg(2, subsampling=2, quality=30),
        sources.gray_jpeg(3),
        sources.rotated_jpeg(4),
        sources.encoded(sources.picture(5), "PNG"),
        sources.encoded(sources.picture(6), "WEBP"),
    ]


@cache
def _checkpoint() -> bytes:
    state = Checkpoint(
        config=TrainConfig(), step=3, seconds=1.5, images=100, steps_per_epoch=4,
        model={"weight": torch.ones(3)}, optimizer={"state": {}, "param_groups": []}, scaler={},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        checkpoints.save(path := Path(folder, "last.pt"), state)
        return path.read_bytes()


@cache
def _weights(ending: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        export_weights(untrained(TINY), format="plain", out=(path := Path(folder, f"x{ending}")))
        return path.read_bytes()


def _pickle_in(archive: bytes) -> bytes:
    """Return what torch pickled into an archive of its own."""
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        return file.read(_name_of_pickle(file))


def _name_of_pickle(file: zipfile.ZipFile) -> str:
    return next(name for name in file.namelist() if name.endswith("data.pkl"))


def _around(archive: bytes, pickled: bytes) -> bytes:
    """Put another pickle into an archive of torch's, with correct checksums."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as whole, zipfile.ZipFile(out, "w") as file:
        mine = _name_of_pickle(whole)
        for name in whole.namelist():
            file.writestr(name, pickled if name == mine else whole.read(name))
    return out.getvalue()


def _yaml(folder: Path) -> list[bytes]:
    sections = tomllib.loads(to_toml(TrainConfig(), recipe="imagenet"))
    return [yaml.safe_dump(sections).encode(), b"recipe: cifar10\noptim:\n  lr: 0.1\n  epochs: 3\n"]


def _bad(folder: Path) -> list[bytes]:
    known = [BadImage(3, 1, "c0/1.jpg", "cut", 0), BadImage(9, 2, "x", "y", 1)]
    return [format_list(known).encode()]


def _tar_index(folder: Path) -> list[bytes]:
    arrays = {"rows": np.zeros(3, ROW), "names": pack_texts(["0.jpg", "1.jpg", "2.jpg"])}
    home = keep(arrays, [folder / "index"], [])
    assert home is not None
    return _bytes_of(home)


def _crops(folder: Path) -> None:
    """Decode by our own reader of JPEGs, which checks where it writes."""
    data = (folder / "train/c0/0.jpg").read_bytes()
    height = width = 0
    with contextlib.suppress(Exception), Image.open(io.BytesIO(data)) as image:
        height, width = image.height, image.width
    if 0 < width * height <= _PIXELS:
        library = jpeg_library()
        assert library is not None
        box = (height // 4, width // 4, max(height // 4 + 1, height // 2), width)
        Decoder(library.fastsiam_decode)(data, box, (height, width))


def _parquet(folder: Path) -> list[bytes]:
    path = folder / "train.parquet"
    rows = [(sources.jpeg(i), f"{i}.jpg", i % 2) for i in range(3)]
    sources.parquet(path, rows, ["a", "b"], compression="none")
    return _bytes_of(path)


def _arrow(folder: Path) -> list[bytes]:
    rows = [(sources.jpeg(i), f"{i}.jpg", i % 2) for i in range(3)]
    saved = tables.saved(folder / "saved", {"train": tables.dataset(rows, ["a", "b"])})
    return [path.read_bytes() for path in saved.rglob("*.arrow")]


def _arrow_beside(folder: Path) -> Files:
    _arrow(folder)
    whole = folder / "saved"
    return {str(x.relative_to(whole)): x.read_bytes() for x in whole.rglob("*") if x.is_file()}


def _verified(folder: Path) -> None:
    verify(folder, workers=0, watcher=Silent())


def _load_checkpoint(folder: Path) -> object:
    return checkpoints.load(folder / "last.pt")


def _load_weights(folder: Path) -> object:
    return load_pretrained(next(folder.glob("x.*")))


TARGETS: dict[str, Target] = {
    "beton": Target(
        lambda folder: _bytes_of(_converted(folder) / "train.beton"),
        "train.beton",
        _train,
        lambda folder: {"manifest.json": (_converted(folder) / "manifest.json").read_bytes()},
    ),
    "manifest": Target(
        lambda folder: _bytes_of(_converted(folder) / "manifest.json"),
        "manifest.json",
        _verified,
        lambda folder: {"train.beton": (_converted(folder) / "train.beton").read_bytes()},
    ),
    "tar": Target(
        _tars, "train.tar", lambda folder: all_of(open_store(folder / "train.tar", "train"))
    ),
    "tar index": Target(
        _tar_index, "train.tar.index", lambda folder: load_index([folder / "train.tar.index"], [])
    ),
    "images": Target(_jpegs, "train/c0/0.jpg", _train),
    "jpeg kernels": Target(_jpegs, "train/c0/0.jpg", _crops),
    "engine": Target(
        encoded_images.images, encoded_images.PLACE, encoded_images.read, encoded_images.beside
    ),
    "parquet": Target(_parquet, "train.parquet", _train),
    "arrow": Target(_arrow, "train/data-00000-of-00001.arrow", _train, _arrow_beside),
    "checkpoint": Target(lambda _: [_checkpoint()], "last.pt", _load_checkpoint),
    "checkpoint pickle": Target(
        lambda _: [_pickle_in(_checkpoint())],
        "last.pt",
        _load_checkpoint,
        wrap=lambda content: _around(_checkpoint(), content),
    ),
    "weights": Target(lambda _: [_weights(".pt")], "x.pt", _load_weights),
    "weights pickle": Target(
        lambda _: [_pickle_in(_weights(".pt"))],
        "x.pt",
        _load_weights,
        wrap=lambda content: _around(_weights(".pt"), content),
    ),
    "safetensors": Target(lambda _: [_weights(".safetensors")], "x.safetensors", _load_weights),
    "settings in YAML": Target(_yaml, "x.yaml", lambda folder: read_settings(folder / "x.yaml")),
    "bad images of a run": Target(_bad, "bad_images.jsonl", read_bad_images),
}
"""By name."""
