"""The demo's images: classes that pixels and colours do not give away."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fastsiam import demo
from fastsiam.evaluate.knn import knn_accuracy


@pytest.fixture(scope="module")
def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    generator = np.random.default_rng(0)
    labels = torch.arange(10).repeat(60)
    pixels = [np.asarray(demo.make_image(kind, generator)) for kind in labels.tolist()]
    return torch.from_numpy(np.stack(pixels)).float(), labels


def test_neither_mean_colour_nor_pixels_give_the_class_away(
    pictures: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """10% is chance."""
    images, labels = pictures
    colour = torch.cat([images.mean((1, 2)), images.std((1, 2))], 1) / 255
    for features, limit in ((colour - colour.mean(0), 25), (images.flatten(1) - 128, 30)):
        bank = [(features[:500], labels[:500])]
        (result,) = knn_accuracy(bank, features[500:], labels[500:], votes=[(20, 0.2)], classes=10)
        assert result.top1 < limit


def test_images_are_repeatable_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TRAIN", 2)
    monkeypatch.setattr(demo, "VAL", 1)
    for name in ("a", "b"):
        demo.make_images(tmp_path / name)
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.jpg"))
    assert len(files) == 30 and len({f.parts[1] for f in files}) == 10
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
        with Image.open(tmp_path / "a" / file) as image:
            assert image.size == (demo.SIDE, demo.SIDE) and image.mode == "RGB"
