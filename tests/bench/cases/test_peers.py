"""Other libraries yield two normalised views of every image, drawn again in every epoch."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from PIL import Image

from fastsiam.bench import libraries
from fastsiam.bench.cases import peers as cases
from fastsiam.bench.cases.peers import STARTERS, build_peer
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.runner import Loading, Runner, Task
from fastsiam.bench.session import session
from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.errors import BackendError
from tests.conftest import import_or_skip, skip
from tests.conversions import run
from tests.tiers import slow

CROP, BATCH, IMAGES = 32, 8, 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def build_inspection(*, device: str, folder: str, peer: str) -> Task:
    """Load two epochs in the peer's own process; the task's facts describe the batches."""
    data = DataConfig(data=f"{folder}-beton" if peer == "ffcv-plain" else folder, workers=2)
    loading = Loading(
        data=data, augment=AugmentConfig.alike(crop=CROP), batch=BATCH, images=IMAGES, device=device
    )
    peer_task, epoch = build_peer(peer, loading), STARTERS[peer](loading)
    epochs = [[torch.stack(views) for views in epoch()] for _ in range(2)]
    batches = [batch for epoch in epochs for batch in epoch]
    views = torch.cat(batches, dim=1).cpu()
    facts = peer_task.facts() | {
        "batches": [len(epoch) for epoch in epochs],
        "shapes": {tuple(batch.shape) for batch in batches},
        "types": {(batch.device.type, batch.dtype) for batch in batches},
        "range": (float(views.min()), float(views.max())),
        "finite": bool(views.isfinite().all()),
        "views": len(views.flatten(2).flatten(0, 1).unique(dim=0)),
        "means": views.flatten(2).mean(2).tolist(),
    }
    return Task(lambda: None, peer_task.images, lambda: facts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """18 images, two more than full batches hold: nine with dark waves, nine with light ones."""
    home = tmp_path_factory.mktemp("peers")
    row, column = np.mgrid[:200, :200]
    for name, level in (("dark", 25), ("light", 230)):
        (home / "images" / name).mkdir(parents=True)
        waves = level + 20 * np.sin(row / 9 + column / 5)
        for number in range(9):
            image = Image.fromarray(waves.astype(np.uint8)).convert("RGB")
            image.save(home / "images" / name / f"{number}.jpg", quality=95)
    source = str(home / "images")
    run("folder", source, home / "images-beton")
    return source


PEERS = [slow(name) if name == "ffcv-plain" else name for name in libraries.PEERS]
"""ffcv-plain is slow: FFCV compiles its pipelines again, which takes 15 seconds."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("peer", PEERS)
def test_peer_yields_two_new_views_of_every_image(peer: str, device: str, folder: str) -> None:
    if reason := libraries.PEERS[peer].missing:
        by_hand = peer in ("spdl", "slipstream")
        (pytest.skip if by_hand else skip)(f"needs {peer}: {reason}")
    build = partial(build_inspection, device=device, folder=folder, peer=peer)
    with closing(Runner(peer, build)) as runner:
        facts = runner.facts(peer)
    assert runner.timings[peer].images == IMAGES and facts["version"]
    assert facts["batches"] == [IMAGES // BATCH] * 2
    assert facts["shapes"] == {(2, BATCH, 3, CROP, CROP)}
    assert facts["types"] == {(device, torch.float32)} and facts["finite"]
    low, high = facts["range"]
    assert -2.2 < low < -1 and 1 < high < 2.7  # black and white would be -2.1 and 2.6
    # 2 views in 2 epochs. Fewer differ: each half of the images is equal, and jitter blackens some.
    assert 3 * IMAGES < facts["views"] <= 2 * 2 * IMAGES
    first, second = ([mean < -0.25 for mean in view] for view in facts["means"])
    assert first == second  # both views show the same image: jitter never turns dark into light
    assert IMAGES - 4 <= sum(first) <= IMAGES + 4


def test_images_are_converted_only_for_ffcv(
    bench_config: BenchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "compare", lambda session, rows: rows)
    monkeypatch.setattr(libraries.Peer, "missing", None)
    for peer in ("lightly", "ffcv-plain"):
        with session(replace(bench_config, peers=(peer,), pipelines=("native",))) as bench_session:
            assert len(cases.measure(bench_session)) == 3
            assert bool([*bench_session.folder.rglob("*.beton")]) == (peer == "ffcv-plain")


def test_slipstream_is_rejected_for_other_blur_probability() -> None:
    """slipstream itself need not be installed."""
    loading: Any = SimpleNamespace(augment=AugmentConfig.alike(blur_p=0.0))
    with pytest.raises(BackendError, match="its preset blurs 50% of the views, the recipe 0%"):
        STARTERS["slipstream"](loading)


def test_lightly_is_rejected_for_settings_that_it_lacks() -> None:
    import_or_skip("lightly", "peers")
    loading: Any = SimpleNamespace(augment=AugmentConfig.alike(solarise_p=0.2))
    with pytest.raises(BackendError, match=r"for simsiam supports only solarise-p 0\.0"):
        STARTERS["lightly"](loading)


def test_spdl_threads_use_one_torch_thread(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DataLoader workers also have one thread; SPDL itself need not be installed."""
    for name in ("spdl.io", "spdl.pipeline"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    data = SimpleNamespace(data=folder)
    loading: Any = SimpleNamespace(data=data, augment=AugmentConfig())
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        STARTERS["spdl"](loading)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(STARTERS) == set(libraries.PEERS)

    def find(name: str) -> ModuleSpec | None:
        if name == "nvidia.dali":  # find_spec raises if the package nvidia is missing
            raise ModuleNotFoundError("No module named 'nvidia'")
        return None if name == "cv2" else find_spec("json")

    monkeypatch.setattr(libraries, "find_spec", find)
    assert libraries.PEERS["lightly"].missing is None
    assert libraries.PEERS["albumentations"].missing == "pip install albumentations"
    assert libraries.PEERS["dali-solo-learn"].missing == "pip install nvidia-dali-cuda120"
