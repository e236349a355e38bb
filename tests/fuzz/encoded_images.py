"""Encoded images of every format and various sizes, for fuzzing the engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fastsiam.config import AugmentConfig
from fastsiam.config.views import ViewConfig
from fastsiam.errors import ImageError
from fastsiam.pipelines.cuts import cut_views
from fastsiam.pipelines.engine import Engine
from fastsiam.pipelines.job import stages_of
from fastsiam.views.batch import crop_shapes
from fastsiam.views.draws import draw_views
from tests.pipelines.cases import ListStore
from tests.pipelines.dali_cases import pil_crops
from tests.sources import encoded, gray_jpeg, picture, rotated_jpeg

PLACE = "3"
"""File name of the corrupted image; names are positions in the batch."""
_MOST_PIXELS = 1 << 22
_PARTS = (ViewConfig(crop=24), ViewConfig(crop=24), ViewConfig(crop=9))
_WHOLE = ViewConfig(crop=9, scale_min=1, ratio_min=0.01, ratio_max=100)
"""A view of the entire image: decoding it fills the scratch buffer to its end."""


def images() -> list[bytes]:
    """Return valid images, which are corrupted later."""
    return [
        _image(0, 40, 30, "JPEG"),
        _image(1, 133, 75, "JPEG", subsampling="4:2:0", restart_marker_blocks=3),
        _image(2, 64, 64, "JPEG", subsampling="4:2:2"),
        _image(3, 17, 90, "JPEG", subsampling="4:4:4", quality=100),
        _image(4, 90, 61, "JPEG", progressive=True, quality=30),
        gray_jpeg(5),
        gray_jpeg(6, sampling=0x32, progressive=True),
        rotated_jpeg(7),
        encoded(picture(8).convert("CMYK"), "JPEG"),
        _image(9, 51, 33, "PNG"),
        encoded(picture(10).convert("LA"), "PNG"),
        _image(11, 31, 47, "WEBP"),
        _image(12, 40, 30, "WEBP", lossless=True),
        _image(13, 26, 19, "TIFF"),
        _image(14, 40, 30, "TIFF", compression="tiff_lzw"),
    ]


def write(folder: Path) -> list[bytes]:
    """Write valid images of each kind at all positions except that of the corrupted one."""
    valid = images()
    for at, number in enumerate((1, 4, 9, 0, 11, 13, 3)):
        (folder / str(at)).write_bytes(valid[number])
    (folder / PLACE).unlink()
    return valid


def read(folder: Path) -> None:
    """Compute views and then crops of a batch like a loader; crops must equal Pillow's.

    Raises:
        AssertionError: a crop differs, or an error does not name the corrupted image.
    """
    # An array's allocation ends with the file; a bytes object has one more byte.
    paths = sorted(folder.iterdir())
    store = ListStore([np.fromfile(path, np.uint8).data for path in paths])  # type: ignore[misc]
    engine = Engine(store, workers=2)
    try:
        _make(engine, store, AugmentConfig(views=(*_PARTS, _WHOLE)), finished=True)
        _make(engine, store, AugmentConfig(views=_PARTS), finished=False)
    except ImageError as error:
        assert error.index == int(PLACE) and f"image {PLACE}" in str(error), error
        raise
    finally:
        engine.close()


def _make(engine: Engine, store: ListStore, config: AugmentConfig, *, finished: bool) -> None:
    index = np.arange(len(store))
    batch = engine.read(index)
    if (batch.size.prod(1) > _MOST_PIXELS).any():
        return
    params = draw_views(config, seed=0, epoch=0, index=index, size=batch.size)
    cuts = cut_views(params, config)
    if finished:
        stages = stages_of(params, config, torch.float32)
        engine.submit(index, batch, cuts, stages=stages).result()
        assert all(stage.views().isfinite().all() for stage in stages)
        return
    shapes = crop_shapes(config, len(index))
    crops = tuple(torch.empty(shape, dtype=torch.uint8) for shape in shapes)
    engine.submit(index, batch, cuts, crops=crops).result()
    for cut, side, crop in zip(cuts, config.by_side, crops, strict=True):
        np.testing.assert_array_equal(crop, pil_crops(store, index, cut, side))


def _image(seed: int, width: int, height: int, kind: str, **options: object) -> bytes:
    return encoded(picture(seed, width=width, height=height), kind, **options)
