"""A trained network loaded from a file: weights under fastsiam's names, and metadata."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from fastsiam.config import BackboneConfig, MethodConfig, ModelConfig, TrainConfig
from fastsiam.config.setting import check_name
from fastsiam.config.views import IMAGENET_MEAN, IMAGENET_STD, usual_resize
from fastsiam.console import format_count
from fastsiam.errors import CheckpointError, as_one_line
from fastsiam.methods import build_method
from fastsiam.model.backbones import Backbone, LibraryNetwork, build_backbone

from .head_weights import build_parts
from .layouts import AUTHORS

_MOST_KEYS = 3
"""Number of keys that a message lists; it counts the others."""
_MOST_CHARACTERS = 100
"""Number of characters after which a message truncates a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """The preprocessing that a network expects."""

    crop: int
    """Side of the central crop, in pixels."""
    resize: int
    """Length of the image's shorter side before the crop, in pixels."""
    mean: tuple[float, float, float]
    """Mean of each channel, for images scaled to 0-1."""
    std: tuple[float, float, float]
    """Standard deviation of each channel, for images scaled to 0-1."""

    @classmethod
    def of(cls, config: TrainConfig) -> Input:
        """Return the preprocessing of a run's evaluations."""
        return cls(
            crop=config.augment.crop,
            resize=config.eval_resize,
            mean=config.augment.mean,
            std=config.augment.std,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """A trained network, loaded from a run of fastsiam or from another program's file."""

    path: Path
    """The file that the weights were read from."""
    layout: str
    """Origin of the weights' names: fastsiam, plain (``export --format plain``), simsiam, moco,
    swav (their authors' code), mmselfsup, solo-learn, lightly, torchvision or timm."""
    model: BackboneConfig
    """Configuration of the backbone; for runs a ``ModelConfig``, which includes the method. For
    other programs' files it is inferred from names and shapes."""
    state: dict[str, Tensor]
    """Weights under fastsiam's names: ``backbone.*``, and ``projector.*`` and other parts if the
    file has them. Runs also have the rest of the method's state, such as a momentum encoder or one
    row per image. Tensors are on the CPU, float32 except for counters."""
    epoch: float | None = None
    """Number of epochs trained, if the file states it."""
    config: TrainConfig | None = None
    """All settings of a run; None for other files."""
    images: int | None = None
    """Number of training images of a run; None for other files."""
    unused_keys: tuple[str, ...] = ()
    """Keys of the file that are deliberately ignored: classifiers, preprocessing, averages,
    momentum encoders and queues."""
    input: Input | None = None
    """Expected preprocessing, if known: for runs, and for plain files that state it."""
    stem_assumed: bool = False
    """Whether the padding of the 3x3 stem is a guess, because neither user nor layout names it."""

    @property
    def method(self) -> type[MethodConfig] | None:
        """The method of a run, or of a layout that belongs to one method; else None."""
        if isinstance(self.model, ModelConfig):
            return type(self.model.method)
        return AUTHORS[self.layout].method if self.layout in AUTHORS else None

    @property
    def run(self) -> Path | None:
        """The run's folder, if the file is a checkpoint inside one; else None."""
        folder = self.path.absolute().parent
        return folder.parent if self.config and folder.name == "checkpoints" else None

    @property
    def input_or_default(self) -> Input:
        """``input``; if unknown, 224-pixel crops (small stems: 32) and ImageNet's statistics."""
        crop = 224 if self.model.stem == "imagenet" else 32
        default = Input(crop=crop, resize=usual_resize(crop), mean=IMAGENET_MEAN, std=IMAGENET_STD)
        return self.input or default

    def build(self) -> nn.Module:
        """Build all parts, randomly initialised by torch's global generator.

        Raises:
            BackendError: timm is needed but not installed.
        """
        if isinstance(self.model, ModelConfig):
            return build_method(self.model)
        return build_parts(build_backbone(self.model), self.state)

    def network(self, layer: Literal["backbone", "projector"] = "backbone") -> Backbone:
        """Build the network up to a layer and load its weights: float32, on the CPU, in eval mode.

        The state of torch's random generator does not change.

        Raises:
            ValueError: there is no such layer.
            CheckpointError: there is no projector.
            BackendError: timm is needed but not installed.
        """
        check_name("layer", layer, ("backbone", "projector"))
        parts = ("backbone",) if layer == "backbone" else ("backbone", "projector")
        state = self.part(*parts)
        with torch.random.fork_rng(devices=[]):
            module = self.build()
        network = nn.Sequential(OrderedDict((part, module.get_submodule(part)) for part in parts))
        network.load_state_dict(state)
        backbone: Backbone = network.eval().get_submodule("backbone")  # type: ignore[assignment]
        if layer == "backbone":
            return backbone
        with torch.no_grad():
            projections = network[-1](torch.zeros(1, backbone.features))
        return LibraryNetwork(network, features=projections.shape[1]).eval()

    def part(self, *names: str) -> dict[str, Tensor]:
        """Return the weights of the named parts under their full names.

        Raises:
            CheckpointError: the file lacks one of the parts.
        """
        weights = {key: x for key, x in self.state.items() if key.partition(".")[0] in names}
        for name in names:
            if not any(key.startswith(f"{name}.") for key in weights):
                raise CheckpointError(f"{self.path} contains no {name}")
        return weights

    def __str__(self) -> str:
        """Return a one-line description for display."""
        descriptions = {"fastsiam": "a run of fastsiam", "plain": "a plain file"}
        descriptions |= {name: f"{name} (the authors' layout)" for name in AUTHORS}
        stem = "" if self.model.stem == "imagenet" else f" ({self.model.stem} stem)"
        if self.stem_assumed:
            stem = f" (stem assumed: {self.model.stem})"
        epochs = "" if self.epoch is None else f", {format_count(self.epoch, 'epoch')}"
        unused = f"; left out: {format_keys(self.unused_keys)}" if self.unused_keys else ""
        name = title(self.model.backbone)
        layout = descriptions.get(self.layout, self.layout)
        return f"{name}{stem} of {layout}{epochs}, from {self.path}{unused}"


def title(backbone: str) -> str:
    """Return a network's name for display, such as ``ResNet-50``."""
    return re.sub(r"^resnet(\d+)$", r"ResNet-\1", backbone)


def format_keys(keys: Iterable[str]) -> str:
    """Format a list of keys for a message: the first few, then how many more."""
    keys = list(keys)
    more = f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
    return ", ".join(as_one_line(key)[:_MOST_CHARACTERS] for key in keys[:_MOST_KEYS]) + more
