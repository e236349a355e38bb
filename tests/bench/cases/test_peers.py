"""Peers make two normalised views of every image, new ones in every epoch."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from fastsiam.bench import peers
from fastsiam.bench.cases.peers import STARTERS, Job, build_peer
from fastsiam.bench.contest import Contender, ContenderFailed, Work
from fastsiam.bench.images import Silent
from fastsiam.config import AugmentConfig, ConvertConfig
from fastsiam.pipelines.convert import convert
from tests.conftest import skip, write_images
from tests.tiers import slow

pytestmark = pytest.mark.usefixtures("forked_contenders")

CROP, BATCH, IMAGES = 32, 8, 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def look(*, device: str, folders: dict[str, str], peer: str) -> dict[str, Work]:
    """In a peer's own process: go through two epochs of each folder and tell what they were."""

    def work(folder: str, blur_p: float) -> Work:
        augment = AugmentConfig.alike(crop=CROP, blur_p=blur_p)
        beton = f"{folder}-beton/train.beton"
        asked = job(folder, beton=beton, augment=augment, device=torch.device(device))
        epoch = STARTERS[peer](asked)
        epochs = [[torch.stack(views) for views in epoch()] for _ in range(2)]
        batches = [batch for epoch in epochs for batch in epoch]
        views = torch.cat(batches, dim=1).cpu()
        facts = {
            "batches": [len(epoch) for epoch in epochs],
            "shapes": {tuple(batch.shape) for batch in batches},
            "types": {(batch.device.type, batch.dtype) for batch in batches},
            "range": (float(views.min()), float(views.max())),
            "finite": bool(views.isfinite().all()),
            "views": len(views.flatten(2).flatten(0, 1).unique(dim=0)),
            "means": views.flatten(2).mean(2).tolist(),
            "version": peers.PEERS[peer].version,
        }
        return Work(lambda: None, IMAGES, lambda: facts)

    return {
        "stripes": work(folders["stripes"], blur_p=0.5),
        "black and white": work(folders["black and white"], blur_p=0.0),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """18 images, so that two are left over: all the same stripes, and plain ones."""
    home = tmp_path_factory.mktemp("peers")
    (first,) = write_images(home / "stripes", classes=1, each=1, side=200).rglob("*.jpg")
    for number in range(1, 18):
        shutil.copyfile(first, first.with_stem(str(number)))
    for name, level in (("black", 10), ("white", 245)):
        (home / "plain" / name).mkdir(parents=True)
        for number in range(9):
            Image.new("RGB", (48, 40), (level,) * 3).save(home / "plain" / name / f"{number}.jpg")
    for name in ("stripes", "plain"):
        out = str(home / f"{name}-beton")
        convert("folder", ConvertConfig(source=str(home / name), out=out), Silent())
    return {"stripes": str(home / "stripes"), "black and white": str(home / "plain")}


def job(folder: str, **changes: Any) -> Job:
    own: dict[str, Any] = {"augment": AugmentConfig.alike(crop=CROP), "batch": BATCH, "workers": 2}
    own |= {"folder": folder, "beton": "", "images": IMAGES, "device": torch.device("cpu")}
    return Job(**(own | changes))


@pytest.fixture(params=DEVICES, scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


PEERS = [slow(name) if name == "ffcv-plain" else name for name in peers.PEERS]
"""FFCV compiles each of its pipelines again, for half a minute."""


@pytest.mark.parametrize("peer", PEERS)
def test_two_views_of_every_image_drawn_anew(
    peer: str, device: str, folders: dict[str, str]
) -> None:
    about = peers.PEERS[peer]
    if reason := about.missing:
        (skip if about.packaged else pytest.skip)(f"needs {about.title}: {reason}")
    contender = Contender(look, {"device": device, "folders": folders, "peer": peer})
    try:
        stripes, plain = contender.facts("stripes"), contender.facts("black and white")
    finally:
        contender.close()
    for facts in (stripes, plain):
        assert facts["batches"] == [IMAGES // BATCH] * 2
        assert facts["shapes"] == {(2, BATCH, 3, CROP, CROP)}
        assert facts["types"] == {(device, torch.float32)}
        assert facts["finite"] and facts["version"]
    low, high = plain["range"]
    assert -2.2 < low < -1 and 1 < high < 2.7  # black and white become -2.1 and 2.6
    # No two alike, though all are of one picture; two boxes may be the same by chance.
    assert 2 * 2 * IMAGES - 2 <= stripes["views"] <= 2 * 2 * IMAGES
    first, second = ([mean < -0.25 for mean in view] for view in plain["means"])
    assert first == second  # of one image: no jitter makes white of black
    assert IMAGES - 4 <= sum(first) <= IMAGES + 4


def test_its_work_is_an_epoch(folders: dict[str, str]) -> None:
    asked = {"peer": "torchvision-v2", "job": job(folders["stripes"])}
    contender = Contender(build_peer, asked)
    try:
        assert contender.images == {"views": IMAGES}
        assert contender.run("views").wall > 0
        facts = contender.facts("views")
    finally:
        contender.close()
    assert facts["differs"] == peers.PEERS["torchvision-v2"].differs and facts["version"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> ModuleSpec | None:
        if name == "nvidia.dali":  # what happens where there is no package nvidia
            raise ModuleNotFoundError("No module named 'nvidia'")
        return None if name == "cv2" else importlib.util.find_spec("json")

    monkeypatch.setattr(peers, "find_spec", find_spec)
    assert peers.PEERS["lightly"].missing is None
    assert peers.PEERS["torchvision-v2"].missing is None
    assert peers.PEERS["albumentations"].missing == "pip install albumentations"
    assert peers.PEERS["dali-solo-learn"].missing == "pip install nvidia-dali-cuda120"


def test_a_folder_without_images_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ContenderFailed, match="class folder"):
        Contender(build_peer, {"peer": "torchvision-v2", "job": job(str(tmp_path))})
