"""A trained network as it was read: its weights by fastsiam's names, and what is known of it."""

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
from fastsiam.config.views import IMAGENET_MEAN, IMAGENET_STD, usual_resize
from fastsiam.console import counted
from fastsiam.errors import CheckpointError, in_a_line
from fastsiam.methods import build_method
from fastsiam.model.backbones import Backbone, ForeignNetwork, build_backbone

from .heads import build_parts
from .layouts import AUTHORS

_SHOWN = 3
"""Keys that a line names; of the others it gives the number."""
_LONGEST = 100
"""Characters of a key in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """How a network takes images."""

    crop: int
    """Side of the central crop, in pixels."""
    resize: int
    """Shorter side before that crop, in pixels."""
    mean: tuple[float, float, float]
    """Of each channel of images scaled to 0-1; it is subtracted."""
    std: tuple[float, float, float]
    """Of each channel; it divides."""

    @classmethod
    def of(cls, config: TrainConfig) -> Input:
        """Return how a run's network takes images."""
        return cls(
            crop=config.augment.crop,
            resize=config.eval_resize,
            mean=config.augment.mean,
            std=config.augment.std,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """A trained network: of a run, or out of a file of another program."""

    path: Path
    """The file that it came from."""
    layout: str
    """fastsiam, plain (``export --format plain``), simsiam, moco, swav (their authors'), mmselfsup,
    solo-learn, lightly, torchvision or timm."""
    model: BackboneConfig
    """The backbone, of a run with its method; inferred from names and shapes for the files of other
    programs."""
    state: dict[str, Tensor]
    """Weights by fastsiam's names: ``backbone.*``, and, where the file has them, ``projector.*``
    and other parts; of a run also what else its method keeps, such as a momentum encoder or a row
    for each image. On the CPU, float32 except for counters."""
    epoch: float | None = None
    """Epochs done, if the file says so."""
    config: TrainConfig | None = None
    """All settings, of a run."""
    images: int | None = None
    """Training images, of a run."""
    left_out: tuple[str, ...] = ()
    """Keys of the file that are knowingly not used: classifiers, preprocessing, averages, momentum
    encoders and queues."""
    input: Input | None = None
    """How it takes images, if that is known: of runs and plain files."""
    stem_assumed: bool = False
    """Whether the padding of the 3x3 stem is a guess: neither named nor known of the layout."""

    @property
    def method(self) -> type[MethodConfig] | None:
        """The method, of a run and where the file's layout is of one method."""
        if isinstance(self.model, ModelConfig):
            return type(self.model.method)
        return AUTHORS[self.layout].method if self.layout in AUTHORS else None

    @property
    def run(self) -> Path | None:
        """The run's folder, of a checkpoint that lies in one."""
        folder = self.path.absolute().parent
        return folder.parent if self.config and folder.name == "checkpoints" else None

    @property
    def usual_input(self) -> Input:
        """How it takes images; as such networks usually do, where nothing is known."""
        crop = 224 if self.model.stem == "imagenet" else 32
        usual = Input(crop=crop, resize=usual_resize(crop), mean=IMAGENET_MEAN, std=IMAGENET_STD)
        return self.input or usual

    def build(self) -> nn.Module:
        """Build all parts with new weights; seed torch before for repeatable ones.

        Raises:
            BackendError: timm is needed, and not installed.
        """
        if isinstance(self.model, ModelConfig):
            return build_method(self.model)
        return build_parts(build_backbone(self.model), self.state)

    def network(self, layer: Literal["backbone", "projector"] = "backbone") -> Backbone:
        """Build the network up to a layer, with its weights: float32, on the CPU, in eval mode.

        torch's random generator is left where it was.

        Raises:
            CheckpointError: there is no projector, or the weights do not fit.
            BackendError: timm is needed, and not installed.
        """
        parts = ("backbone",) if layer == "backbone" else ("backbone", "projector")
        state = self.part(*parts)
        with torch.random.fork_rng(devices=[]):
            built = self.build()
        network = nn.Sequential(OrderedDict((part, built.get_submodule(part)) for part in parts))
        try:
            network.load_state_dict(state)
        except RuntimeError as error:
            raise CheckpointError(
                f"{self.path} does not hold the weights of {self.model.backbone}"
            ) from error
        if layer == "projector":
            *_, last = (x for x in network[-1].modules() if isinstance(x, nn.Linear))
            return ForeignNetwork(network, features=last.out_features).eval()
        backbone: Backbone = network.get_submodule("backbone")  # type: ignore[assignment]
        return backbone.eval()

    def part(self, *names: str) -> dict[str, Tensor]:
        """Return the weights of these parts, by their full names.

        Raises:
            CheckpointError: the file lacks one of the parts.
        """
        weights = {key: x for key, x in self.state.items() if key.partition(".")[0] in names}
        for name in names:
            if not any(key.startswith(f"{name}.") for key in weights):
                raise CheckpointError(f"{self.path} holds no {name}, only other parts")
        return weights

    def __str__(self) -> str:
        """One line for people."""
        of = {
            **{name: f"{name} (the authors' layout)" for name in AUTHORS},
            "fastsiam": "a run of fastsiam",
            "plain": "a plain file",
        }
        stem = "" if self.model.stem == "imagenet" else f" ({self.model.stem} stem)"
        if self.stem_assumed:
            stem = f" (stem taken for {self.model.stem})"
        epochs = "" if self.epoch is None else f", {counted(self.epoch, 'epoch')}"
        left_out = f"; left out: {listed(self.left_out)}" if self.left_out else ""
        name = title(self.model.backbone)
        layout = of.get(self.layout, self.layout)
        return f"{name}{stem} of {layout}{epochs}, from {self.path}{left_out}"


def title(backbone: str) -> str:
    """Return a network's name as people write it."""
    return re.sub(r"^resnet(\d+)$", r"ResNet-\1", backbone)


def listed(keys: Iterable[str]) -> str:
    """Return the first of some keys for people, and how many more there are."""
    keys = list(keys)
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(in_a_line(key)[:_LONGEST] for key in keys[:_SHOWN]) + more
