"""Importing weights in the layouts of other programs: equal outputs, no weights lost.

Networks are rebuilt from the programs' code, which ``fastsiam/interchange/layouts.py`` names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from fastsiam.config import BackboneConfig, Stem
from fastsiam.interchange import export_weights, load_pretrained
from fastsiam.model.backbones import build_backbone
from tests.conftest import import_or_skip
from tests.interchange.networks import Authors, X, head, prefixed, resnets, same, trained
from tests.tiers import rest_slow

SMALL = BackboneConfig(backbone="resnet10", width=4)
FEATURES = 32
"""Features of ``SMALL``."""


@dataclass
class File:
    """A weight file of another program, and what reading it should give."""

    layout: str
    parts: dict[str, tuple[str, nn.Module]]
    """By fastsiam's part name: the prefix of its keys in the file, and the program's module."""
    model: BackboneConfig = SMALL
    copies: tuple[str, ...] = ()
    """Key prefixes of copies, alternately of the backbone and of the projector."""
    prototypes: dict[str, Tensor] = field(default_factory=dict)
    """Prototypes by their key in the file."""
    beside: dict[str, Tensor] = field(default_factory=dict)
    """Other weights, which the import leaves out."""
    content: dict[str, Any] = field(default_factory=dict)
    """Other entries of the file, next to the state dict."""
    epoch: float | None = None
    side: int = 64
    """Side of the input images, in pixels."""


class NonLinearNeck(nn.Sequential):
    """A head with mmselfsup's key names: fc0, bn0, fc1, bn1, ..."""

    def state_dict(self, *args: Any, **settings: Any) -> Any:
        def named(number: re.Match[str]) -> str:
            layer, kind = divmod(int(number[0]), 3)
            return f"{('fc', 'bn')[kind]}{layer}"

        state = super().state_dict(*args, **settings)
        return {re.sub(r"^\d+", named, key): value for key, value in state.items()}


LIGHTLY = "backbone.", "projection_head.layers.", "prediction_head.layers."
SOLO = "backbone.", "projector.", "predictor."
LIGHTLYS_COPIES = tuple(
    f"{start}{part}"
    for start, end in (
        *((start, "") for start in ("key_", "teacher_", "query_", "student_")),
        ("", "_momentum"),
    )
    for part in (f"backbone{end}.", f"projection_head{end}.layers.")
)
SOLOS_COPIES = "momentum_backbone.", "momentum_projector."
QUEUE = {"queue": torch.zeros(16, 32), "queue_ptr": torch.zeros(1, dtype=torch.int64)}
LIGHTNING = {"epoch": 4, "pytorch-lightning_version": "2.6.6"}


def small(layout: str, prefixes: tuple[str, ...], *heads: nn.Module, **more: Any) -> File:
    modules = build_backbone(SMALL), *heads
    parts = ("backbone", "projector", "predictor")
    return File(
        layout, dict(zip(parts, zip(prefixes, modules, strict=False), strict=False)), **more
    )


def moco(layout: str, prefixes: tuple[str, ...], **more: Any) -> File:
    return small(layout, prefixes, head(FEATURES, 24, 16, hidden=False), **more)


def swav(layout: str, prefixes: tuple[str, ...], name: str, bias: bool = True, **more: Any) -> File:
    prototypes = {name: torch.randn(12, 16)}
    heads = head(FEATURES, 24, 16, bias=bias)
    return small(layout, prefixes, heads, prototypes=prototypes, **more)


def simsiams_authors() -> File:
    """The projector's frozen bias has random values, which the import folds into BN."""
    theirs = Authors(256, 32)
    projector, theirs.encoder.fc = theirs.encoder.fc, nn.Identity()
    parts = {
        "backbone": ("module.encoder.", theirs.encoder),
        "projector": ("module.encoder.fc.", projector),
        "predictor": ("module.predictor.", theirs.predictor),
    }
    content = {"epoch": 100, "arch": "resnet18", "optimizer": {"state": {}}}
    return File("simsiam", parts, BackboneConfig(backbone="resnet18"), content=content, epoch=100)


def resnet18(stem: Stem = "imagenet") -> nn.Module:
    network: nn.Module = torchvision.models.resnet18()
    network.fc = nn.Identity()
    if stem == "cifar-pad2":
        network.conv1 = nn.Conv2d(3, 64, 3, stride=1, padding=2, bias=False)
        network.maxpool = nn.Identity()
    return network


def solo_learns(name: str, stem: Stem) -> File:
    """Includes solo-learn's online classifier; with ``cifar-pad2``, a 3x3 stem with padding 2."""
    projector = head(512, 96, 96, 64, output=True)
    projector[-1] = nn.BatchNorm1d(64, affine=False)
    parts = {
        "backbone": (f"{name}.", resnet18(stem)),
        "projector": ("projector.", projector),
        "predictor": ("predictor.", head(64, 16, 64)),
    }
    other_weights = nn.ModuleDict({"classifier": nn.Linear(512, 10)}).state_dict()
    model = BackboneConfig(backbone="resnet18", stem=stem)
    return File("solo-learn", parts, model, beside=other_weights, content=LIGHTNING, epoch=5)


