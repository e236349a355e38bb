"""Weights in, in the layouts of other programs: the same outputs, nothing left over."""

from __future__ import annotations

import argparse
import collections
import itertools
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import resnet

from fastsiam.config import ModelConfig, Stem
from fastsiam.errors import CheckpointError
from fastsiam.interchange import Pretrained, export_weights, load_pretrained
from tests.configs import changed_model, model_of
from tests.interchange.networks import R18, Authors, X, ours, prefixed, resnets, same, trained
from tests.tiers import rest_slow


def test_the_authors_files_are_read(tmp_path: Path) -> None:
    """Their frozen bias is not zero but as it was drawn; it is folded away."""
    theirs = trained(Authors("resnet18", 256, 32))
    assert theirs.encoder.fc[6].bias.abs().max() > 0
    state = prefixed(theirs.state_dict(), "module.")
    content = {"epoch": 100, "arch": "resnet18", "state_dict": state, "optimizer": {"state": {}}}
    torch.save(content, tmp_path / "checkpoint_0099.pth.tar")
    read = load_pretrained(tmp_path / "checkpoint_0099.pth.tar")
    expected = changed_model(R18, dim=256, projector_dim=512)
    assert (read.layout, read.model, read.epoch) == ("simsiam", expected, 100)
    method = ours(read)
    with torch.no_grad():
        same(method.projector(method.backbone(X)), theirs.encoder(X))
        same(method.predictor(method.projector(method.backbone(X))), theirs(X))
    assert str(read).startswith("ResNet-18 of simsiam (the authors' layout), 100 epochs, from ")


def test_lightlys_networks_are_read(tmp_path: Path) -> None:
    """torchvision's children in an ``nn.Sequential``, as in lightly's examples."""
    heads = pytest.importorskip("lightly.models.modules.heads")
    children = list(torchvision.models.resnet18().children())[:-1]
    theirs = nn.ModuleDict(
        {
            "backbone": nn.Sequential(*children),
            "projection_head": heads.SimSiamProjectionHead(512, 96, 64),
            "prediction_head": heads.SimSiamPredictionHead(64, 24, 64),
        }
    )
    read = lightlys(theirs, tmp_path)
    assert read.model == model_of(backbone="resnet18", dim=64, projector_dim=96, predictor_dim=24)


@pytest.mark.parametrize("width", [1.0, 0.25])
@pytest.mark.parametrize("sequential", [True, False])
def test_lightlys_own_resnets_are_read(sequential: bool, width: float, tmp_path: Path) -> None:
    """Its ResNet-9 is our ResNet-10. Its Sequential loses the ReLU of the stem, and so do we."""
    heads = pytest.importorskip("lightly.models.modules.heads")
    from lightly.models import ResNetGenerator

    network = ResNetGenerator("resnet-9", width=width)
    if sequential:
        backbone = nn.Sequential(*list(network.children())[:-1], nn.AdaptiveAvgPool2d(1))
    else:
        network.linear = nn.Linear(int(512 * width), 10)
        backbone = network
    features = int(512 * width)
    theirs = nn.ModuleDict(
        {
            "backbone": backbone,
            "projection_head": heads.SimSiamProjectionHead(features, 32, 32),
            "prediction_head": heads.SimSiamPredictionHead(32, 8, 32),
        }
    )
    read = lightlys(theirs, tmp_path, x=X[..., :32, :32])
    stem = "cifar-no-relu" if sequential else "cifar"
    assert (read.model.backbone, read.model.stem) == ("resnet10", stem)
    assert read.model.width == int(64 * width)
    unused = () if sequential else ("backbone.linear.weight", "backbone.linear.bias")
    assert read.left_out[: len(unused)] == unused


def lightlys(theirs: nn.ModuleDict, folder: Path, x: Tensor = X) -> Pretrained:
    """Train it a little, save it as Lightning does, read it and compare the outputs."""

    def encoded(x: Tensor) -> Any:
        backbone: Any = theirs["backbone"]
        if hasattr(backbone, "linear"):  # before the classifier
            seen: list[Tensor] = []
            hook = backbone.linear.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
            backbone(x)
            hook.remove()
            return seen[0]
        return backbone(x).flatten(1)

    theirs.train()
    for _ in range(2):
        theirs["prediction_head"](theirs["projection_head"](encoded(x + torch.rand_like(x))))
    theirs.eval()
    content = {
        "epoch": 4,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {
            **theirs.state_dict(),
            "online_classifier.linear.weight": torch.zeros(10, 4),
        },
    }
    torch.save(content, folder / "last.ckpt")
    read = load_pretrained(folder / "last.ckpt")
    assert (read.layout, read.epoch) == ("lightly", 5)
    assert "online_classifier.linear.weight" in read.left_out
    method = ours(read)
    with torch.no_grad():
        same(method.backbone(x), encoded(x))
        z = theirs["projection_head"](encoded(x))
        same(method.projector(method.backbone(x)), z)
        same(method.predictor(method.projector(method.backbone(x))), theirs["prediction_head"](z))
    return read


