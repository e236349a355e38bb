"""Loading of trained networks from fastsiam and other programs, with a check of every weight."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from fastsiam.config import OWN_BACKBONES, BackboneConfig
from fastsiam.config.setting import convert_value
from fastsiam.errors import CheckpointError
from fastsiam.methods import method_skeleton
from fastsiam.model.backbones import BLOCKS, classifier_keys, skeleton
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.checkpoint import Checkpoint

from . import weight_files
from .head_weights import build_parts, fold_biases
from .layouts import AUTHORS, translate, unwrap
from .pretrained import Input, Pretrained, format_keys

_LIGHTNING = "pytorch-lightning_version"
"""Entry of files that Lightning wrote, such as solo-learn's."""


def load_pretrained(path: Path | str, *, backbone: str = "", stem: str = "") -> Pretrained:
    """Load a trained network without executing code from the file.

    fastsiam's heads have no bias before a BN. Such a bias is folded into the BN's running mean,
    which preserves outputs in eval mode.

    Args:
        path: a run's folder, a checkpoint, a plain file, or another program's ``torch.save`` or
            ``.safetensors`` file.
        backbone: name of the network. It is required unless the network is a plain ResNet, which
            is recognised by its weights' names.
        stem: stem of a fastsiam ResNet. Weights do not reveal padding and pooling, so by default a
            3x3 stem is assumed to be "cifar" ("cifar-pad2" in solo-learn's layout).

    Raises:
        CheckpointError: the file is missing, corrupt or unsafe, or any weight does not match.
        BackendError: timm is needed but not installed.
        ValueError: the name of the backbone or the stem is unknown.
    """
    options: dict[str, Any] = {"backbone": backbone, "stem": stem}
    BackboneConfig(**{key: name for key, name in options.items() if name})  # checks the names
    file = checkpoints.locate(Path(path))
    content = weight_files.read(file)
    if isinstance(content, dict) and "steps_per_epoch" in content:
        pretrained = _parse_run(checkpoints.parse(file, content), file)
    elif isinstance(content, dict) and {"fastsiam", "state_dict"} <= content.keys():
        pretrained = _parse_plain(content, file)
    else:
        return _parse_other(content, file, backbone, stem)
    for name, actual in ((backbone, pretrained.model.backbone), (stem, pretrained.model.stem)):
        if name not in ("", actual):
            raise CheckpointError(f"{file} holds {actual}, not {name}")
    return pretrained


def _parse_run(checkpoint: Checkpoint, path: Path) -> Pretrained:
    config, images = checkpoint.config, checkpoint.images
    network = method_skeleton(config.model, images=images)
    return Pretrained(
        path=path,
        layout="fastsiam",
        model=config.model,
        state=_check_weights(path, checkpoint.model, network),
        epoch=checkpoint.epoch,
        config=config,
        images=images,
        input=Input.of(config),
    )


def _parse_plain(content: dict[str, Any], path: Path) -> Pretrained:
    """Parse a file of ``export --format plain``: the backbone's weights and their metadata."""
    try:
        metadata, weights = content["fastsiam"], content["state_dict"]
        model = BackboneConfig(**metadata["backbone"])
        network = build_parts(skeleton(model), {})
        epoch = convert_value(float | None, metadata["epoch"], "epoch")
        preprocessing = convert_value(Input | None, metadata["input"], "input")
        state = {f"backbone.{key}": value for key, value in weights.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path} was written by another version of fastsiam, or is corrupt: {error}"
        ) from error
    return Pretrained(
        path=path,
        layout="plain",
        model=model,
        state=_check_weights(path, state, network),
        epoch=epoch,
        input=preprocessing,
    )


def _parse_other(content: Any, path: Path, backbone: str, stem: Any) -> Pretrained:
    state, ignored_keys = _weights(path, content)
    try:
        layout, names = translate(state, foreign=backbone not in ("", *OWN_BACKBONES))
    except ValueError as error:
        raise CheckpointError(f"{path} {error}") from error
    origin = {name: key for key, name in names.items()}
    weights = {name: state[key] for name, key in origin.items()}
    backbone = backbone or _resnet(weights)
    if not backbone:
        raise CheckpointError(
            f"cannot tell which network {path} holds ({format_keys(origin.values())}): "
            "name it with --backbone, such as convnext_tiny or timm/NAME"
        )
    try:
        model = BackboneConfig(backbone=backbone)
        conv1 = weights.get("backbone.conv1.weight")
        if model.is_own and conv1 is not None and conv1.dim() == 4:
            default_stem = layout.small_stem if conv1.shape[-1] == 3 else "imagenet"
            model = replace(model, width=len(conv1), stem=stem or default_stem)
    except ValueError as error:
        raise CheckpointError(f"{path} contains no valid network: {error}") from error
    classifier = {f"backbone.{key}" for key in classifier_keys(model)}
    left_out = [key for key in state if key not in names]
    left_out += [origin[name] for name in weights if name in classifier]
    weights = {name: value for name, value in weights.items() if name not in classifier}
    fold_biases(weights)
    backbone_skeleton = skeleton(model)  # RegNets cannot be built on the meta device
    with torch.device("meta"):
        network = build_parts(backbone_skeleton, weights)
    for key in network.state_dict():  # torch before 0.4.1 and Caffe have no counters
        if key.endswith(".num_batches_tracked"):
            weights.setdefault(key, torch.tensor(0))
    by_lightning = isinstance(content, Mapping) and _LIGHTNING in content
    program = "timm" if model.backbone.startswith("timm/") else layout.name
    return Pretrained(
        path=path,
        layout=program,
        model=model,
        state=_check_weights(path, weights, network, origin),
        epoch=_epochs(content, program),
        unused_keys=(*left_out, *ignored_keys),
        stem_assumed=not stem
        and (model.stem == "cifar" or (model.stem == "cifar-pad2" and not by_lightning)),
    )


