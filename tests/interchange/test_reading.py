"""Detecting a network from key names and shapes; errors name the keys that do not match."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache, partial
from operator import methodcaller
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torchvision
from torch import nn

from fastsiam.config import BackboneConfig, ModelConfig, SimSiamConfig
from fastsiam.errors import CheckpointError
from fastsiam.interchange import load_pretrained, weight_files
from fastsiam.methods import build_method
from tests.configs import TINY, make_model_config, with_model_settings
from tests.interchange.networks import R18, Authors, X, prefixed, resnets, saved_run


@pytest.mark.parametrize(
    "model",
    [
        make_model_config(
            backbone="resnet50", width=8, dim=8, projector_layers=4, projector_dim=24
        ),
        make_model_config(
            backbone="resnet101", stem="cifar", width=4, projector_layers=1, dim=8, predictor_dim=2
        ),
        with_model_settings(TINY, head_bn="all", output_affine=True),
        with_model_settings(TINY, predictor="none"),
    ],
    ids=lambda model: model.backbone,
)
def test_architecture_is_inferred_from_weights(model: ModelConfig, tmp_path: Path) -> None:
    method = build_method(model)
    state = {
        f"module.{k.replace('projector', 'encoder.fc')}": v for k, v in method.state_dict().items()
    }
    torch.save(
        {"state_dict": {k.replace("backbone", "encoder"): v for k, v in state.items()}},
        tmp_path / "w.pth",
    )
    pretrained = load_pretrained(tmp_path / "w.pth")
    backbone_settings = {f.name: getattr(model, f.name) for f in fields(BackboneConfig)}
    assert (pretrained.model, pretrained.method) == (
        BackboneConfig(**backbone_settings),
        SimSiamConfig,
    )
    built = pretrained.build()
    for part in method.parts:
        assert str(built.get_submodule(part)) == str(method.get_submodule(part))


@pytest.mark.parametrize("name", ["shufflenet_v2_x0_5", "regnet_x_400mf"])
def test_other_networks_need_backbone_option(name: str, tmp_path: Path) -> None:
    theirs = torchvision.models.get_model(name)
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match=r"cannot tell which network .*--backbone"):
        load_pretrained(tmp_path / "w.pth")
    pretrained = load_pretrained(tmp_path / "w.pth", backbone=name)
    assert pretrained.model == BackboneConfig(backbone=name) and len(pretrained.unused_keys) == 2
    theirs.eval().set_submodule(pretrained.unused_keys[0].removesuffix(".weight"), nn.Identity())
    assert torch.equal(pretrained.network()(X), theirs(X))


def test_stem_option_resolves_ambiguous_weights(tmp_path: Path) -> None:
    method = saved_run(
        tmp_path / "run", replace(R18, backbone="resnet10", stem="cifar-pad2", width=8)
    )
    path = tmp_path / "w.pth"
    torch.save(method.backbone.state_dict(), path)
    guessed, named = load_pretrained(path), load_pretrained(path, stem="cifar-pad2")
    assert (guessed.model.stem, named.model.stem) == ("cifar", "cifar-pad2")
    assert str(guessed).startswith("ResNet-10 (stem assumed: cifar) of torchvision")
    assert str(named).startswith("ResNet-10 (cifar-pad2 stem) of torchvision")
    assert torch.equal(named.network()(X), method.backbone(X))
    with pytest.raises(ValueError, match="stem must be one of imagenet, cifar"):
        load_pretrained(path, stem="cifar-pad9")
    with pytest.raises(CheckpointError, match=r"holds cifar-pad2, not cifar$"):
        load_pretrained(tmp_path / "run", stem="cifar")
    assert not load_pretrained(tmp_path / "run").stem_assumed
    linear = prefixed(method.backbone.state_dict(), "backbone.")
    linear |= {"classifier.weight": torch.zeros(10, 32), "classifier.bias": torch.zeros(10)}
    torch.save({"state_dict": linear, "pytorch-lightning_version": "1.7"}, path)
    pretrained = load_pretrained(path)
    assert (pretrained.layout, pretrained.model.stem, pretrained.stem_assumed) == (
        "solo-learn",
        "cifar-pad2",
        False,
    )
    torch.save(method.state_dict(), path)  # its names are used by many programs
    assert str(load_pretrained(path)).startswith("ResNet-10 (stem assumed: cifar-pad2) of solo-")


def test_epoch_is_read_by_convention_of_layout(tmp_path: Path) -> None:
    """BN counters missing in old files start at 0; weight averages are listed as left out."""
    state = {k: v for k, v in resnets().items() if not k.endswith("num_batches_tracked")}
    lightning = {"epoch": 89, "pytorch-lightning_version": "2.0"}
    progress = {"epoch_progress": {"current": {"ready": 89, "completed": 89}}}  # after ``fit``
    for entries, epochs in (
        (lightning, 90),
        (lightning | {"loops": {"fit_loop": progress}}, 89),
        (lightning | {"loops": {"fit_loop": {}}}, 90),
        ({"meta": {"epoch": -1}}, None),
        ({"meta": {"epoch": "last"}}, None),
    ):
        content = {"state_dict": state, "model_ema": {"x": torch.zeros(1)}, **entries}
        torch.save(content, tmp_path / "w.pth")
        pretrained = load_pretrained(tmp_path / "w.pth")
        assert pretrained.epoch == epochs and pretrained.unused_keys[-1] == "model_ema"
        assert pretrained.state["backbone.bn1.num_batches_tracked"] == 0


@cache
def _authors() -> Authors:
    return Authors(16, 8)


def broken(change: Callable[[dict[str, Any]], object], folder: Path) -> str:
    """Change the weights of an authors' file; return the error that reading it raises."""
    state = prefixed(_authors().state_dict(), "module.")
    change(state)
    (folder / "w.pth").touch()
    with (
        patch.object(weight_files, "read", return_value={"state_dict": state}),
        pytest.raises(CheckpointError) as caught,
    ):
        load_pretrained(folder / "w.pth")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def drop(state: dict[str, Any], part: str) -> None:
    for key in [key for key in state if part in key]:
        del state[key]


