"""The demo's images."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from fastsiam import demo


def test_demo_images_are_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