def _weights(path: Path, content: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Find the state dict in a file's content; return it unwrapped, and the keys to ignore."""
    entries, averages = content if isinstance(content, Mapping) else {}, []
    for name in ("state_dict", "model", "model_state_dict"):
        if isinstance(entries.get(name), Mapping):
            averages = [key for key in ("model_ema", "state_dict_ema") if key in entries]
            entries = entries[name]
            break
    state = {
        key: value
        for key, value in entries.items()
        if isinstance(value, Tensor) and key != "n_averaged"  # counter of torch's AveragedModel
    }
    if not state or not all(isinstance(key, str) for key in state):
        raise CheckpointError(f"{path} contains no state dict")
    return unwrap(state), [*(str(key) for key in entries if key not in state), *averages]


def _resnet(weights: Mapping[str, Tensor]) -> str:
    """Return the name of the ResNet with the same kind and number of blocks; "" if unknown."""
    pattern = re.compile(r"backbone\.layer([1-4])\.(\d+)\.")
    blocks = {match.groups() for key in weights if (match := pattern.match(key))}
    depths = Counter(stage for stage, _ in blocks)
    kind = Bottleneck if "backbone.layer1.0.conv3.weight" in weights else BasicBlock
    design = kind, tuple(depths[stage] for stage in "1234")
    return next((name for name, x in BLOCKS.items() if x == design), "")


def _check_weights(
    path: Path, weights: Any, network: nn.Module, origin: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """Check weights against a network; return them as contiguous float32 tensors and counters.

    ``origin`` maps fastsiam's names to the file's keys, for messages; by default they are the same.
    """
    if not isinstance(weights, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in weights.items()
    ):
        raise CheckpointError(f"{path} contains no state dict where fastsiam stores the weights")
    origin = origin or {key: key for key in weights}
    expected = network.state_dict()
    shared = {key: (weights[key], value) for key, value in expected.items() if key in weights}
    problems = {
        "missing": [key for key in expected if key not in weights],
        "unknown": [origin[key] for key in weights if key not in expected],
        "of a different shape": [
            f"{origin[key]}: {tuple(value.shape)} instead of {tuple(other.shape)}"
            for key, (value, other) in shared.items()
            if value.shape != other.shape
        ],
        "of a different type": [
            f"{origin[key]}: {value.dtype}, {value.layout}, {value.device}"
            for key, (value, other) in shared.items()
            # Integer, quantised, sparse and meta tensors have no real number for each element.
            if other.is_floating_point()
            and (not value.is_floating_point() or value.layout != torch.strided or value.is_meta)
        ],
    }
    if any(problems.values()):
        backbone = network.get_submodule("backbone")
        kind = type(getattr(backbone, "network", backbone)).__name__
        text = ", ".join(f"{len(x)} {name} ({format_keys(x)})" for name, x in problems.items() if x)
        raise CheckpointError(
            f"the weights in {path} do not match {kind}: {text}; if this is a different network, "
            "name it with --backbone"
        )
    state = {
        key: (value.detach().float() if value.is_floating_point() else value.detach()).contiguous()
        for key, value in weights.items()
    }
    backbone_keys = (key for key in state if key.startswith("backbone."))
    if bad_keys := [origin[key] for key in backbone_keys if not state[key].isfinite().all()]:
        raise CheckpointError(
            f"{path} holds weights that are not finite ({format_keys(bad_keys)}): training had "
            "diverged, or the file is corrupt; use an earlier checkpoint"
        )
    return state


def _epochs(content: Any, layout: str) -> float | None:
    """Return the number of epochs trained; None if the meaning of the file's number is unknown."""
    if not isinstance(content, Mapping):
        return None
    epoch, meta = content.get("epoch"), content.get("meta")
    if isinstance(meta, Mapping):  # OpenMMLab's
        epoch = meta.get("epoch")
    elif _LIGHTNING in content:
        epoch = epoch + 1 if isinstance(epoch, int) else None  # it counts from 0
        with contextlib.suppress(LookupError, TypeError):  # unless ``fit`` has ended
            epoch = content["loops"]["fit_loop"]["epoch_progress"]["current"]["ready"]
    elif layout not in AUTHORS:  # torchvision's and timm's trainers count from 0, others vary
        epoch = None
    return float(epoch) if isinstance(epoch, int | float) and 0 <= epoch < 1e9 else None
