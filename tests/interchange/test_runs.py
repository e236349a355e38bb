"""Runs of ours are read whole, once, and without effects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastsiam.errors import CheckpointError
from fastsiam.interchange import load_pretrained
from fastsiam.run import checkpoint as checkpoints
from tests.interchange.networks import TINY, X, saved_run


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
