"""Networks for import and export tests: runs, and models of other programs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from fastsiam.config import BackboneConfig, ModelConfig, TrainConfig
from fastsiam.interchange import Pretrained
from fastsiam.interchange.export import unsupported_formats
from fastsiam.methods import Method, build_method, method_skeleton
from fastsiam.methods.simsiam import SimSiam
from fastsiam.model.backbones import build_backbone
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.checkpoint import Checkpoint
from tests.configs import make_model_config

R18 = make_model_config(backbone="resnet18", dim=512, predictor_dim=32)
"""A real network that other programs also have."""

X = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))
"""Input images, shape (2, 3, 64, 64)."""


def trained(module: nn.Module, side: int = 32) -> Any:
    """Change a network's BN statistics, scales and biases from their initial values."""
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


def saved_run(
    folder: Path, model: ModelConfig, side: int = 32, config: TrainConfig | None = None
) -> SimSiam:
    """Write a run's checkpoint without training; ``model`` replaces the model of ``config``."""
    torch.manual_seed(0)
    method: SimSiam = trained(build_method(model, images=1234), side)
    state = Checkpoint(
        config=replace(config or TrainConfig(), model=model),
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


def untrained(model: ModelConfig, **settings: Any) -> Pretrained:
    """Return random weights as if read from a file of SimSiam's authors."""
    state = build_method(model).state_dict()
    return Pretrained(path=Path("x.pth"), layout="simsiam", model=model, state=state, **settings)


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert a.abs().max() > 0.01


def head(*widths: int, hidden: bool = True, output: bool = False, bias: bool = False) -> Any:
    """Build a head with the numbering of other programs: a missing BN leaves no gap."""
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(itertools.pairwise(widths)):
        last = i == len(widths) - 2
        normed = output if last else hidden
        layers.append(nn.Linear(before, after, bias=bias or not normed))
        layers += [nn.BatchNorm1d(after)] if normed else []
        layers += [] if last else [nn.ReLU()]
    return nn.Sequential(*layers)


class Authors(nn.Module):
    """SimSiam as in section 3 of the paper on a ResNet-18, with the projector as its ``fc``."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.encoder = torchvision.models.resnet18(zero_init_residual=True)
        wide = self.encoder.fc.in_features
        self.encoder.fc = head(wide, wide, wide, dim)
        self.encoder.fc.append(nn.BatchNorm1d(dim, affine=False))
        self.predictor = head(dim, hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.predictor(self.encoder(x))
        return out


def resnets() -> dict[str, Tensor]:
    """Return the state dict of a ResNet-10 of width 4, with torchvision's key names."""
    torch.manual_seed(0)
    state = build_backbone(BackboneConfig(backbone="resnet10", width=4)).state_dict()
    return state | {"fc.weight": torch.zeros(10, 32), "fc.bias": torch.zeros(10)}


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + key: value for key, value in state.items()}


def refused(model: ModelConfig, rename: Callable[[str], str] = lambda name: name) -> dict[str, str]:
    """Return by export format why it does not support a model; empty if it does."""
    state = {rename(name): x for name, x in method_skeleton(model).state_dict().items()}
    return unsupported_formats(
        Pretrained(path=Path("x.pth"), layout="fastsiam", model=model, state=state)
    )
