"""Images for benchmarks: some of the user's, or generated ones that resemble ImageNet's."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fastsiam.bench.config import BenchConfig, Stored
from fastsiam.config import ColumnNames, ConvertConfig
from fastsiam.console import Console
from fastsiam.errors import DataError
from fastsiam.files import os_errors_as
from fastsiam.pipelines.convert import convert
from fastsiam.pipelines.store import Store, open_store
from fastsiam.pipelines.store.base import IMAGE_ENDINGS
from fastsiam.pipelines.store.columns import require_pyarrow

_CONVERTED: dict[Stored, ConvertConfig] = {
    "beton": ConvertConfig(),
    "short256": ConvertConfig(short_side=256),
    "pixels256": ConvertConfig(short_side=256, raw=True),
}

_MADE, _TAKEN = 512, 8192
"""Maximum number of distinct images: generated ones, and the user's. Links repeat them."""
_ROW_GROUP = 100
"""Images per Parquet row group, as in Hugging Face's data sets."""
_SIZES = ((500, 375),) * 20 + ((500, 333),) * 15 + ((375, 500),) * 6 + ((333, 500),) * 5 + (
    (640, 480), (600, 450), (500, 500), (400, 300), (250, 200), (800, 600), (160, 120)
)  # fmt: skip
"""Widths and heights, with about the frequencies of ImageNet."""


@dataclass(frozen=True)
class Images:
    """Images in a separate folder on the local disk."""

    folder: Path
    """Class folders of encoded images."""
    count: int
    about: str
    """Description for display."""

    def convert_to(self, form: Stored) -> Path:
        """Return a folder with the images converted to some form, created on first use."""
        out = self.folder.with_name(f"{self.folder.name}-{form}")
        if out.exists():
            return out
        if form in ("tar", "parquet"):
            store = open_store(self.folder, "train")
            with writing_to(out):
                out.mkdir()
                (_write_tar if form == "tar" else _write_parquet)(store, out / f"train.{form}")
        else:
            config = replace(_CONVERTED[form], source=str(self.folder), out=str(out))
            convert("folder", config, Console(quiet=True))
        return out

    def encode(self, quality: int) -> Images:
        """Return the images re-encoded as JPEGs of some quality; they are created on first use."""
        target = self.folder.with_name(f"{self.folder.name}-q{quality}")
        if not target.exists():
            for path in sorted(self.folder.rglob("*.*")):
                file = target / path.relative_to(self.folder).with_suffix(".jpg")
                with writing_to(target), Image.open(path) as image:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    image.convert("RGB").save(file, quality=quality)
        return Images(target, self.count, f"{self.about}, re-encoded with quality {quality}")


def users_store(config: BenchConfig) -> Store | None:
    """Open the user's images; None if no data was given, so that images must be generated."""
    if config.data or os.environ.get("FASTSIAM_DATA") or Path(str(config.root)).exists():
        columns = ColumnNames(config.image_column, config.label_column)
        return open_store(config.root, "train", columns=columns)
    return None


def take_images(
    config: BenchConfig, count: int, folder: Path, say: Callable[[str], None]
) -> Images:
    """Copy some of the user's images into a new folder, or generate some; ``say`` reports which.

    Links repeat images if there are fewer than ``count``.

    Raises:
        DataError: the user's images cannot be read, or the folder cannot be written.
    """
    target = folder / f"images-{count}"
    store, kinds = users_store(config), f"images of {folder_name(config.root)}"
    if store is None:
        say("no data given: generating images that resemble ImageNet's")
        generated = folder / f"made-{count}"
        with writing_to(generated):
            make_images(generated, min(count, _MADE))
        store = open_store(generated, "train")
        kinds = "made images (noise of natural spectra, edges, ImageNet's sizes)"
    distinct = min(count, len(store), _TAKEN)
    indices = np.linspace(0, len(store), distinct, endpoint=False, dtype=np.int64)
    with writing_to(target):
        size = _copy(store, indices.tolist(), count, target)
    about = (
        f"{distinct:,} of the {len(store):,} {kinds}, {size / distinct / 1000:,.0f} kB on average"
    )
    images = Images(target, count, about)
    say(f"{count:,} images: {images.about}; copied to {folder} (in the page cache)")
    return images


def folder_name(root: object) -> str:
    """Return the last part of a path or URL, also of "."."""
    return os.path.basename(os.path.abspath(str(root)))


