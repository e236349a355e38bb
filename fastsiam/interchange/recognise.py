"""A trained network, whatever wrote it: found out from names and shapes, checked in full."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck

from fastsiam.config import ModelConfig
from fastsiam.errors import CheckpointError
from fastsiam.methods import Method, method_skeleton
from fastsiam.model.backbones import BLOCKS, classifier_keys
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.checkpoint import Checkpoint

from . import plain, weight_files
from .foreign_heads import fold_biases, method_of
from .layouts import Translation, translated
from .pretrained import Input, Pretrained, listed, parts_of

_MOST_EPOCHS = 1e9
"""No number of epochs is larger: it is something else."""

_COUNTED = ("simsiam", "moco", "swav")
"""Layouts whose files count the epochs that are done."""


def load_pretrained(path: Path, *, backbone: str = "", stem: str = "") -> Pretrained:
    """Read a trained network; nothing in the file is executed.

    A bias before a BN, which our heads lack, is folded into the BN's running mean: outputs in eval
    mode stay as they are.

    Args:
        path: a run's folder, a checkpoint or a plain file of ours, or a file of another program: of
            torch.save, or ``.safetensors``.
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
    content = weight_files.read(found)
    if isinstance(content, dict) and "steps_per_epoch" in content:
        return _of_ours(checkpoints.parsed(found, content), found, backbone, stem)
    if plain.is_plain(content):
        return _of_plain(content, found, backbone, stem)
    state, beside = _weights(found, content)
    given = translated(state, foreign=foreign)
    if len(given.weights) + len(given.left_out) < len(state):
        raise CheckpointError(
            f"{found} holds two encoders by the names that are one to us, backbone and encoder; "
            "save the one that is meant alone"
        )
    model, told = _inferred(found, given, backbone, stem)
    method = method_skeleton(model)
    classifier = {f"backbone.{key}" for key in classifier_keys(model)}
    unused = [given.origin[key] for key in given.weights if key in classifier]
    weights = {key: value for key, value in given.weights.items() if key not in classifier}
    _require_plain(found, weights, given.origin)
    fold_biases(weights)
    network = parts_of(method, _parts(method, weights))
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
        method_told=told,
    )


def _of_ours(checkpoint: Checkpoint, path: Path, backbone: str, stem: str) -> Pretrained:
    model, images = checkpoint.config.model, checkpoint.images
    _require_as_said(path, model, backbone, stem)
    network = method_skeleton(model, images=images)
    return Pretrained(
        path=path,
        layout="fastsiam",
        model=model,
        state=_checked(path, checkpoint.model, network),
        epoch=checkpoint.epoch,
        config=checkpoint.config,
        images=images,
        left_out=(),
        input=Input.of(checkpoint.config),
    )


def _of_plain(content: dict[str, Any], path: Path, backbone: str, stem: str) -> Pretrained:
    try:
        facts = plain.Facts.of(content)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{path} is a plain file of another version of fastsiam, or damaged: {error}"
        ) from error
    model = ModelConfig(**facts.backbone)
    _require_as_said(path, model, backbone, stem)
    weights = {f"backbone.{key}": value for key, value in content["state_dict"].items()}
    network = parts_of(method_skeleton(model), ("backbone",))
    return Pretrained(
        path=path,
        layout="plain",
        model=model,
        state=_checked(path, weights, network),
        epoch=facts.epoch,
        config=None,
        images=None,
        left_out=(),
        input=facts.input,
    )


def _require_as_said(path: Path, model: ModelConfig, backbone: str, stem: str) -> None:
    """Refuse another network than the user names."""
    for said, own in ((backbone, model.backbone), (stem, model.stem)):
        if said not in ("", own):
            raise CheckpointError(f"{path} holds {own}, not {said}")


def _checked(path: Path, weights: Any, network: nn.Module) -> dict[str, Tensor]:
    """Return weights that a file of ours holds, if they are those of the network."""
    if not isinstance(weights, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in weights.items()
    ):
        raise CheckpointError(f"{path} holds no weights by name where a run of ours has them")
    names = {key: key for key in weights}
    _require_plain(path, weights, names)
    _check(path, weights, network, names)
    return {key: _plain(value) for key, value in weights.items()}


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


def _inferred(path: Path, given: Translation, backbone: str, stem: str) -> tuple[ModelConfig, bool]:
    """Find out the network from names and shapes, as far as it is not said.

    Returns:
        The network, and whether the file tells of which method its heads are.
    """
    weights, name = given.weights, backbone or _resnet(given.weights)
    if not name:
        raise CheckpointError(
            f"cannot tell which network {path} holds ({listed(given.origin.values())}): "
            "name it with --backbone, such as convnext_tiny or timm/NAME"
        )
    settings: dict[str, Any] = {"backbone": name}
    first = weights.get("backbone.conv1.weight")
    if name in BLOCKS and first is not None and first.dim() == 4:
        usual = given.small_stem if first.shape[-1] == 3 else "imagenet"
        settings |= {"width": len(first), "stem": stem or usual}
    try:
        method, told = method_of(weights, method=given.method, momentum=given.momentum)
        return ModelConfig(**settings, method=method), told
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


def _parts(method: Method, weights: Iterable[str]) -> tuple[str, ...]:
    """Return those parts of a method that weights are of; the backbone is always one."""
    present = {key.partition(".")[0] for key in weights}
    first, *others = method.parts
    return (first, *(part for part in others if part in present))


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
    if problems := [f"{len(keys)} {kind} ({listed(keys)})" for kind, keys in found.items() if keys]:
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
        epoch = content.get("epoch") if layout in _COUNTED else None
    return float(epoch) if isinstance(epoch, int | float) and 0 <= epoch < _MOST_EPOCHS else None


def _plain(value: Tensor) -> Tensor:
    """Return a tensor of its own, in float32 if it is of numbers with a point."""
    value = value.detach().float() if value.is_floating_point() else value.detach()
    return value.contiguous()