def lightlys(
    backbone: nn.Module, features: int, model: BackboneConfig, **other_weights: Tensor
) -> File:
    heads = import_or_skip("lightly.models.modules.heads", "peers")
    parts = {
        "backbone": ("backbone.", backbone),
        "projector": ("projection_head.", heads.SimSiamProjectionHead(features, 32, 24)),
        "predictor": ("prediction_head.", heads.SimSiamPredictionHead(24, 8, 24)),
    }
    other_weights["online_classifier.linear.weight"] = torch.zeros(10, 4)
    return File("lightly", parts, model, beside=other_weights, content=LIGHTNING, epoch=5)


def lightlys_example() -> File:
    """torchvision's child modules in an ``nn.Sequential``."""
    children = list(torchvision.models.resnet18().children())[:-1]
    network = nn.Sequential(*children, nn.Flatten())
    return lightlys(network, 512, BackboneConfig(backbone="resnet18"))


def lightlys_resnet(sequential: bool) -> File:
    """lightly's ResNet-9 is a ResNet-10. As a Sequential it loses the ReLU of the stem."""
    models = import_or_skip("lightly.models", "peers")
    network, other_weights = models.ResNetGenerator("resnet-9", width=0.25), {}
    if sequential:
        children = list(network.children())[:-1]
        network = nn.Sequential(*children, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    else:
        other_weights = prefixed(network.linear.state_dict(), "backbone.linear.")
        network.linear = nn.Identity()
    stem: Stem = "cifar-no-relu" if sequential else "cifar"
    model = BackboneConfig(backbone="resnet10", stem=stem, width=16)
    return replace(lightlys(network, 128, model, **other_weights), side=32)  # the only valid side


def old_mmselfsups() -> File:
    """Key names of NonLinearNeck and LatentPredictHead, with mmengine's metadata."""
    *layers, _ = head(512, 512, 512, 64, output=True)
    projector = NonLinearNeck(*layers, nn.BatchNorm1d(64, affine=False))
    parts: dict[str, tuple[str, nn.Module]] = {
        "backbone": ("backbone.", resnet18()),
        "projector": ("neck.", projector),
        "predictor": ("head.predictor.", NonLinearNeck(*head(64, 16, 64))),
    }
    return File(
        "mmselfsup",
        parts,
        BackboneConfig(backbone="resnet18"),
        copies=("encoder.0.", "encoder.1."),
        beside={"data_preprocessor.mean": torch.zeros(3, 1, 1)},
        content={"meta": {"epoch": 200, "iter": 1}, "message_hub": {}},
        epoch=200,
    )


def torchvisions(prefix: str, **more: Tensor) -> File:
    parts = {"backbone": (prefix, resnet18())}
    other_weights = prefixed(nn.Linear(512, 10).state_dict(), f"{prefix}fc.") | more
    model = BackboneConfig(backbone="resnet18")
    return File(
        "torchvision", parts, model, beside=other_weights, content={"epoch": 89, "optimizer": {}}
    )


AUTHORS_MOCO = "module.encoder_q.", "module.encoder_q.fc."
AUTHORS_SWAV = "module.", "module.projection_head."
EPOCH_7: dict[str, Any] = {"content": {"epoch": 7}, "epoch": 7}
FILES: dict[str, Callable[[], File]] = {
    "simsiam": simsiams_authors,
    "moco": lambda: moco(
        "moco",
        AUTHORS_MOCO,
        copies=("module.encoder_k.", "module.encoder_k.fc."),
        beside=prefixed(QUEUE, "module."),
        **EPOCH_7,
    ),
    "swav": lambda: swav("swav", AUTHORS_SWAV, "module.prototypes.weight", **EPOCH_7),
    "solo-learn, small": lambda: solo_learns("backbone", "cifar-pad2"),
    "lightly's own ResNet": lambda: lightlys_resnet(False),
    "lightly's own ResNet, numbered": lambda: lightlys_resnet(True),
    "mmselfsup, old": old_mmselfsups,
    "lightly byol": lambda: small(
        "lightly",
        LIGHTLY,
        *(head(FEATURES, 24, 16), head(16, 20, 16)),
        copies=LIGHTLYS_COPIES,
        beside={"student_prediction_head.layers.0.weight": torch.zeros(20, 16)},
    ),
    "solo-learn mocov2plus": lambda: moco(
        "solo-learn",
        SOLO,
        copies=SOLOS_COPIES,
        beside={**QUEUE, "momentum_classifier.bias": torch.zeros(10)},
    ),
    "mmselfsup swav": lambda: swav(
        "mmselfsup", ("backbone.", "neck.projection_neck."), "head.loss.prototypes.weight"
    ),
    "torchvision": lambda: torchvisions(""),
    "torchvision, wrapped": lambda: torchvisions(
        "module._orig_mod.model.",
        n_averaged=torch.tensor(3),  # AveragedModel's counter
    ),
    "moco's first version": lambda: small("moco", AUTHORS_MOCO, nn.Linear(FEATURES, 16)),
    "swav, several sets of prototypes": lambda: small(
        "swav",
        AUTHORS_SWAV,
        head(FEATURES, 24, 16, bias=True),
        beside={f"module.prototypes.prototypes{i}.weight": torch.zeros(3, 16) for i in range(2)},
    ),
    "solo-learn of 2021": lambda: solo_learns("encoder", "imagenet"),
    "lightly's example": lightlys_example,
    "lightly swav": lambda: swav(
        "lightly",
        LIGHTLY,
        "prototypes.heads.0.weight",
        bias=False,
        beside={"prototypes.heads.0.bias": torch.zeros(12)},
    ),
    "solo-learn swav": lambda: swav(
        "solo-learn",
        SOLO,
        "prototypes.weight_v",
        beside={"prototypes.weight_g": torch.ones(12, 1), "queue": torch.zeros(2, 8, 16)},
    ),
    "mmselfsup mocov2": lambda: moco(
        "mmselfsup",
        ("backbone.", "neck.mlp."),
        copies=("encoder_k.module.0.", "encoder_k.module.1.mlp."),
        beside=QUEUE,
    ),
}


@pytest.mark.parametrize("name", rest_slow(list(FILES), fast=12))
def test_files_of_other_libraries_are_read(name: str, tmp_path: Path) -> None:
    """Each part has the same outputs as the original module; unused weights are listed."""
    torch.manual_seed(0)
    file = FILES[name]()
    trained(nn.Sequential(*(module for _, module in file.parts.values())))
    state, unused = dict(file.prototypes), dict(file.beside)
    for prefix, module in file.parts.values():
        state |= prefixed(module.state_dict(), prefix)
    modules = itertools.cycle([file.parts["backbone"], file.parts.get("projector")])
    for prefix, copied in zip(file.copies, modules, strict=False):
        assert copied
        unused |= prefixed(copied[1].state_dict(), prefix)
    path = tmp_path / "w.pth"
    content = {"state_dict": state | unused, **file.content}
    torch.save(content, path)
    pretrained = load_pretrained(path)
    assert (pretrained.layout, pretrained.model, pretrained.epoch) == (
        file.layout,
        file.model,
        file.epoch,
    )
    assert (pretrained.method and pretrained.method.name) == {"moco": "mocov2"}.get(
        file.layout, file.layout if file.layout in ("simsiam", "swav") else None
    )
    wrappers = r"^((module|model|_orig_mod)\.)+"
    assert sorted(pretrained.unused_keys) == sorted(re.sub(wrappers, "", key) for key in unused)
    built = pretrained.build().eval()
    built.load_state_dict(pretrained.state)
    images = ours = theirs = X[..., : file.side, : file.side]
    with torch.no_grad():
        for part, (_, module) in file.parts.items():
            ours, theirs = built.get_submodule(part)(ours), module(theirs)
            same(ours, theirs)
        assert torch.equal(pretrained.network()(images), built.get_submodule("backbone")(images))
    for value in file.prototypes.values():
        assert torch.equal(pretrained.state["prototypes.weight"], value)


def test_weights_with_compiled_submodule_are_read(tmp_path: Path) -> None:
    state = {k.replace("layer1.", "layer1._orig_mod."): v for k, v in resnets().items()}
    torch.save(state, tmp_path / "w.pth")
    assert load_pretrained(tmp_path / "w.pth").unused_keys == ("fc.weight", "fc.bias")


@pytest.mark.parametrize("name", ["timm/levit_128s", "timm/ghostnet_050"])
def test_timm_weights_are_read(name: str, tmp_path: Path) -> None:
    """Classifiers with several modules; ``shortcut`` blocks, a name lightly's ResNets also use."""
    timm = import_or_skip("timm")
    theirs = timm.create_model(name.removeprefix("timm/"))
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    pretrained = load_pretrained(tmp_path / "w.pth", backbone=name)
    headless = timm.create_model(name.removeprefix("timm/"), num_classes=0)
    expected = {f"backbone.{key}" for key in headless.state_dict()}
    assert set(pretrained.state) == expected
    assert set(pretrained.unused_keys) == set(theirs.state_dict()) - set(headless.state_dict())
    assert any(".shortcut." in key for key in expected) == ("ghostnet" in name)
    export_weights(pretrained, format="timm", out=tmp_path / "again.pth")
    headless.load_state_dict(torch.load(tmp_path / "again.pth", weights_only=True))