def writing_to(folder: Path) -> AbstractContextManager[None]:
    """Convert an ``OSError`` in the block, such as that of a full disk, to a ``DataError``."""
    what = f"cannot write images to {folder} (TMPDIR chooses another disk)"
    return os_errors_as(DataError, what)


def make_images(folder: Path, count: int) -> Sequence[Path]:
    """Generate JPEGs that decode about as fast as ImageNet's, in class folders below ``folder``.

    They show noise with the spectrum of natural images, smooth light and sharp edges. The sizes are
    those of ImageNet, the quality is 95, and three quarters have no chroma subsampling. The noise
    is so strong that a pixel takes 0.56 bytes on average, from 0.2 to 1.1 (a sample of ImageNet:
    0.56, from 0.15 to 1.1).
    """
    generator = np.random.default_rng(0)
    smooth, fine = ([_noise(slope, generator) for _ in range(4)] for slope in (2.2, 0.5))

    def make(number: int) -> Path:
        rng = np.random.default_rng(number)
        width, height = _SIZES[rng.integers(len(_SIZES))]

        def cut(fields: list[NDArray[np.float32]]) -> NDArray[np.float32]:
            field = fields[rng.integers(len(fields))]
            top, left = (rng.integers(len(field) - side) for side in (height, width))
            return field[top : top + height, left : left + width]

        detail = 14.5 * np.exp(rng.normal()) * (1 + 0.8 * np.tanh(2 * cut(smooth)))
        light = 110 + 45 * cut(smooth) + np.where(cut(smooth) > rng.normal(), 30, -30)
        gray, red, blue = light + detail * cut(fine), 18 * cut(smooth), 18 * cut(smooth)
        pixels = np.stack([gray + red, gray - (red + blue) / 2, gray + blue], -1)
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        path = folder / f"class{number % 8}" / f"{number:05d}.jpg"
        image.save(path, quality=95, subsampling=0 if rng.random() < 0.77 else 2)
        return path

    for kind in range(8):
        (folder / f"class{kind}").mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(make, range(count)))


def _noise(slope: float, generator: np.random.Generator, side: int = 1024) -> NDArray[np.float32]:
    """Generate noise whose amplitude falls with frequency, with mean 0 and standard deviation 1."""
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None])
    frequency[0, 0] = 1
    phase = 2j * np.pi * generator.random(frequency.shape)
    field: NDArray[np.float64] = np.fft.irfft2(frequency**-slope * np.exp(phase), (side, side))
    field = (field - field.mean()) / field.std()
    return field.astype(np.float32)


def _copy(store: Store, indices: list[int], count: int, target: Path) -> int:
    """Write images of a store as files in class folders; raw pixels become JPEGs.

    Hard links repeat the images at ``indices`` until there are ``count``.

    Returns:
        Total size of the chosen images in bytes, without links.
    """
    files: list[Path] = []
    for number, index in enumerate(indices):
        label = int(store.labels[index])
        kind = target / (f"class{label:05d}" if label >= 0 else "images")
        kind.mkdir(parents=True, exist_ok=True)
        image = store.decode(index)  # an error names the user's own file
        suffix = Path(store.name(index)).suffix.lower()
        file = kind / f"{number:06d}{suffix if suffix in IMAGE_ENDINGS else '.jpg'}"
        data = store.read(index)
        if store.raw_size(index) is None:
            file.write_bytes(data)
        else:
            file = file.with_suffix(".jpg")
            image.save(file, quality=95)
        files.append(file)
    for number in range(len(indices), count):
        first = files[number % len(indices)]
        os.link(first, first.with_stem(f"{number:06d}"))
    return sum(path.stat().st_size for path in files)


def add_to_tar(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a file with the given content to a tar archive."""
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def _write_tar(store: Store, path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for index in range(len(store)):
            add_to_tar(tar, store.name(index), bytes(store.read(index)))


def _write_parquet(store: Store, path: Path) -> None:
    require_pyarrow(path)
    import pyarrow as pa
    from pyarrow import parquet

    images = [bytes(store.read(index)) for index in range(len(store))]
    table = pa.table({"image": images, "label": store.labels})
    options = {"compression": "none", "use_dictionary": False, "row_group_size": _ROW_GROUP}
    parquet.write_table(table, path, **options)
