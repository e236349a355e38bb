"""Weights in and out: the same outputs in every library, nothing left over, nothing executed."""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import pickle
import re
import uuid
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.models import resnet

from fastsiam import __version__
from fastsiam import checkpoint as checkpoints
from fastsiam.checkpoint import Checkpoint
from fastsiam.config import ModelConfig, Stem, TrainConfig
from fastsiam.config.evaluate import KnnConfig, LinearConfig
from fastsiam.distributed import Place
from fastsiam.environment import commit
from fastsiam.errors import CheckpointError
from fastsiam.interchange import FORMATS, Pretrained, export_weights, load_pretrained
from fastsiam.interchange.export import SHARED_RESNETS
from fastsiam.jobs.evaluate import evaluate_knn, evaluate_linear
from fastsiam.jobs.train import preflight, train_here
from fastsiam.methods import Method, SimSiam, build_method
from fastsiam.model.backbones import skeleton
from tests.configs import changed_model, flags, model_of, with_settings
from tests.processes import fastsiam

TINY = model_of(
    backbone="resnet10", stem="cifar", width=4, projector_layers=2, dim=16, predictor_dim=4
)
R18 = model_of(backbone="resnet18", dim=512, predictor_dim=32)


def trained(module: nn.Module, side: int = 32) -> Any:
    """Give a network running statistics and scales that are not the initial ones."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand_like(parameter) / 2, alpha=1 if "weight" in name else 0.1)
        for _ in range(2):
            views = [torch.randn(4, 3, side, side) + 0.3 for _ in range(2)]
            if isinstance(module, Method):
                module.train()(tuple(views), torch.arange(4))
            else:
                module.train()(views[0])
    return module.eval()


def saved_run(folder: Path, model: ModelConfig, side: int = 32) -> SimSiam:
    """Write a run's checkpoint without training."""
    torch.manual_seed(0)
    method: SimSiam = trained(build_method(model), side)
    state = Checkpoint(
        config=replace(TrainConfig(), model=model),
        step=30,
        seconds=1.0,
        images=1234,
        steps_per_epoch=4,
        model=method.state_dict(),
        optimizer={},
        scaler={},
    )
    checkpoints.save(checkpoints.last(folder), state)
    return method


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert a.abs().max() > 0.01


class Authors(nn.Module):
    """Written from section 3 of the paper: the projector stands where ``fc`` was."""

    def __init__(self, arch: str, dim: int = 2048, hidden: int = 512) -> None:
        super().__init__()
        self.encoder = torchvision.models.get_model(arch, zero_init_residual=True)
        wide = self.encoder.fc.in_features
        self.encoder.fc = nn.Sequential(
            nn.Linear(wide, wide, bias=False),
            nn.BatchNorm1d(wide),
            nn.ReLU(),
            nn.Linear(wide, wide, bias=False),
            nn.BatchNorm1d(wide),
            nn.ReLU(),
            nn.Linear(wide, dim),
            nn.BatchNorm1d(dim, affine=False),
        )
        self.predictor = nn.Sequential(
            nn.Linear(dim, hidden, bias=False),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.predictor(self.encoder(x))
        return out


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


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + key: value for key, value in state.items()}


def ours(pretrained: Pretrained) -> SimSiam:
    """Build the whole method of what was read."""
    method = build_method(pretrained.model)
    assert isinstance(method, SimSiam)
    method.load_state_dict(pretrained.state)
    return method.eval()


X = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))


# --- runs of ours


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


# --- out, against the real libraries


