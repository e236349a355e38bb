"""All pipelines load the same images, labels, boxes and pixels.

The torchvision pipeline is the reference, because it is what users have. The tolerance is 0 levels
of 255 for all pipelines. On a GPU, DALI decodes and resizes images itself: test_dali_backend.py
checks that graph, with a mean tolerance of 0.2 levels.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fastsiam.config import AugmentConfig
from fastsiam.views.batch import Batch
from tests.data_formats import write_converted, write_once
from tests.pipelines.cases import THREADED, WITH_IMAGES, assert_near, batches, same
from tests.pipelines.dali_cases import KINDS
from tests.sources import gray_jpeg, picture
from tests.views.cases import UNEQUAL

PAIRS = [
    pytest.param(*name.values, kind, marks=name.marks)
    for name in WITH_IMAGES
    for kind in ("folder", "converted", "pixels")
    if name.values != ("torchvision",) and (*name.values, kind) != ("ffcv", "folder")
]
"""FFCV reads converted files."""
LOADER_SETTINGS = {"batch": 10, "seed": 3}
VIEWS = AugmentConfig.alike(crop=96)
CROPS = VIEWS.changed(jitter_p=0, gray_p=0, blur_p=0)


@pytest.fixture(scope="module")
def all_kinds(real_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of all kinds, each in its own class folder.

    ``store/test_decode.py`` tests images that Pillow decodes for all pipelines, at any bit depth.
    """
    root = tmp_path_factory.mktemp("kinds") / "images"

    def place(name: str) -> Path:
        (root / name).mkdir(parents=True)
        return root / name / "image.jpg"

    photographs = sorted(real_images.glob("*/*.JPEG"))[:17]
    for number, photograph in enumerate(photographs):
        place(f"photograph{number:02d}").write_bytes(photograph.read_bytes())
    photo = Image.open(photographs[0]).convert("RGB")
    for kind, make in KINDS.items():
        place(kind).write_bytes(make(5))
    photo.resize((1200, 130)).save(place("longer"), quality=92)
    photo.resize((90, 700)).save(place("narrow"), quality=92)
    photo.convert("L").save(place("gray-progressive"), progressive=True, quality=90)
    place("gray-sampled").write_bytes(gray_jpeg(9, sampling=0x22))
    photo.save(place("half-chroma"), subsampling="4:2:2")
    pages = [picture(5), picture(6)]
    pages[0].save(place("pages"), "TIFF", save_all=True, append_images=pages[1:])
    return root


@lru_cache(maxsize=12)
def load_expected_batches(root: Path, augment: AugmentConfig) -> list[Batch]:
    return batches("torchvision", root, 1, augment=augment, **LOADER_SETTINGS)


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_images_and_pixels_equal_torchvision(name: str, kind: str, all_kinds: Path) -> None:
    root = write_once(kind, all_kinds)
    for augment in (CROPS, VIEWS, UNEQUAL):
        loaded = batches(name, root, 1, augment=augment, **LOADER_SETTINGS)
        assert len(loaded) == 4
        assert_near(loaded, load_expected_batches(root, augment))


@pytest.mark.parametrize("name", [*THREADED, "memory"])
def test_exif_and_alpha_rules_equal_torchvision(name: str, all_kinds: Path) -> None:
    rules: Any = {"exif": "apply", "alpha": "white"}
    source = all_kinds
    if name == "ffcv":
        source = write_converted(all_kinds, all_kinds.with_name("ruled"), raw=True, **rules)
    expected = batches("torchvision", source, 1, augment=VIEWS, **LOADER_SETTINGS, **rules)
    assert not same(expected, load_expected_batches(all_kinds, VIEWS))
    assert_near(batches(name, source, 1, augment=VIEWS, **LOADER_SETTINGS, **rules), expected)
