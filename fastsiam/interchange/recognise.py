"""A trained network, whatever wrote it: found out from names and shapes, checked in full."""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck

from fastsiam import checkpoint as checkpoints
from fastsiam.checkpoint import Checkpoint
from fastsiam.config import ModelConfig, SimSiamConfig, TrainConfig
from fastsiam.errors import CheckpointError
from fastsiam.methods import Method, build_method, method_skeleton
from fastsiam.model.backbones import BLOCKS, Backbone, classifier_keys

from . import files
from .layouts import Translation, translated

_SHOWN = 3
"""Keys that an error names; of the others it gives the number."""

_MOST_EPOCHS = 1e9
"""No number of epochs is larger: it is something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """A trained network: of a run of ours, or out of a file of another program."""

    path: Path
    """The file that it came from."""
    layout: str
    """fastsiam, simsiam (the authors'), mmselfsup, solo-learn, lightly, torchvision or timm."""
    model: ModelConfig
    """The network; inferred from names and shapes for the files of other programs."""
    state: dict[str, Tensor]
    """Weights by the names of our SimSiam: ``backbone.*``, and, where the file has them,
    ``projector.*`` and ``predictor.*``. On the CPU, float32 but for counters."""
    epoch: float | None
    """Epochs done, if the file says so."""
    config: TrainConfig | None
    """All settings, of a run of ours."""
    images: int | None
    """Training images, of a run of ours."""
    left_out: tuple[str, ...]
    """Keys of the file that are knowingly not used: classifiers, preprocessing, averages."""
    stem_assumed: bool = False
    """Whether the padding of the 3x3 stem is a guess: neither said nor known of the layout."""

    @property
    def run(self) -> Path | None:
        """The run's folder, of a checkpoint of ours that lies in one."""
        folder = self.path.absolute().parent
        return folder.parent if self.config and folder.name == "checkpoints" else None

    def network(self, layer: Literal["backbone", "projector"] = "backbone") -> Backbone:
        """Build the network up to a layer, with its weights: float32, on the CPU, in eval mode.

        torch's random generator is left where it was.

        Raises:
            CheckpointError: there is no projector, or the weights do not fit.
            BackendError: timm is needed, and not installed.
        """
        with torch.random.fork_rng(devices=[]):
            method = build_method(self.model)
        before = itertools.takewhile(lambda part: part != layer, method.parts)
        parts = (*before, layer)
        state = self.part(*parts)
        network = _parts_of(method, parts)
        try:
            network.load_state_dict(state)
        except RuntimeError as error:
            raise CheckpointError(
                f"{self.path} does not hold the weights of {self.model.backbone}"
            ) from error
        found = method.backbone if layer == "backbone" else _Projected(network, method.dim)
        return found.eval()

    def part(self, *names: str) -> dict[str, Tensor]:
        """Return the weights of these parts, by their full names.

        Raises:
            CheckpointError: the file lacks one of the parts.
        """
        for name in names:
            if not any(key.startswith(f"{name}.") for key in self.state):
                raise CheckpointError(f"{self.path} holds no {name}, only other parts")
        starts = tuple(f"{name}." for name in names)
        return {key: value for key, value in self.state.items() if key.startswith(starts)}

    def __str__(self) -> str:
        """One line for people."""
        return self.described(self.path)

    def described(self, source: object) -> str:
        """Return that line with another name for where the weights come from."""
        of = {"simsiam": "simsiam (the authors' layout)", "fastsiam": "a run of fastsiam"}
        stem = "" if self.model.stem == "imagenet" else f" ({self.model.stem} stem)"
        if self.stem_assumed:
            stem = f" (stem taken for {self.model.stem})"
        epochs = "" if self.epoch is None else f", {self.epoch:g} epochs"
        left_out = f"; left out: {_listed(self.left_out)}" if self.left_out else ""
        name = title(self.model.backbone)
        layout = of.get(self.layout, self.layout)
        return f"{name}{stem} of {layout}{epochs}, from {source}{left_out}"


class _Projected(Backbone):
    """An encoder and the projector behind it."""

    def __init__(self, parts: nn.Sequential, dim: int) -> None:
        super().__init__()
        self.parts, self.features = parts, dim

    def forward(self, x: Tensor) -> Tensor:
        """Return projections (N, dim) of normalised images (N, 3, S, S)."""
        out: Tensor = self.parts(x)
        return out


def title(backbone: str) -> str:
    """Return a network's name as people write it."""
    return re.sub(r"^resnet(\d+)$", r"ResNet-\1", backbone)


def load_pretrained(path: Path, *, backbone: str = "", stem: str = "") -> Pretrained:
    """Read a trained network; nothing in the file is executed.

    A bias before a BN, which our heads lack, is folded into the BN's running mean: outputs in eval
    mode stay as they are.

    Args:
        path: a run's folder, a checkpoint of ours, or a file of another program: of torch.save, or
            ``.safetensors``.
        backbone: the network's name, where its weights' names do not tell: anything but a plain
            ResNet.
        stem: of our ResNets. Padding and pooling leave no trace in weights: without it, a 3x3 stem
            is taken for "cifar" (for "cifar-pad2" in solo-learn's layout).

    Raises:
        CheckpointError: the file is missing, damaged, hostile, or does not fit to the last weight.
        BackendError: timm is needed, and not installed.
        ValueError: there is no backbone or no stem of that name.
    """
    said: dict[str, Any] = {"backbone": backbone, "stem": stem}
    foreign = not ModelConfig(**{key: name for key, name in said.items() if name}).is_own
    found = checkpoints.found(path)
    content = files.read(found)
    if isinstance(content, dict) and "steps_per_epoch" in content:
        return _of_ours(checkpoints.parsed(found, content), found, backbone, stem)
    state, beside = _weights(found, content)
    given = translated(state, foreign=foreign)
    if len(given.weights) + len(given.left_out) < len(state):
        raise CheckpointError(
            f"{found} holds two encoders by the names that are one to us, backbone and encoder; "
            "save the one that is meant alone"
        )
    model = _inferred(found, given, backbone, stem)
    method = method_skeleton(model)
    classifier = {f"backbone.{key}" for key in classifier_keys(model)}
    unused = [given.origin[key] for key in given.weights if key in classifier]
    weights = {key: value for key, value in given.weights.items() if key not in classifier}
    _require_plain(found, weights, given.origin)
    _fold_biases(weights)
    network = _parts_of(method, _parts(method, weights))
    _add_counters(weights, network)
    _check(found, weights, network, given.origin)
    layout = "timm" if model.backbone.startswith("timm/") else given.layout
    return Pretrained(
        path=found,
        layout=layout,
        model=model,
        state={key: _plain(value) for key, value in weights.items()},
        epoch=_epochs(content, layout),
        config=None,
        images=None,
        left_out=(*given.left_out, *unused, *beside),
        stem_assumed=model.stem == "cifar" and not stem,
    )


def _of_ours(checkpoint: Checkpoint, path: Path, backbone: str, stem: str) -> Pretrained:
    model, weights = checkpoint.config.model, checkpoint.model
    for said, own in ((backbone, model.backbone), (stem, model.stem)):
        if said not in ("", own):
            raise CheckpointError(f"{path} is of a run with {own}, not {said}")
    if not isinstance(weights, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in weights.items()
    ):
        raise CheckpointError(f"{path} holds no weights by name where a run of ours has them")
    names = {key: key for key in weights}
    _require_plain(path, weights, names)
    _check(path, weights, method_skeleton(model, images=checkpoint.images), names)
    return Pretrained(
        path=path,
        layout="fastsiam",
        model=model,
        state={key: _plain(value) for key, value in weights.items()},
        epoch=checkpoint.epoch,
        config=checkpoint.config,
        images=checkpoint.images,
        left_out=(),
    )


def _weights(path: Path, content: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Find the weights in a file's content; return the keys beside them that are not used."""
    entries, averages = content if isinstance(content, Mapping) else {}, []
    for name in ("state_dict", "model", "model_state_dict"):
        if isinstance(entries.get(name), Mapping):
            averages = [key for key in ("model_ema", "state_dict_ema") if key in entries]
            entries = entries[name]
            break
    state = {
        key: value
        for key, value in entries.items()
        if isinstance(value, Tensor) and key != "n_averaged"  # torch's AveragedModel counts
    }
    if not state or not all(isinstance(key, str) for key in state):
        raise CheckpointError(f"{path} holds no weights by name: no state dict is in it")
    return state, [*(str(key) for key in entries if key not in state), *averages]


def _inferred(path: Path, given: Translation, backbone: str, stem: str) -> ModelConfig:
    """Find out the network from names and shapes, as far as it is not said.

    Heads are taken for SimSiam's, which is what the layouts of other programs are known for.
    """
    weights, name = given.weights, backbone or _resnet(given.weights)
    if not name:
        raise CheckpointError(
            f"cannot tell which network {path} holds ({_listed(given.origin.values())}): "
            "name it with --backbone, such as convnext_tiny or timm/NAME"
        )
    settings: dict[str, Any] = {"backbone": name}
    heads: dict[str, Any] = {}
    first = weights.get("backbone.conv1.weight")
    if name in BLOCKS and first is not None and first.dim() == 4:
        usual = given.small_stem if first.shape[-1] == 3 else "imagenet"
        settings |= {"width": len(first), "stem": stem or usual}
    project = _linear(weights, "projector")
    if project:
        heads |= {"projector_layers": len(project), "dim": len(project[-1])}
        if len(project) > 1 and len(project[0]) != len(project[-1]):
            heads["projector_dim"] = len(project[0])
    if predict := _linear(weights, "predictor"):
        heads |= {"predictor_dim": len(predict[0])}
        heads.setdefault("dim", len(predict[-1]))
    try:
        return ModelConfig(**settings, method=SimSiamConfig(**heads))
    except ValueError as error:
        raise CheckpointError(f"{path} holds no network: {error}") from error


def _resnet(weights: Mapping[str, Tensor]) -> str:
    """Return the name of our ResNet that has as many blocks of such a kind; "" if none has."""
    blocks = {m[0] for key in weights if (m := re.match(r"backbone\.layer[1-4]\.\d+\.", key))}
    depths = tuple(
        sum(block.startswith(f"backbone.layer{stage}.") for block in blocks)
        for stage in range(1, 5)
    )
    deep = "backbone.layer1.0.conv3.weight" in weights
    found = (k for k, (kind, of) in BLOCKS.items() if of == depths and (kind is Bottleneck) == deep)
    return next(found, "")


def _linear(weights: Mapping[str, Tensor], part: str) -> list[Tensor]:
    """Return the matrices of a head, in their order."""
    found = {
        int(m[1]): value
        for key, value in weights.items()
        if (m := re.match(rf"{part}\.(\d+)\.weight$", key)) and value.dim() == 2
    }
    return [found[number] for number in sorted(found)]


def _require_plain(path: Path, weights: Mapping[str, Tensor], origin: Mapping[str, str]) -> None:
    """Refuse what is no array of real numbers, or claims more of them than the file holds."""
    for key, value in weights.items():
        whole = (
            value.layout == torch.strided
            and not (value.is_meta or value.is_quantized or value.is_complex() or value.is_nested)
            and value.untyped_storage().nbytes() >= value.numel() * value.element_size()
        )
        if not whole:
            raise CheckpointError(
                f"{path} is refused: {origin[key]} is no plain tensor of real numbers in full"
            )


def _add_counters(weights: dict[str, Tensor], network: nn.Module) -> None:
    """Start the counters of BNs that a file lacks: torch had none before 0.4.1, nor has Caffe."""
    for key in network.state_dict():
        if key.endswith(".num_batches_tracked") and key not in weights:
            weights[key] = torch.tensor(0)


def _fold_biases(weights: dict[str, Tensor]) -> None:
    """Take each bias before a BN out of the BN's running mean instead: the same in eval mode."""
    for key in list(weights):
        found = re.match(r"(projector|predictor)\.(\d+)\.bias$", key)
        mean = f"{found[1]}.{int(found[2]) + 1}.running_mean" if found else ""
        if mean in weights and weights[mean].shape == weights[key].shape:
            weights[mean] = weights[mean].float() - weights.pop(key).float()


def _parts(method: Method, weights: Iterable[str]) -> tuple[str, ...]:
    """Return those parts of a method that weights are of; the backbone is always one."""
    present = {key.partition(".")[0] for key in weights}
    first, *others = method.parts
    return (first, *(part for part in others if part in present))


def _parts_of(method: Method, parts: Iterable[str]) -> nn.Sequential:
    """Put some of a method's parts one behind the other."""
    return nn.Sequential(OrderedDict((part, method.get_submodule(part)) for part in parts))


def _check(
    path: Path, weights: Mapping[str, Tensor], network: nn.Module, origin: Mapping[str, str]
) -> None:
    """Hold the weights against the network, to the last one."""
    expected = network.state_dict()
    missing = [key for key in expected if key not in weights]
    unknown = [origin[key] for key in weights if key not in expected]
    misshapen = [
        f"{origin[key]}: {tuple(weights[key].shape)} for {tuple(value.shape)}"
        for key, value in expected.items()
        if key in weights and weights[key].shape != value.shape
    ]
    found = {"missing": missing, "unknown": unknown, "of another shape": misshapen}
    if problems := [
        f"{len(keys)} {kind} ({_listed(keys)})" for kind, keys in found.items() if keys
    ]:
        backbone = network.get_submodule("backbone")
        kind = type(getattr(backbone, "network", backbone)).__name__
        raise CheckpointError(
            f"the weights in {path} are not those of the {kind} that they were taken for: "
            f"{', '.join(problems)}; if it is another network, name it with --backbone"
        )


def _epochs(content: Any, layout: str) -> float | None:
    """Return the epochs done, where it is known what the file's number means."""
    if not isinstance(content, Mapping):
        return None
    if isinstance(meta := content.get("meta"), Mapping):  # OpenMMLab's
        epoch = meta.get("epoch")
    elif "pytorch-lightning_version" in content:
        epoch = content.get("epoch")
        epoch = epoch + 1 if isinstance(epoch, int) else None  # it counts from 0
    else:  # torchvision's and timm's trainers count from 0, others as they please
        epoch = content.get("epoch") if layout == "simsiam" else None
    return float(epoch) if isinstance(epoch, int | float) and 0 <= epoch < _MOST_EPOCHS else None


def _plain(value: Tensor) -> Tensor:
    """Return a tensor of its own, in float32 if it is of numbers with a point."""
    value = value.detach().float() if value.is_floating_point() else value.detach()
    return value.contiguous()


def _listed(keys: Iterable[str]) -> str:
    keys = list(keys)
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more
