"""Data sets in all forms that they are published in: found, converted, or said how to get."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastsiam.pipelines.store import BetonStore, open_store
from tests.processes import fastsiam
from tests.sources import VAL_WNIDS, WNIDS, imagenet


def test_the_official_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no options: found under the data root, converted beside it, read from there."""
    root, out = tmp_path / "my data", tmp_path / "my data-beton"
    monkeypatch.setenv("FASTSIAM_DATA", str(root))
    imagenet(root)
    before = {path.name for path in root.iterdir()}
    done = fastsiam("convert", "imagenet")
    assert "train.beton: 9 images of 3 classes" in done.stdout
    assert done.stdout.endswith(f"fastsiam convert verify '{out}'; use it with: --data '{out}'\n")
    assert {path.name for path in out.iterdir()} == {"train.beton", "val.beton", "manifest.json"}
    assert {path.name for path in root.iterdir() if path.name[0] != "."} == before
    train, val = open_store(out, "train"), open_store(out, "val")
    assert isinstance(train, BetonStore) and train.classes == val.classes == WNIDS
    assert [val.classes[label] for label in val.labels] == list(VAL_WNIDS)
    again = fastsiam("convert", "imagenet")
    files = f"rm '{out}/train.beton' '{out}/val.beton'; or choose another --out\n"
    assert again.stdout.startswith(f"there already: {out}/train.beton: 9 images of 3 classes, ")
    assert again.stdout.endswith(f"nothing done; to do it again, delete it first: {files}")
    (out / "val.beton").unlink()
    partly = fastsiam("convert", "imagenet").stdout
    assert f"there already: {out}/train" in partly and f"\n{out}/val.beton: 4 images" in partly
    assert "nothing done" not in partly
    assert "whole" in fastsiam("convert", "verify", str(out), "--decode").stdout


def test_the_demos_images(tmp_path: Path) -> None:
    done = fastsiam("convert", "demo", "--out", str(tmp_path / "demo"))
    assert "train.beton: 4,000 images of 10 classes" in done.stdout
    assert len(open_store(tmp_path / "demo", "val")) == 1000
    done = fastsiam("convert", "demo", "--source", str(tmp_path), code=1)
    assert done.stderr == "error: the demo generates its own images; leave out --source\n"