@pytest.mark.parametrize(
    "model, ending",
    [
        (changed_model(R18, projector_layers=2), ".pth"),
        (changed_model(R18, stem="cifar", dim=16), ".safetensors"),
        (changed_model(R18, backbone="resnet10", stem="cifar-pad2", dim=16), ".pth.tar"),
        (changed_model(R18, backbone="resnet10", stem="cifar-no-relu", dim=16), ".bin"),
        (changed_model(R18, backbone="mobilenet_v3_small", dim=16), ".safetensors"),
        (changed_model(R18, backbone="shufflenet_v2_x0_5", dim=16), ".pth"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.backbone}-{value.stem}",
)
def test_torchvision_loads_it_by_the_cards_snippet(
    model: ModelConfig, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = saved_run(tmp_path / "run", model)
    read = load_pretrained(tmp_path / "run")
    out = tmp_path / f"weights{ending}"
    card = tmp_path / f"weights{ending}.md"
    assert export_weights(read, format="torchvision", out=out) == [out, card]
    monkeypatch.chdir(tmp_path)
    theirs = by_snippet(card)
    assert type(theirs).__module__.startswith("torchvision")
    with torch.no_grad():
        same(theirs(X), method.backbone(X))
    stored = load_file(out) if ending == ".safetensors" else torch.load(out, weights_only=True)
    assert set(stored) == set(theirs.state_dict())
    assert all(x.dtype in (torch.float32, torch.int64) for x in stored.values())


def by_snippet(card: Path) -> Any:
    """Run the Python that a model card holds; return its ``model``."""
    (code,) = re.findall(r"```python\n(.*?)```", card.read_text(), re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["model"]


def test_resnet50_goes_to_torchvision_and_timm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("timm")
    monkeypatch.chdir(tmp_path)
    method = saved_run(tmp_path / "run", model_of(dim=64, predictor_dim=16), side=64)
    read = load_pretrained(tmp_path / "run")
    for format in ("torchvision", "timm"):
        export_weights(read, format=format, out=tmp_path / f"{format}.safetensors")
        theirs = by_snippet(tmp_path / f"{format}.safetensors.md")
        assert type(theirs).__module__.split(".")[0] == format
        with torch.no_grad():
            same(theirs(X), method.backbone(X))


@pytest.mark.parametrize("name", ["timm/test_efficientnet", "timm/test_resnet", "resnext50_32x4d"])
def test_timm_loads_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    monkeypatch.chdir(tmp_path)
    method = saved_run(tmp_path / "run", model_of(backbone=name, dim=16, predictor_dim=4))
    out = tmp_path / "w.safetensors"
    export_weights(load_pretrained(tmp_path / "run"), format="timm", out=out)
    theirs = by_snippet(tmp_path / "w.safetensors.md")
    with torch.no_grad():
        same(theirs(X), method.backbone(X))
    back = load_pretrained(out, backbone=name)
    assert back.layout == ("timm" if name.startswith("timm") else "torchvision")
    assert torch.equal(back.network()(X), method.backbone(X))


def test_the_authors_layout_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strictly into their model with the same outputs, and back bit for bit."""
    method = saved_run(tmp_path / "run", R18)
    read = load_pretrained(tmp_path / "run")
    out = tmp_path / "checkpoint_0007.pth.tar"
    assert export_weights(read, format="simsiam", out=out)[1].name == "checkpoint_0007.pth.tar.md"
    content = torch.load(out, weights_only=True)
    assert (content["arch"], content["epoch"]) == ("resnet18", 7)
    assert not content["state_dict"]["module.encoder.fc.6.bias"].any()
    theirs = nn.ModuleDict({"module": Authors("resnet18", 512, 32)})
    theirs.load_state_dict(content["state_dict"])
    with torch.no_grad():
        same(theirs["module"].eval()(X), method.predictor(method.projector(method.backbone(X))))
    back = load_pretrained(out)
    assert (back.layout, back.model, back.epoch) == ("simsiam", R18, 7)
    assert set(back.state) == set(read.state)
    assert all(torch.equal(value, read.state[key]) for key, value in back.state.items())
    monkeypatch.chdir(tmp_path)
    assert torch.equal(by_snippet(tmp_path / "checkpoint_0007.pth.tar.md")(X), method.backbone(X))


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


DETECTRON2_STAGE = {  # one block of detectron2's BottleneckBlock, written by hand
    "conv1.weight": "conv1.weight",
    "bn1.weight": "conv1.norm.weight",
    "bn1.bias": "conv1.norm.bias",
    "bn1.running_mean": "conv1.norm.running_mean",
    "bn1.running_var": "conv1.norm.running_var",
    "conv2.weight": "conv2.weight",
    "bn2.weight": "conv2.norm.weight",
    "bn2.bias": "conv2.norm.bias",
    "bn2.running_mean": "conv2.norm.running_mean",
    "bn2.running_var": "conv2.norm.running_var",
    "conv3.weight": "conv3.weight",
    "bn3.weight": "conv3.norm.weight",
    "bn3.bias": "conv3.norm.bias",
    "bn3.running_mean": "conv3.norm.running_mean",
    "bn3.running_var": "conv3.norm.running_var",
    "downsample.0.weight": "shortcut.weight",
    "downsample.1.weight": "shortcut.norm.weight",
    "downsample.1.bias": "shortcut.norm.bias",
    "downsample.1.running_mean": "shortcut.norm.running_mean",
    "downsample.1.running_var": "shortcut.norm.running_var",
}


def test_detectron2s_names(tmp_path: Path) -> None:
    method = saved_run(tmp_path / "run", model_of(dim=16, predictor_dim=4), side=64)
    out = tmp_path / "r50.pkl"
    export_weights(load_pretrained(tmp_path / "run"), format="detectron2", out=out)
    assert b"numpy._core" not in out.read_bytes()  # numpy before 2 has no such module
    content = pickle.loads(out.read_bytes())
    assert all(value.flags.writeable for value in content["model"].values())
    assert content["matching_heuristics"] is True and content["__author__"] == "fastsiam"
    expected = {"stem.conv1.weight": "conv1.weight"}
    for part in ("weight", "bias", "running_mean", "running_var"):
        expected[f"stem.conv1.norm.{part}"] = f"bn1.{part}"
    for stage, depth in enumerate((3, 4, 6, 3), start=1):
        for block in range(depth):
            for mine, theirs in DETECTRON2_STAGE.items():
                if block == 0 or not mine.startswith("downsample"):
                    expected[f"res{stage + 1}.{block}.{theirs}"] = f"layer{stage}.{block}.{mine}"
    state = method.backbone.state_dict()
    assert set(content["model"]) == set(expected) and len(expected) == 53 * 5
    for name, mine in expected.items():
        assert np.array_equal(content["model"][name], state[mine].numpy()), name
    card = (tmp_path / "r50.pkl.md").read_text()
    for line in (
        "PIXEL_MEAN: [123.675, 116.280, 103.530]",
        "PIXEL_STD: [58.395, 57.120, 57.375]",
        'FORMAT: "RGB"',
        "STRIDE_IN_1X1: False",
        "DEPTH: 50",
    ):
        assert line in card


# --- in, from other programs


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


@pytest.mark.parametrize("backbone", ["backbone", "encoder"])
@pytest.mark.parametrize("small", [True, False])
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


@pytest.mark.parametrize(
    "prefix",
    ["", "backbone.", "module.", "module.backbone.", "model.module.", "module._orig_mod.model."],
)
def test_torchvisions_files_are_read(prefix: str, tmp_path: Path) -> None:
    theirs = trained(torchvision.models.resnet18())
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


def resnet18s() -> dict[str, Tensor]:
    state: dict[str, Tensor] = torchvision.models.resnet18().state_dict()
    return state


def test_compiled_and_averaged_networks_are_read(tmp_path: Path) -> None:
    """torch.compile may wrap any child; AveragedModel counts beside its weights."""
    state = {
        f"module.{k.replace('layer1.', 'layer1._orig_mod.')}": v for k, v in resnet18s().items()
    }
    torch.save(state | {"n_averaged": torch.tensor(3)}, tmp_path / "w.pth")
    read = load_pretrained(tmp_path / "w.pth")
    assert read.left_out == ("fc.weight", "fc.bias", "n_averaged")


def test_counters_that_old_files_lack_start_at_zero(tmp_path: Path) -> None:
    state = {k: v for k, v in resnet18s().items() if not k.endswith("num_batches_tracked")}
    torch.save(state, tmp_path / "w.pth")
    read = load_pretrained(tmp_path / "w.pth")
    assert read.state["backbone.bn1.num_batches_tracked"] == 0
    read.network()


@pytest.mark.parametrize(
    "beside, epochs",
    [
        ({"epoch": 89, "optimizer": {}}, None),  # torchvision's and timm's count from 0
        ({"epoch": 89, "pytorch-lightning_version": "2.0"}, 90),
        ({"meta": {"epoch": 90}}, 90),
        ({"meta": {"epoch": -1}}, None),
        ({"meta": {"epoch": 10**400}}, None),
        ({"meta": {"epoch": "last"}}, None),
    ],
)
def test_epochs_are_those_that_a_layout_means(
    beside: dict[str, Any], epochs: float | None, tmp_path: Path
) -> None:
    torch.save({"state_dict": resnet18s(), **beside}, tmp_path / "w.pth")
    assert load_pretrained(tmp_path / "w.pth").epoch == epochs


def test_averages_beside_the_weights_are_listed(tmp_path: Path) -> None:
    content = {"model": resnet18s(), "model_ema": {"x": torch.zeros(1)}}
    torch.save(content, tmp_path / "w.pth")
    assert load_pretrained(tmp_path / "w.pth").left_out[-1] == "model_ema"


def test_a_stem_is_said_where_weights_do_not_tell(tmp_path: Path) -> None:
    method = saved_run(tmp_path / "run", replace(R18, backbone="resnet10", stem="cifar-pad2"))
    path = tmp_path / "w.pth"
    torch.save(method.backbone.state_dict(), path)
    guessed, said = load_pretrained(path), load_pretrained(path, stem="cifar-pad2")
    assert (guessed.model.stem, said.model.stem) == ("cifar", "cifar-pad2")
    assert str(guessed).startswith("ResNet-10 (stem taken for cifar) of torchvision")
    assert str(said).startswith("ResNet-10 (cifar-pad2 stem) of torchvision")
    assert torch.equal(said.network()(X), method.backbone(X))
    with pytest.raises(ValueError, match="stem must be one of"):
        load_pretrained(path, stem="cifar-pad9")
    with pytest.raises(CheckpointError, match=r"is of a run with cifar-pad2, not cifar$"):
        load_pretrained(tmp_path / "run", stem="cifar")
    assert not load_pretrained(tmp_path / "run").stem_assumed
    linear = prefixed(method.backbone.state_dict(), "backbone.")
    linear |= {"classifier.weight": torch.zeros(10, 512), "classifier.bias": torch.zeros(10)}
    torch.save({"state_dict": linear, "pytorch-lightning_version": "1.7"}, path)
    read = load_pretrained(path)
    assert (read.layout, read.model.stem, read.stem_assumed) == ("solo-learn", "cifar-pad2", False)


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


@pytest.mark.parametrize("name", ["convnext_tiny", "timm/test_efficientnet", "densenet121"])
def test_other_networks_are_read_by_name(name: str, tmp_path: Path) -> None:
    if name.startswith("timm/"):
        timm = pytest.importorskip("timm")
        theirs = timm.create_model(name.removeprefix("timm/"))
    else:
        theirs = torchvision.models.get_model(name)
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match=r"cannot tell which network .*--backbone"):
        load_pretrained(tmp_path / "w.pth")
    read = load_pretrained(tmp_path / "w.pth", backbone=name)
    assert read.model == ModelConfig(backbone=name) and len(read.left_out) == 2
    theirs.eval().set_submodule(read.left_out[0].removesuffix(".weight"), nn.Identity())
    assert torch.equal(read.network()(X), theirs(X))


@pytest.mark.parametrize(
    "model",
    [
        model_of(backbone="resnet34", width=8, dim=16, predictor_dim=4),
        model_of(backbone="resnet50", width=8, dim=16, projector_dim=24, predictor_dim=4),
        model_of(backbone="resnet101", stem="cifar", width=4, projector_layers=1, dim=8),
        model_of(backbone="resnet152", width=4, projector_layers=4, dim=8, predictor_dim=2),
        TINY,
    ],
    ids=lambda model: model.backbone,
)
def test_architectures_are_inferred(model: ModelConfig, tmp_path: Path) -> None:
    state = build_method(model).state_dict()
    state = {f"module.{k.replace('projector', 'encoder.fc')}": v for k, v in state.items()}
    torch.save(
        {"state_dict": {k.replace("backbone", "encoder"): v for k, v in state.items()}},
        tmp_path / "w.pth",
    )
    assert load_pretrained(tmp_path / "w.pth").model == model


# --- refusals


def broken(change: Callable[[dict[str, Any]], object], folder: Path) -> str:
    """Change the weights of an authors' file; return what reading it then says."""
    state: dict[str, Any] = prefixed(Authors("resnet18", 16, 8).state_dict(), "module.")
    change(state)
    torch.save({"state_dict": state}, folder / "w.pth")
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(folder / "w.pth")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    assert "1 missing (backbone.bn1.weight)" in broken(
        lambda s: s.pop("module.encoder.bn1.weight"), tmp_path
    )
    assert "1 unknown (encoder.bn9.weight)" in broken(
        lambda s: s.update({"module.encoder.bn9.weight": torch.zeros(3)}), tmp_path
    )
    shape = broken(lambda s: s.update({"module.encoder.bn1.weight": torch.zeros(3)}), tmp_path)
    assert "1 of another shape (encoder.bn1.weight: (3,) for (64,))" in shape
    many = broken(lambda s: [s.pop(k) for k in list(s) if ".layer1.1." in k], tmp_path)
    assert "cannot tell which network" in many
    several = broken(lambda s: [s.pop(k) for k in list(s) if ".running_var" in k], tmp_path)
    assert re.search(r"24 missing \(\S+, \S+, \S+ and 21 more\)", several)
    wide = {
        "backbone." + k: v for k, v in torchvision.models.resnext50_32x4d().state_dict().items()
    }
    torch.save(wide, tmp_path / "wide.pth")
    with pytest.raises(CheckpointError, match=r"another shape .*name it with --backbone"):
        load_pretrained(tmp_path / "wide.pth")
    assert load_pretrained(tmp_path / "wide.pth", backbone="resnext50_32x4d").left_out


@pytest.mark.parametrize(
    "odd",
    [
        lambda: torch.zeros(1).expand(64),  # 59 GB could be claimed so
        lambda: torch.zeros(64).to_sparse(),
        lambda: torch.zeros(64, dtype=torch.complex64),
        lambda: torch.quantize_per_tensor(torch.zeros(64), 1.0, 0, torch.qint8),
        lambda: torch.empty(64, device="meta"),
    ],
    ids=["expanded", "sparse", "complex", "quantised", "meta"],
)
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
def test_odd_tensors_are_refused(odd: Callable[[], Tensor], tmp_path: Path) -> None:
    said = broken(lambda s: s.update({"module.encoder.bn1.weight": odd()}), tmp_path)
    assert "encoder.bn1.weight is no plain tensor of real numbers in full" in said


def test_a_first_layer_of_nothing_is_refused(tmp_path: Path) -> None:
    empty = {"module.encoder.conv1.weight": torch.zeros(0, 3, 7, 7)}
    said = broken(lambda s: s.update(empty), tmp_path)
    assert "holds no network: width must be at least 1" in said


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


def test_two_encoders_are_refused(tmp_path: Path) -> None:
    state = torchvision.models.resnet18().state_dict()
    torch.save(prefixed(state, "backbone.") | prefixed(state, "encoder."), tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="holds two encoders"):
        load_pretrained(tmp_path / "w.pth")


def test_files_without_weights_are_refused(tmp_path: Path) -> None:
    for content in ({"a": 1}, [torch.zeros(3)], torch.zeros(3), {}):
        torch.save(content, tmp_path / "w.pth")
        with pytest.raises(CheckpointError, match="holds no weights by name"):
            load_pretrained(tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load_pretrained(tmp_path / "nowhere.pth")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load_pretrained(tmp_path)


class Hostile:
    """Runs a program when it is unpickled the usual way."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda mark: Hostile(os.system, f"touch {mark}"), "posix.system"),
        (lambda mark: Hostile(eval, f"open({str(mark)!r}, 'w')"), "builtins.eval"),
        (lambda mark: Hostile(setattr, "x", "y", 1), "builtins.setattr"),
    ],
)
@pytest.mark.parametrize("zipped", [True, False])  # torch's files before 1.6 are none
def test_hostile_files_are_not_executed(
    make: Callable[[Path], Any], name: str, zipped: bool, tmp_path: Path
) -> None:
    mark = tmp_path / "executed"
    harmless = {"state_dict": torchvision.models.resnet18().state_dict(), "n": np.float64(1)}
    contents: list[Any] = [{"n": argparse.Namespace(x=[1])}, harmless]
    for content in contents:
        hostile = make(mark)
        torch.save(
            {**content, "deep": {"list": [hostile]}},
            tmp_path / "w.pth",
            _use_new_zipfile_serialization=zipped,
        )
        with pytest.raises(CheckpointError, match=f"is refused: it asks for {name}") as caught:
            load_pretrained(tmp_path / "w.pth")
        assert "\n" not in str(caught.value) and not mark.exists()
    (tmp_path / "w.pkl").write_bytes(pickle.dumps(hostile))
    with pytest.raises(CheckpointError, match="cannot read"):
        load_pretrained(tmp_path / "w.pkl")
    assert not mark.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_real_files_logs_and_settings_are_skipped(zipped: bool, tmp_path: Path) -> None:
    """mmselfsup publishes files of the old format; mmengine's logs name methods by getattr."""
    content = {
        "state_dict": torchvision.models.resnet18().state_dict(),
        "message_hub": {
            "log_scalars": {"loss": np.arange(3.0), "lr": [np.float64(1)]},
            "statistics_methods": {"mean": Hostile(getattr, collections.Counter, "update")},
        },
        "meta": {"torch": torch.torch_version.TorchVersion("2.1.0"), "id": uuid.UUID(int=3)},
        "path": Path("x"),
    }
    path = tmp_path / "w.pth"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    assert zipfile.is_zipfile(path) == zipped
    read = load_pretrained(path)
    expected = content["state_dict"]["layer1.0.conv1.weight"]
    assert torch.equal(read.state["backbone.layer1.0.conv1.weight"], expected)


def test_a_file_that_cannot_be_opened_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "w.pth").touch()
    monkeypatch.setattr(torch, "load", denied)
    with pytest.raises(CheckpointError, match=r"cannot read .*w\.pth: Permission denied$"):
        load_pretrained(tmp_path / "w.pth")


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_a_torchscript_archive_is_named(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"is a TorchScript archive: save its state_dict\(\)"):
        load_pretrained(tmp_path / "w.pt")


def test_foreign_objects_stay_inert(tmp_path: Path) -> None:
    """What looks like omegaconf's is neither imported nor called: there is no such package."""
    torch.save(
        {"state_dict": torchvision.models.resnet18().state_dict(), "hyper_parameters": "PLACE"},
        tmp_path / "plain.pth",
    )
    # PLACE becomes a pair: omegaconf.made_up.DictConfig() with a state, and mmengine's ConfigDict
    text = b"X\x05\x00\x00\x00PLACE"
    other = (
        b"comegaconf.made_up\nDictConfig\n)\x81}X\x01\x00\x00\x00aK\x01sb"
        b"cmmengine.config.config\nConfigDict\n)\x81X\x01\x00\x00\x00bK\x02s\x86"
    )
    rewrite(tmp_path / "plain.pth", tmp_path / "w.pth", lambda data: data.replace(text, other))
    assert load_pretrained(tmp_path / "w.pth").model.backbone == "resnet18"


def test_names_without_end_are_refused(tmp_path: Path) -> None:
    """Each costs an attempt."""
    torch.save({"x": "PLACE"}, tmp_path / "plain.pth")
    text = b"X\x05\x00\x00\x00PLACE"
    names = b"](" + b"".join(b"cnumpy.made_up\nname%d\n" % i for i in range(201)) + b"e"
    rewrite(tmp_path / "plain.pth", tmp_path / "w.pth", lambda data: data.replace(text, names))
    with pytest.raises(CheckpointError, match=r"asks for numpy\.made_up\.name200"):
        load_pretrained(tmp_path / "w.pth")


def rewrite(source: Path, target: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the pickle within one of torch's files."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for item in old.infolist():
            data = old.read(item)
            if item.filename.endswith("data.pkl"):
                assert change(data) != data
                data = change(data)
            new.writestr(item, data)


@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
@pytest.mark.parametrize("keep", [0, 100, 0.5, 0.99])
def test_damaged_files_are_refused(ending: str, keep: float, tmp_path: Path) -> None:
    saved_run(tmp_path / "run", changed_model(R18, backbone="resnet10", dim=16))
    path = tmp_path / f"w{ending}"
    export_weights(load_pretrained(tmp_path / "run"), format="torchvision", out=path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if keep < 1 else int(keep)])
    with pytest.raises(CheckpointError, match=r"cannot read .*damaged") as caught:
        load_pretrained(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "model, format, message",
    [
        (TINY, "torchvision", "is 4 channels wide"),
        (TINY, "timm", "is resnet10, which it does not have"),
        (TINY, "detectron2", "is resnet10, which it does not have"),
        (replace(R18, stem="cifar"), "timm", "has the cifar stem"),
        (replace(R18, stem="cifar"), "detectron2", "has the cifar stem"),
        (changed_model(R18, projector_layers=2), "simsiam", "has a projector of 2 layers"),
        (changed_model(R18, dim=64), "simsiam", "has a projector of 3 layers, 64 wide"),
        (
            replace(R18, backbone="shufflenet_v2_x0_5"),
            "timm",
            "is shufflenet_v2_x0_5, which it does not have",
        ),
        (replace(R18, backbone="wide_resnet50_2"), "detectron2", "is none of its ResNets"),
    ],
    ids=lambda value: value.backbone if isinstance(value, ModelConfig) else value[:12],
)
def test_what_a_format_cannot_hold_is_refused(
    model: ModelConfig, format: str, message: str, tmp_path: Path
) -> None:
    read = untrained(model)
    with pytest.raises(CheckpointError, match=message) as caught:
        export_weights(
            read, format=format, out=tmp_path / ("w.pkl" if format[0] == "d" else "w.pt")
        )
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def untrained(model: ModelConfig, **settings: Any) -> Pretrained:
    fields: dict[str, Any] = {"layout": "simsiam", "epoch": None, "config": None, "images": None}
    state = build_method(model).state_dict()
    fields |= {"path": Path("x.pth"), "left_out": (), "state": state}
    return Pretrained(model=model, **{**fields, **settings})


def test_exports_that_cannot_be_are_refused(tmp_path: Path) -> None:
    pretrained = untrained(changed_model(R18, dim=16))
    headless = replace(
        pretrained, state={k: v for k, v in pretrained.state.items() if k[:4] == "back"}
    )
    with pytest.raises(CheckpointError, match="holds no projector"):
        export_weights(headless, format="simsiam", out=tmp_path / "w.pth")
    for format, name in (("simsiam", "w.safetensors"), ("detectron2", "w.pth"), ("timm", "w")):
        with pytest.raises(ValueError, match=f"a file of format {format} ends in"):
            export_weights(pretrained, format=format, out=tmp_path / name)
    with pytest.raises(ValueError, match="unknown format 'onnx'"):
        export_weights(pretrained, format="onnx", out=tmp_path / "w.pth")
    (tmp_path / "file").touch()
    for ending in ("pth", "safetensors"):
        with pytest.raises(CheckpointError, match="cannot write") as caught:
            export_weights(pretrained, format="timm", out=tmp_path / "file" / f"w.{ending}")
        assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("force", [False, True])
def test_the_users_files_are_not_destroyed(force: bool, tmp_path: Path) -> None:
    """The source and a run's checkpoints never, other files only if that is asked for."""
    saved_run(tmp_path / "run", changed_model(R18, dim=16))
    read = load_pretrained(tmp_path / "run")
    (source,) = export_weights(read, format="torchvision", out=tmp_path / "a.pth")[:1]
    (tmp_path / "link.pth").symlink_to(source)
    cases = [
        (load_pretrained(source), source, "is the file that the weights come from"),
        (load_pretrained(source), tmp_path / "link.pth", "is the file that the weights come from"),
        (read, tmp_path / "run" / "checkpoints" / "b.pth", "holds a run's checkpoints"),
    ]
    for pretrained, out, message in cases:
        before = sorted(tmp_path.rglob("*")), source.read_bytes()
        with pytest.raises(CheckpointError, match=message):
            export_weights(pretrained, format="torchvision", out=out, force=force)
        assert (sorted(tmp_path.rglob("*")), source.read_bytes()) == before
    (tmp_path / "b.pth.md").write_text("mine")
    if force:
        export_weights(read, format="torchvision", out=tmp_path / "b.pth", force=True)
    else:
        with pytest.raises(CheckpointError, match=r"b\.pth\.md is there already"):
            export_weights(read, format="torchvision", out=tmp_path / "b.pth")
    assert (tmp_path / "b.pth").exists() == force
    assert ((tmp_path / "b.pth.md").read_text() == "mine") != force


@pytest.mark.parametrize("format", ["torchvision", "simsiam", "detectron2"])
def test_timms_shared_resnets_go_everywhere(format: str, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    theirs = replace(R18, backbone="timm/resnet18")
    method = saved_run(tmp_path / "run", theirs)
    out = tmp_path / ("w.pkl" if format == "detectron2" else "w.pth")
    export_weights(load_pretrained(tmp_path / "run"), format=format, out=out)
    if format != "detectron2":
        assert torch.equal(load_pretrained(out).network()(X), method.backbone(X))
    assert "ResNet-18, pre-trained" in Path(f"{out}.md").read_text()


def test_shared_resnets_have_the_same_names() -> None:
    pytest.importorskip("timm")
    for name in SHARED_RESNETS:
        torchvisions, timms = (
            {k: x.shape for k, x in skeleton(ModelConfig(backbone=full)).state_dict().items()}
            for full in (name, f"timm/{name}")
        )
        assert torchvisions == timms, name


def test_the_card_claims_no_more_than_is_known(tmp_path: Path) -> None:
    """Of a run on synthetic data from given weights, stopped before its last kNN monitor."""
    saved_run(tmp_path / "run", changed_model(R18, dim=16))
    monitor = {"kind": "knn", "k": 2, "bank": 9, "temperature": 0.1}
    (tmp_path / "run" / "metrics.jsonl").write_text(
        "".join(json.dumps({**monitor, "epoch": x, "top1": x}) + "\n" for x in (5.0, 7.5, 9.0))
    )
    read = load_pretrained(tmp_path / "run")
    assert read.config is not None
    config = with_settings(read.config, init="/home/me/secret/r18.pth", pipeline="synthetic")
    read = replace(read, config=config)
    export_weights(read, format="torchvision", out=tmp_path / "w.pth")
    card = (tmp_path / "w.pth.md").read_text()
    assert "kNN top-1 7.50% after 7.5 epochs" in card and "9 epochs" not in card
    assert "| init | r18.pth |" in card and "/home" not in card and str(tmp_path) not in card
    assert "labels" not in card and "| data | synthetic, 1,234 images |" in card
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        export_weights(read, format="torchvision", out=tmp_path / "v.pth")
    headed = untrained(changed_model(R18, dim=16))
    export_weights(headed, format="torchvision", out=tmp_path / "u.pth")
    card = (tmp_path / "u.pth.md").read_text()
    assert card.startswith("# ResNet-18, pre-trained with SimSiam") and "labels" not in card


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_a_full_disk_leaves_the_old_file(ending: str, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    out = tmp_path / f"w.{ending}"
    out.write_text("old")
    out.with_name(f"w.{ending}.tmp").symlink_to("/dev/full")
    if ending == "safetensors":  # it replaces the link; a folder in the way does stop it
        out.with_name(f"w.{ending}.tmp").unlink()
        out.with_name(f"w.{ending}.tmp").mkdir()
    with pytest.raises((CheckpointError, OSError)):
        export_weights(untrained(changed_model(R18, dim=16)), format="timm", out=out, force=True)
    assert out.read_text() == "old"


# --- the command


def test_export_end_to_end(small: TrainConfig, tmp_path: Path) -> None:
    """A run is trained, exported with what is known of it, and its file converted once more."""
    model = changed_model(small.model, width=64, stem="imagenet", dim=512, projector_layers=3)
    config = replace(
        small,
        augment=small.augment.changed(crop=32),
        model=replace(model, backbone="resnet18"),
        optim=replace(small.optim, epochs=1),
        monitor=replace(small.monitor, knn_every=1, eval_resize=32),
    )
    fastsiam("train", *flags(config))
    run = Path(config.run.out)
    place = Place(0, 1, torch.device("cpu"))
    quick = LinearConfig(cached=True, lrs="0.1,3", workers=0, batch=8, epochs=1)
    linear = evaluate_linear(run, quick, place)
    evaluate_knn(run, KnnConfig(workers=0, untrained=True, k="3"), place)  # of other weights
    out = tmp_path / "r18.safetensors"
    done = fastsiam("export", str(run), "--format", "timm", "--out", str(out))
    assert done.stdout.splitlines()[1:] == [f"wrote {out}", f"wrote {out}.md"]
    card = (tmp_path / "r18.safetensors.md").read_text()
    assert str(tmp_path) not in card
    for text in (
        "# ResNet-18, pre-trained with SimSiam",
        "| data | data, 24 images |",
        "of a run of fastsiam, 1 epochs, from last.pt, in the layout of timm.",
        "2020; no labels were used.",
        "| recipe | imagenet |",
        "| epochs | 1 of 1 |",
        f"Trained by fastsiam {__version__}, commit {commit()}, torch {torch.__version__}. Written",
        "kNN top-1 ",
        "**linear** (batch 8, momentum 0.9, weight_decay 0, schedule cosine per step, seed 0, "
        "optimizer lars, lars_trust 0.001, rates [0.1, 3.0], epochs 1, cached True, storage fp32)",
        f"| 0.1 | {linear.results[0]['top1']:g} | 100 |",
        "views of 32 x 32 pixels",
        'timm.create_model("resnet18", num_classes=0)',
    ):
        assert text in card, text
    read = load_pretrained(out)
    network = resnet.resnet18()
    network.fc = nn.Identity()
    network.load_state_dict(load_file(out))
    method = build_method(config.model)
    method.load_state_dict(checkpoints.load(run).model)
    same(network.eval()(X), method.backbone.eval()(X))
    assert torch.equal(read.network()(X), network(X))
    converted = str(tmp_path / "converted.pkl")
    fastsiam("export", str(out), "--format", "detectron2", "--out", converted)
    bad = fastsiam("export", str(run), "--format", "timm", "--out", str(out), code=1)
    assert bad.stderr == f"error: {out} is there already: choose another, or give --force\n"
    fastsiam("export", str(run), "--format", "timm", "--out", str(out), "--force")
    card = (tmp_path / "converted.pkl.md").read_text()
    assert card.startswith("# ResNet-18, converted by fastsiam\n") and "SimSiam" not in card
    assert "stem.conv1.weight" in pickle.loads(Path(converted).read_bytes())["model"]


def test_wrong_usage_is_told(tmp_path: Path) -> None:
    bad = fastsiam("export", str(tmp_path), "--format", "timm", "--out", "x.pth", code=1)
    assert bad.stderr.startswith("error: no checkpoint at") and bad.stderr.count("\n") == 1
    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "w.pth")
    path = str(tmp_path / "w.pth")
    bad = fastsiam("export", path, "--format", "timm", "--out", "x.onnx", code=2)
    assert "a file of format timm ends in" in bad.stderr
    said = "--format", "timm", "--out", str(tmp_path / "x.pth"), "--stem", "cifar-pad3"
    assert "stem must be one of" in fastsiam("export", path, *said, code=2).stderr
    assert not (tmp_path / "x.pth").exists()


def test_a_foreign_backbone_is_trained_and_exported(small: TrainConfig, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    config = replace(
        small,
        augment=small.augment.changed(crop=32),
        model=model_of(backbone="timm/test_efficientnet", dim=16, predictor_dim=4),
        optim=replace(small.optim, epochs=1),
        monitor=replace(small.monitor, eval_resize=32),
    )
    fastsiam("train", *flags(config))
    out = tmp_path / "w.pth"
    fastsiam("export", config.run.out, "--format", "timm", "--out", str(out))
    assert load_pretrained(out, backbone="timm/test_efficientnet").layout == "timm"
    model = replace(config.model, backbone="vit_b_16")
    with pytest.raises(ValueError, match="vit_b_16 takes images of 224 pixels"):
        preflight(replace(config, model=model), world=1)
    less = replace(config.step, activation_memory=0.5)
    with pytest.raises(ValueError, match="needs --compile on"):
        preflight(replace(config, step=less), world=1)
    preflight(replace(config, step=replace(less, compile="on")), world=1)


def test_every_format_is_an_option() -> None:
    text = fastsiam("export", "--help").stdout
    assert all(name in text for name in FORMATS)


def test_training_starts_from_a_files_weights(
    small: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train_here(with_settings(small, max_steps=3), "imagenet")
    torch.save({"state_dict": load_pretrained(first).part("backbone")}, tmp_path / "some.pth")
    zero = {"lr": 1e-30, "max_steps": 1, "weight_decay": 0.0}
    weights = {}
    for name, init in (("all", str(first)), ("some", str(tmp_path / "some.pth")), ("none", "")):
        run = train_here(
            with_settings(small, out=str(tmp_path / name), init=init, **zero), "imagenet"
        )
        weights[name] = load_pretrained(run).state
    given = load_pretrained(first).state
    for key, value in given.items():
        if "running" in key or "tracked" in key:
            continue
        torch.testing.assert_close(weights["all"][key], value, rtol=0, atol=1e-20)
        other = weights["all"] if key.startswith("backbone.") else weights["none"]
        torch.testing.assert_close(weights["some"][key], other[key], rtol=0, atol=1e-20)
    assert not torch.equal(weights["none"]["backbone.conv1.weight"], given["backbone.conv1.weight"])
    assert "fresh: projector, predictor" in capsys.readouterr().err
    wide = with_settings(small, out=str(tmp_path / "wide"), width=8, init=str(first))
    padded = with_settings(small, out=str(tmp_path / "wide"), stem="cifar-pad2", init=str(first))
    for different in (wide, padded):
        with pytest.raises(CheckpointError, match="give the same --backbone, --stem and --width"):
            preflight(different, world=1)
    lost = with_settings(small, out=str(tmp_path / "lost"), init=str(tmp_path / "nowhere.pth"))
    error = fastsiam("train", *flags(lost), code=1).stderr
    assert error.startswith("error: no checkpoint at") and error.count("\n") == 1
    assert not (tmp_path / "lost").exists() and not (tmp_path / "wide").exists()
    (tmp_path / "some.pth").unlink()  # a run that goes on needs it no more
    begun = with_settings(small, out=str(tmp_path / "some"), init=str(tmp_path / "some.pth"))
    preflight(begun, world=1)