def test_mismatched_weights_are_named(tmp_path: Path) -> None:
    conv, norm = "encoder.conv1.weight", "encoder.bn1.weight"
    value = _authors().encoder.conv1.weight.detach()
    changes: tuple[tuple[str, torch.Tensor, str], ...] = (
        ("encoder.bn9.weight", torch.zeros(3), "1 unknown (encoder.bn9.weight)"),
        (norm, torch.zeros(3), f"1 of a different shape ({norm}: (3,) instead of (64,))"),
        (conv, value.to(torch.int8), f"1 of a different type ({conv}: torch.int8, torch"),
        (conv, value.to_sparse(), f"({conv}: torch.float32, torch.sparse_coo, cpu)"),
        (conv, value.to("meta"), f"({conv}: torch.float32, torch.strided, meta)"),
        ("backbone.conv1.weight", 2 * value, f"two networks, {conv} and backbone.conv1.weight"),
        (conv, value * torch.inf, f"holds weights that are not finite ({conv})"),
    )
    for key, changed, message in changes:
        assert message in broken(methodcaller("update", {f"module.{key}": changed}), tmp_path)
    for part, message in (
        (norm, r"1 missing \(backbone.bn1.weight\)"),
        (".layer1.1.", "cannot tell which network"),
        (".running_var", r"24 missing \(\S+, \S+, \S+ and 21 more\)"),
    ):
        assert re.search(message, broken(partial(drop, part=part), tmp_path))
    wide = torchvision.models.resnext50_32x4d().state_dict()
    torch.save(prefixed(wide, "backbone."), tmp_path / "wide.pth")
    with pytest.raises(CheckpointError, match=r"different shape .*name it with --backbone"):
        load_pretrained(tmp_path / "wide.pth")
    assert load_pretrained(tmp_path / "wide.pth", backbone="resnext50_32x4d").unused_keys


def test_unsupported_heads_are_rejected(tmp_path: Path) -> None:
    """BN without running statistics, after only some hidden layers, or twice after a layer."""
    mean = "module.predictor.1.running_mean"
    assert "1 missing (predictor.1.running_mean)" in broken(lambda s: s.pop(mean), tmp_path)
    backbone = prefixed(resnets(), "backbone.")
    mixed = nn.Sequential(
        *(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()),
        nn.Linear(8, 8),
    )
    twice = nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8))
    for odd in (mixed, twice, nn.Sequential(nn.Linear(31, 8))):
        torch.save(backbone | prefixed(odd.state_dict(), "projector."), tmp_path / "w.pth")
        problems = r"w.pth do not match .* (missing|unknown|shape)"
        with pytest.raises(CheckpointError, match=problems) as caught:
            load_pretrained(tmp_path / "w.pth")
        assert "\n" not in str(caught.value)


def test_lack_of_memory_is_not_corruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({}, path := tmp_path / "w.pth")
    no_memory = RuntimeError("[enforce fail at alloc_cpu.cpp:128] can't allocate memory")
    monkeypatch.setattr(torch, "load", Mock(side_effect=no_memory))
    with pytest.raises(CheckpointError, match=r"cannot read .*w\.pth: out of memory$"):
        load_pretrained(path)


def test_paths_without_weights_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load_pretrained(tmp_path / "nowhere.pth")
    with pytest.raises(CheckpointError, match="is not a run folder"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")  # a run killed before its first checkpoint
    advice = f"start this run with --config {tmp_path} --out {tmp_path}$"
    with pytest.raises(CheckpointError, match=advice):
        load_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_text("{}")  # a folder of Hugging Face's libraries
    with pytest.raises(CheckpointError, match=r"no checkpoint .*; pass the file .*/model\.safe"):
        load_pretrained(tmp_path)
