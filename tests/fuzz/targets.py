"""Fuzzing targets: files, and the program's own reader of each."""

from __future__ import annotations

import contextlib
import io
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from fastsiam.bad_image_list import BadImage, format_list, read_bad_images
from fastsiam.config import TrainConfig
from fastsiam.config.settings_files import read_settings, to_toml
from fastsiam.console import Console
from fastsiam.interchange import export_weights, load_pretrained
from fastsiam.pipelines.convert.verification import verify
from fastsiam.pipelines.store import open_store
from fastsiam.pipelines.store.index import ROW, keep, pack_texts
from fastsiam.pipelines.store.index import load as load_index
from fastsiam.run import checkpoint as checkpoints
from tests import sources, tables
from tests.configs import TINY, make_checkpoint
from tests.conftest import write_images
from tests.conversions import run
from tests.data_formats import without_checksums
from tests.fuzz import encoded_images
from tests.interchange.networks import untrained
from tests.kernels.decoders import decode

_PIXELS = 1 << 22
ROWS = [(sources.jpeg(i), f"{i}.jpg", i % 2) for i in range(3)]


@dataclass(frozen=True, slots=True)
class Target:
    """A reader and the file that is corrupted for it."""

    place: str
    """Path of the corrupted file within the case's folder."""
    write: Callable[[Path], Sequence[bytes] | object]
    """Writes the valid files of a case to a folder. May return a list of contents for the file to
    corrupt; by default that is what was written.
    """
    read: Callable[[Path], object]
    """Reads the corrupted file, given the case's folder."""
    wrap: Callable[[bytes, bytes], bytes] = lambda content, original: content
    """Builds the file from the corrupted content and the content that was written first."""


def read_images(folder: Path) -> None:
    """Read and decode every image of a store; a bad image raises, as it does in a run."""
    store = open_store(folder, "train")
    _ = store.labels, store.classes, store.dimensions()
    for index in range(len(store)):
        store.name(index)
        store.decode(index)


def _convert(folder: Path) -> list[bytes]:
    """Write a .beton file; return it, and the same without checksums, as FFCV would write it."""
    source = write_images(folder.parent / "images", classes=2, each=3)
    (conversion,) = run("folder", source, folder)
    content = conversion.path.read_bytes()
    return [content, without_checksums(content)]


def _tars(folder: Path) -> list[bytes]:
    members = [(f"c{i % 2}/{i}.jpg", sources.jpeg(i)) for i in range(3)]
    return [
        sources.tar_bytes(members, kind=kind) for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
    ]


def _encoded(folder: Path) -> list[bytes]:
    return encoded_images.images()


def _crop(folder: Path) -> None:
    """Decode with fastsiam's JPEG decoder and check where it writes."""
    data = (folder / "train/c0/0.jpg").read_bytes()
    height = width = 0
    with contextlib.suppress(Exception), Image.open(io.BytesIO(data)) as image:
        height, width = image.height, image.width
    if 0 < width * height <= _PIXELS:
        box = (height // 4, width // 4, max(height // 4 + 1, height // 2), width)
        decode(data, box, (height, width))


def _index(folder: Path) -> None:
    arrays = {"rows": np.zeros(3, ROW), "names": pack_texts(["0.jpg", "1.jpg", "2.jpg"])}
    keep(arrays, [folder / "train.tar.index"], [])


def _weights(name: str) -> Target:
    def write(folder: Path) -> None:
        export_weights(untrained(TINY), format="plain", out=folder / name)

    return Target(name, write, lambda folder: load_pretrained(folder / name))


def _pickled_in(target: Target) -> Target:
    """Return a target that corrupts the pickle in a torch archive and keeps checksums correct."""

    def of(archive: zipfile.ZipFile) -> str:
        return next(name for name in archive.namelist() if name.endswith("data.pkl"))

    def write(folder: Path) -> list[bytes]:
        target.write(folder)
        with zipfile.ZipFile(folder / target.place) as archive:
            return [archive.read(of(archive))]

    def wrap(pickled: bytes, original: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(original)) as archive, zipfile.ZipFile(out, "w") as file:
            for name in archive.namelist():
                file.writestr(name, pickled if name == of(archive) else archive.read(name))
        return out.getvalue()

    return Target(target.place, write, target.read, wrap)


def _yaml(folder: Path) -> list[bytes]:
    sections = tomllib.loads(to_toml(TrainConfig(), recipe="imagenet"))
    return [yaml.safe_dump(sections).encode(), b"recipe: cifar10\noptim:\n  lr: 0.1\n  epochs: 3\n"]


def _bad(folder: Path) -> list[bytes]:
    known = [BadImage(3, 1, "c0/1.jpg", "cut", 0), BadImage(9, 2, "x", "y", 1)]
    return [format_list(known).encode()]


TARGETS: dict[str, Target] = {
    "beton": Target("train.beton", _convert, read_images),
    "manifest": Target(
        "manifest.json",
        lambda folder: _convert(folder) and None,
        lambda folder: verify(folder, decoding=False, workers=0, console=Console(quiet=True)),
    ),
    "tar": Target("train.tar", _tars, lambda folder: read_images(folder / "train.tar")),
    "tar index": Target(
        "train.tar.index", _index, lambda folder: load_index([folder / "train.tar.index"], [])
    ),
    "images": Target("train/c0/0.jpg", _encoded, read_images),
    "jpeg kernels": Target("train/c0/0.jpg", _encoded, _crop),
    "engine": Target(encoded_images.PLACE, encoded_images.write, encoded_images.read),
    "parquet": Target(
        "train.parquet",
        lambda folder: tables.write_parquet(
            folder / "train.parquet", ROWS, ["a", "b"], compression="none"
        ),
        read_images,
    ),
    "arrow": Target(
        "train/data-00000-of-00001.arrow",
        lambda folder: tables.saved(folder, {"train": tables.dataset(ROWS, ["a", "b"])}),
        read_images,
    ),
    "checkpoint": Target(
        "last.pt",
        lambda folder: checkpoints.save(folder / "last.pt", make_checkpoint()),
        lambda folder: checkpoints.load(folder / "last.pt"),
    ),
    "weights": _weights("x.pt"),
    "safetensors": _weights("x.safetensors"),
    "settings in YAML": Target("x.yaml", _yaml, lambda folder: read_settings(folder / "x.yaml")),
    "bad images of a run": Target("bad_images.jsonl", _bad, read_bad_images),
}
"""Targets by name."""
TARGETS |= {f"{name} pickle": _pickled_in(TARGETS[name]) for name in ("checkpoint", "weights")}
