"""Other libraries make two normalised views of every image, new ones in every epoch."""

from __future__ import annotations

import shutil
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from PIL import Image

from fastsiam.bench import peers
from fastsiam.bench.cases.peers import STARTERS, Job, build_peer
from fastsiam.bench.images import Silent
from fastsiam.bench.runner import Runner, Task
from fastsiam.config import AugmentConfig, ConvertConfig
from fastsiam.pipelines.convert import convert
from tests.conftest import skip, write_images
from tests.tiers import slow

CROP, BATCH, IMAGES = 32, 8, 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def build_inspection(*, device: str, folders: dict[str, str], peer: str) -> dict[str, Task]:
    """In a peer's own process: go through two epochs of each folder and tell what they were."""

    def epochs_of(folder: str, blur_p: float) -> Task:
        augment = AugmentConfig.alike(crop=CROP, blur_p=blur_p)
        beton = f"{folder}-beton/train.beton"
        asked = job(folder, beton=beton, augment=augment, device=torch.device(device))
        own = build_peer(peer=peer, job=asked)
        epoch = STARTERS[peer](asked)
        epochs = [[torch.stack(views) for views in epoch()] for _ in range(2)]
        batches = [batch for epoch in epochs for batch in epoch]
        views = torch.cat(batches, dim=1).cpu()
        facts = own.facts() | {
            "batches": [len(epoch) for epoch in epochs],
            "shapes": {tuple(batch.shape) for batch in batches},
            "types": {(batch.device.type, batch.dtype) for batch in batches},
            "range": (float(views.min()), float(views.max())),
            "finite": bool(views.isfinite().all()),
            "views": len(views.flatten(2).flatten(0, 1).unique(dim=0)),
            "means": views.flatten(2).mean(2).tolist(),
        }
        return Task(lambda: None, own.images, lambda: facts)

    return {
        "stripes": epochs_of(folders["stripes"], blur_p=0.5),
        "black and white": epochs_of(folders["black and white"], blur_p=0.0),
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


PEERS = [slow(name) if name == "ffcv-plain" else name for name in peers.PEERS]
"""FFCV compiles each of its pipelines again, for half a minute."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("peer", PEERS)
def test_two_views_of_every_image_drawn_anew(
    peer: str, device: str, folders: dict[str, str]
) -> None:
    if reason := peers.PEERS[peer].missing:
        by_hand = peer in ("spdl", "slipstream")
        (pytest.skip if by_hand else skip)(f"needs {peer}: {reason}")
    runner = Runner(peer, partial(build_inspection, device=device, folders=folders, peer=peer))
    try:
        stripes, plain = runner.facts("stripes"), runner.facts("black and white")
    finally:
        runner.close()
    for facts in (stripes, plain):
        assert facts["batches"] == [IMAGES // BATCH] * 2
        assert facts["shapes"] == {(2, BATCH, 3, CROP, CROP)}
        assert facts["types"] == {(device, torch.float32)}
        assert facts["finite"] and facts["version"]
    assert [one.images for one in runner.timings.values()] == [IMAGES, IMAGES]
    low, high = plain["range"]
    assert -2.2 < low < -1 and 1 < high < 2.7  # black and white become -2.1 and 2.6
    # No two alike, though all are of one picture; two boxes may be the same by chance.
    assert 2 * 2 * IMAGES - 2 <= stripes["views"] <= 2 * 2 * IMAGES
    first, second = ([mean < -0.25 for mean in view] for view in plain["means"])
    assert first == second  # of one image: no jitter makes white of black
    assert IMAGES - 4 <= sum(first) <= IMAGES + 4


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(STARTERS) == set(peers.PEERS)

    def find(name: str) -> ModuleSpec | None:
        if name == "nvidia.dali":  # what happens where there is no package nvidia
            raise ModuleNotFoundError("No module named 'nvidia'")
        return None if name == "cv2" else find_spec("json")

    monkeypatch.setattr(peers, "find_spec", find)
    assert peers.PEERS["lightly"].missing is None
    assert peers.PEERS["albumentations"].missing == "pip install albumentations"
    assert peers.PEERS["dali-solo-learn"].missing == "pip install nvidia-dali-cuda120"