class SoloLearn(nn.Module):
    """Written from solo/methods/base.py and simsiam.py; ``classifier`` watches the training."""

    def __init__(self, backbone: str, encoder: nn.Module, features: int, dim: int) -> None:
        super().__init__()
        self.backbone_name = backbone
        self.add_module(backbone, encoder)
        self.projector = nn.Sequential(
            *(nn.Linear(features, 96, bias=False), nn.BatchNorm1d(96), nn.ReLU()),
            *(nn.Linear(96, 96, bias=False), nn.BatchNorm1d(96), nn.ReLU()),
            *(nn.Linear(96, dim), nn.BatchNorm1d(dim, affine=False)),
        )
        self.predictor = nn.Sequential(
            *(nn.Linear(dim, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU()),
            nn.Linear(16, dim),
        )
        self.classifier = nn.Linear(features, 10)

    def forward(self, x: Tensor) -> Tensor:
        features = self.get_submodule(self.backbone_name)(x)
        out: Tensor = self.predictor(self.projector(features))
        return out


@pytest.mark.parametrize(
    ("backbone", "small"),
    rest_slow(
        [("backbone", True), ("encoder", False), ("backbone", False), ("encoder", True)], fast=2
    ),
)
def test_solo_learns_files_are_read(backbone: str, small: bool, tmp_path: Path) -> None:
    """Names of solo/methods/base.py and simsiam.py; the 3x3 stem is padded by 2 pixels there."""
    encoder = torchvision.models.resnet18()
    encoder.fc = nn.Identity()
    if small:
        encoder.conv1 = nn.Conv2d(3, 64, 3, stride=1, padding=2, bias=False)
        encoder.maxpool = nn.Identity()
    theirs = trained(SoloLearn(backbone, encoder, 512, 64))
    torch.save(
        {
            "state_dict": theirs.state_dict(),
            "epoch": 399,
            "pytorch-lightning_version": "1.7",
            "hyper_parameters": argparse.Namespace(method="simsiam", kwargs={"a": np.float64(3)}),
            "loops": collections.defaultdict(list, {"x": [np.arange(3)]}),
            "paths": [Path("/tmp/x"), collections.deque([1, 2])],
        },
        tmp_path / "simsiam.ckpt",
    )
    read = load_pretrained(tmp_path / "simsiam.ckpt")
    stem: Stem = "cifar-pad2" if small else "imagenet"
    expected = model_of(backbone="resnet18", stem=stem, dim=64, projector_dim=96, predictor_dim=16)
    assert (read.layout, read.model, read.epoch) == ("solo-learn", expected, 400)
    assert read.left_out == ("classifier.weight", "classifier.bias")
    assert str(read).endswith("; left out: classifier.weight, classifier.bias")
    method = ours(read)
    with torch.no_grad():
        same(method.predictor(method.projector(method.backbone(X))), theirs(X))


class NonLinearNeck(nn.Module):
    """Written from mmselfsup's of that name: layers fc0, bn0, fc1, bn1, ..."""

    def __init__(self, *widths: int, last_bn: bool) -> None:
        super().__init__()
        self.layers = len(widths) - 1
        for i, (before, after) in enumerate(itertools.pairwise(widths)):
            last = i == self.layers - 1
            self.add_module(f"fc{i}", nn.Linear(before, after, bias=last and not last_bn))
            if not last or last_bn:
                self.add_module(f"bn{i}", nn.BatchNorm1d(after, affine=not last))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.layers):
            x = self.get_submodule(f"fc{i}")(x)
            if hasattr(self, f"bn{i}"):
                x = self.get_submodule(f"bn{i}")(x)
            x = x if i == self.layers - 1 else x.relu()
        return x


