"""DALI's crops are PIL's, of every kind of image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fastsiam.config import AugmentConfig
from fastsiam.pipelines import open_store
from tests.pipelines.dali_cases import KINDS, Loaders, gaps, noisy, pil_crops
from tests.sources import encoded
from tests.views.cases import UNEQUAL

pytestmark = pytest.mark.dali


def test_our_kernels_crop_photographs_to_the_last_bit(real_images: Path, loaders: Loaders) -> None:
    """What DALI decodes is cropped by the host's own kernels where there is no GPU."""
    store = open_store(real_images, "train")
    augment = AugmentConfig.alike(crop=224)
    loader = loaders(store, batch=20, augment=augment, dali_resizes=False)
    assert gaps(loader, store, 224, skip=loader.steps - 2).max() == 0


def test_photographs_are_cropped_as_pil_does(real_images: Path, loaders: Loaders) -> None:
    """Within one level; where a box is shrunk, DALI repeats its edge and PIL does without."""
    store = open_store(real_images, "train")
    loader = loaders(store, batch=100, augment=AugmentConfig.alike(crop=224))
    gap = gaps(loader, store, 224, skip=3)
    assert gap.mean() < 0.2 and gap.mean((2, 3, 4)).max() < 0.3
    assert gap[:, :, 4:-4, 4:-4].max() == 1
    assert (gap > 2).mean() < 0.001


def test_views_of_different_sides(real_images: Path, loaders: Loaders) -> None:
    """Each near PIL's, but for edges; DALI's graph has one decoder, and gets each image once."""
    store = open_store(real_images, "train")
    augment = UNEQUAL.changed(scale_min=0.3, scale_max=1.0)
    loader = loaders(store, batch=100, augment=augment)
    dali, fed = loader._cropper._dali, list[int]()
    assert dali.serialize().count(b"decoders__Image") == 1
    feed = dali.feed_input

    def counted(name: str, data: list[NDArray[np.uint8]]) -> None:
        fed.append(len(data) if name == "encoded" else 0)
        feed(name, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dali, "feed_input", counted)
        for index, params, crops in loader.crops(0, skip=3):
            for own, (side, views) in zip(crops, augment.by_side.items(), strict=True):
                theirs = pil_crops(store, index, params.views(views), side)
                gap = np.abs(own.cpu().numpy().astype(np.int64) - theirs)
                inside = gap[:, :, 4:-4, 4:-4]
                assert inside.max() <= 1 and inside.mean() < 0.2 and gap.mean() < 1
    assert sum(fed) == 200


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_image_is_cropped_as_pil_does(
    kind: str, tmp_path: Path, loaders: Loaders
) -> None:
    """Whatever the format, to one level but for the edges: so the decoding is exact."""
    for i in range(8):
        (tmp_path / f"{i}.jpg").write_bytes(KINDS[kind](i))
    store = open_store(tmp_path, "train")
    gap = gaps(loaders(store, augment=AugmentConfig.alike(crop=48)), store, 48, epochs=3)
    assert gap[:, :, 4:-4, 4:-4].max() <= 1
    assert gap.mean() < 0.25 and gap.mean((2, 3, 4)).max() < 0.35


def test_what_is_enlarged_is_pils_to_one_level(tmp_path: Path, loaders: Loaders) -> None:
    for i in range(8):
        (tmp_path / f"{i}.png").write_bytes(encoded(noisy(i, 40, 30), "PNG"))
    store = open_store(tmp_path, "train")
    gap = gaps(loaders(store, augment=AugmentConfig.alike(crop=48)), store, 48, epochs=3)
    assert gap.max() == 1 and gap.mean() < 0.25
