"""Runs are read whole, once, and without effects, whatever their method keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastsiam.config import FastSiamConfig
from fastsiam.errors import CheckpointError
from fastsiam.interchange import load_pretrained
from fastsiam.run import checkpoint as checkpoints
from tests.configs import changed_model
from tests.interchange.networks import TINY, X, same, saved_run

VARIANTS = {
    "BN on all layers": changed_model(TINY, head_bn="all"),
    "no predictor": changed_model(TINY, predictor="none"),
    "frozen encoder": changed_model(TINY, alternate_every=10),
    "averages": changed_model(TINY, predictor="none", target_average=0.8),
    "fastsiam": replace(TINY, method=FastSiamConfig(projector_layers=2, dim=16, predictor_dim=4)),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_is_read(variant: str, tmp_path: Path) -> None:
    """Its network up to both layers; a frozen copy is no part of it."""
    model = VARIANTS[variant]
    method = saved_run(tmp_path / "run", model)
    if variant == "frozen encoder":
        with torch.no_grad():
            for weight in method.get_submodule("frozen").parameters():
                weight.zero_()
        state = torch.load(tmp_path / "run/checkpoints/last.pt", weights_only=True)
        torch.save(state | {"model": method.state_dict()}, tmp_path / "run/checkpoints/last.pt")
    read = load_pretrained(tmp_path / "run")
    assert read.model == model
    with torch.no_grad():
        z = method.projector(method.backbone(X))
        same(read.network()(X), method.backbone(X))
        same(read.network("projector")(X), z)


def test_a_run_is_read_whole(tmp_path: Path) -> None:
    method = saved_run(tmp_path / "run", TINY)
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "last.pt"):
        read = load_pretrained(path)
        assert (read.layout, read.model, read.epoch, read.images) == ("fastsiam", TINY, 7.5, 1234)
        assert read.run == tmp_path / "run" and read.left_out == ()
        assert torch.equal(read.network()(X), method.backbone(X))
        projected = read.network("projector")
        assert torch.equal(projected(X), method.projector(method.backbone(X)))
        assert (read.network().features, projected.features) == (32, 16)
    line = f"resnet10 (cifar stem) of a run of fastsiam, 7.5 epochs, from {read.path}"
    assert str(read) == line.replace("resnet10", "ResNet-10")


def test_a_run_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_run(tmp_path, TINY)
    load, reads = torch.load, []

    def counted(path: Path, **settings: Any) -> Any:
        reads.append(path)
        return load(path, **settings)

    monkeypatch.setattr(torch, "load", counted)
    load_pretrained(tmp_path)
    assert reads == [checkpoints.last(tmp_path)]


def test_a_network_is_built_without_moving_the_generator(tmp_path: Path) -> None:
    saved_run(tmp_path, TINY)
    read = load_pretrained(tmp_path)
    before = torch.get_rng_state()
    network = read.network()
    assert torch.equal(torch.get_rng_state(), before)
    assert not network.training and all(p.dtype == torch.float32 for p in network.parameters())


@pytest.mark.parametrize(
    "model, message",
    [
        ("weights", "holds no weights by name"),
        ({"backbone.conv1.weight": 3}, "holds no weights by name"),
        ({"backbone.conv1.weight": torch.zeros(3)}, "are not those of the ResNet"),
    ],
)
def test_a_run_of_nonsense_is_refused(model: Any, message: str, tmp_path: Path) -> None:
    saved_run(tmp_path, TINY)
    path = checkpoints.last(tmp_path)
    torch.save({**torch.load(path, weights_only=True), "model": model}, path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_pretrained(tmp_path)
    assert "\n" not in str(caught.value)