class MmSelfSup(nn.Module):
    """Its SimSiam: backbone, neck, and a head that holds the predictor."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = torchvision.models.resnet18()
        self.backbone.fc = nn.Identity()
        self.neck = NonLinearNeck(512, 512, 512, 64, last_bn=True)
        self.head = nn.ModuleDict({"predictor": NonLinearNeck(64, 16, 64, last_bn=False)})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head["predictor"](self.neck(self.backbone(x)))
        return out


@pytest.mark.parametrize("old", [False, True])
def test_mmselfsups_files_are_read(old: bool, tmp_path: Path) -> None:
    """Names of NonLinearNeck and LatentPredictHead, and mmengine's metadata beside them."""
    theirs = trained(MmSelfSup())
    state = theirs.state_dict()
    names = {"neck.fc0.weight", "neck.bn2.running_mean", "head.predictor.fc1.bias"}
    assert names <= set(state) and "neck.fc2.bias" not in state
    state["data_preprocessor.mean"] = torch.zeros(3, 1, 1)
    twice: dict[str, Tensor] = {}
    if old:  # SimSiam's encoder: nn.Sequential(backbone, neck)
        for i, part in enumerate(("backbone.", "neck.")):
            own = {key: x for key, x in state.items() if key.startswith(part)}
            twice |= {f"encoder.{i}.{key.removeprefix(part)}": x for key, x in own.items()}
    path = tmp_path / "epoch_200.pth"
    content = {"meta": {"epoch": 200, "iter": 1}, "state_dict": state | twice, "message_hub": {}}
    torch.save(content, path, _use_new_zipfile_serialization=not old)
    read = load_pretrained(path)
    assert (read.layout, read.epoch) == ("mmselfsup", 200)
    assert read.left_out == ("data_preprocessor.mean", *twice)
    method = ours(read)
    with torch.no_grad():
        same(method.projector(method.backbone(X)), theirs.neck(theirs.backbone(X)))
        same(method.predictor(method.projector(method.backbone(X))), theirs(X))


@pytest.fixture(scope="module")
def torchvisions() -> resnet.ResNet:
    network: resnet.ResNet = trained(torchvision.models.resnet18())
    return network


@pytest.mark.parametrize(
    "prefix",
    ["", "backbone.", "module.", "module.backbone.", "model.module.", "module._orig_mod.model."],
)
def test_torchvisions_files_are_read(
    prefix: str, torchvisions: resnet.ResNet, tmp_path: Path
) -> None:
    theirs = deepcopy(torchvisions)
    torch.save(prefixed(theirs.state_dict(), prefix), tmp_path / "resnet18.pth")
    read = load_pretrained(tmp_path / "resnet18.pth")
    assert (read.layout, read.model, read.epoch) == (
        "torchvision",
        ModelConfig(backbone="resnet18"),
        None,
    )
    inner = "backbone." if "backbone" in prefix else ""
    assert read.left_out == (f"{inner}fc.weight", f"{inner}fc.bias")
    theirs.fc = nn.Identity()
    assert torch.equal(read.network()(X), theirs(X))
    with pytest.raises(CheckpointError, match="holds no projector"):
        read.network("projector")


def test_compiled_and_averaged_networks_are_read(tmp_path: Path) -> None:
    """torch.compile may wrap any child; AveragedModel counts beside its weights."""
    state = {f"module.{k.replace('layer1.', 'layer1._orig_mod.')}": v for k, v in resnets().items()}
    torch.save(state | {"n_averaged": torch.tensor(3)}, tmp_path / "w.pth")
    read = load_pretrained(tmp_path / "w.pth")
    assert read.left_out == ("fc.weight", "fc.bias", "n_averaged")


@pytest.mark.parametrize(
    "name", ["timm/levit_128s", "timm/deit_tiny_distilled_patch16_224", "timm/ghostnet_050"]
)
def test_timms_names_are_its_own(name: str, tmp_path: Path) -> None:
    """Classifiers of several parts; blocks with a ``shortcut``, which lightly's ResNets have."""
    timm = pytest.importorskip("timm")
    theirs = timm.create_model(name.removeprefix("timm/"))
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    read = load_pretrained(tmp_path / "w.pth", backbone=name)
    headless = timm.create_model(name.removeprefix("timm/"), num_classes=0)
    expected = {f"backbone.{key}" for key in headless.state_dict()}
    assert set(read.state) == expected
    assert set(read.left_out) == set(theirs.state_dict()) - set(headless.state_dict())
    assert any(".shortcut." in key for key in expected) == ("ghostnet" in name)
    export_weights(read, format="timm", out=tmp_path / "again.pth")
    headless.load_state_dict(torch.load(tmp_path / "again.pth", weights_only=True))
