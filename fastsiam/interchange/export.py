"""Weights in the layouts of other programs, each with a model card beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fastsiam import checkpoint as checkpoints
from fastsiam.config import ModelConfig, SimSiamConfig
from fastsiam.errors import CheckpointError
from fastsiam.evaluate.records import Record
from fastsiam.files import explained
from fastsiam.methods import SimSiam
from fastsiam.model.backbones import BLOCKS, skeleton

from . import files, plain
from .card import model_card
from .layouts import to_detectron2
from .loading import snippet
from .pretrained import Pretrained

SHARED_RESNETS = (
    *(name for name in BLOCKS if name != "resnet10"),
    *("wide_resnet50_2", "wide_resnet101_2"),
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d"),
)
"""ResNets that torchvision and timm have by the same names, with the same names of weights."""

_TORCH = (".pt", ".pth", ".pth.tar", ".bin")


def _plain(pretrained: Pretrained, file: str) -> dict[str, Any]:
    return plain.content(pretrained, _backbone(pretrained), snippet(pretrained, "plain", file))


def _state_dict(pretrained: Pretrained, file: str) -> dict[str, Any]:
    return _backbone(pretrained)


def _simsiam(pretrained: Pretrained, file: str) -> dict[str, Any]:
    """As the authors write it: section 3's heads, the projector in the place of ``fc``."""
    new = {"backbone": "encoder", "projector": "encoder.fc", "predictor": "predictor"}
    weights = {}
    for key, value in pretrained.part(*SimSiam.parts).items():
        part, _, rest = key.partition(".")
        weights[f"module.{new[part]}.{rest}"] = value
        if key == "projector.6.weight":  # never trained there, and taken away by the BN after it
            weights["module.encoder.fc.6.bias"] = torch.zeros(len(value))
    arch = pretrained.model.backbone
    return {"epoch": int(pretrained.epoch or 0), "arch": arch, "state_dict": weights}


def _detectron2(pretrained: Pretrained, file: str) -> dict[str, Any]:
    weights = {
        to_detectron2(key): value.numpy()
        for key, value in _backbone(pretrained).items()
        if not key.endswith("num_batches_tracked")
    }
    return {"model": weights, "__author__": "fastsiam", "matching_heuristics": True}


def _against_nothing(model: ModelConfig) -> str:
    return ""


def _against_torchvision(model: ModelConfig) -> str:
    if model.backbone.startswith("timm/"):
        return "it is timm's network"
    return "" if model.width == 64 else f"width {model.width}: torchvision's ResNets are 64 wide"


def _against_timm(model: ModelConfig) -> str:
    return "" if model.backbone.startswith("timm/") else _against_a_standard_resnet(model)


def _against_simsiam(model: ModelConfig) -> str:
    if against := _against_a_standard_resnet(model):
        return against
    heads = model.method
    if not isinstance(heads, SimSiamConfig):
        return f"the heads of {heads.title}"
    if heads.projector_layers != 3:
        return f"a projector of {heads.projector_layers} layers: the authors' has 3"
    hidden, features = heads.projector_dim or heads.dim, skeleton(model).features
    if hidden != features:
        return f"a projector {hidden} wide: the authors' is as wide as the features, {features}"
    return ""


def _against_detectron2(model: ModelConfig) -> str:
    known = model.backbone in BLOCKS
    return _against_a_standard_resnet(model) if known else f"no {model.backbone} there"


def _against_a_standard_resnet(model: ModelConfig) -> str:
    if model.backbone not in SHARED_RESNETS:
        return f"no {model.backbone} there"
    if model.stem != "imagenet":
        return f"{model.stem} stem"
    return "" if model.width == 64 else f"width {model.width}: its ResNets are 64 wide"


@dataclass(frozen=True, slots=True)
class _Format:
    content: Callable[[Pretrained, str], dict[str, Any]]
    """What the file of that name holds."""
    against: Callable[[ModelConfig], str]
    """Why it cannot hold a network, in a few words; empty if it can."""
    endings: tuple[str, ...]
    parts: tuple[str, ...] = ("backbone",)


_FORMATS = {
    "plain": _Format(_plain, _against_nothing, (".safetensors", *_TORCH)),
    "torchvision": _Format(_state_dict, _against_torchvision, (".safetensors", *_TORCH)),
    "timm": _Format(_state_dict, _against_timm, (".safetensors", *_TORCH)),
    "simsiam": _Format(_simsiam, _against_simsiam, _TORCH, SimSiam.parts),
    "detectron2": _Format(_detectron2, _against_detectron2, (".pkl",)),
}
FORMATS = tuple(_FORMATS)
"""Layouts that weights can be written in."""


def export_weights(
    pretrained: Pretrained,
    *,
    format: str,
    out: Path,
    results: Sequence[Record] = (),
    force: bool = False,
) -> list[Path]:
    """Write weights as another program reads them, and a model card beside them.

    Args:
        pretrained: what is written.
        format: ``plain``: the backbone's state dict, with Python that rebuilds it, of any network;
            ``torchvision`` and ``timm``: a state dict that their network without classifier loads
            strictly; ``simsiam``: a checkpoint as the paper's authors write it; ``detectron2``: a
            pickle of numpy arrays.
        out: ``.safetensors`` or torch's ``.pt``, ``.pth``, ``.pth.tar``, ``.bin``; simsiam: one of
            torch's; detectron2: ``.pkl``. The card has its name with ``.md`` behind.
        results: evaluations of these very weights, for the card.
        force: overwrite files that are there.

    Returns:
        The files written.

    Raises:
        ValueError: no such format, or the file's ending is not one of its endings.
        CheckpointError: the format cannot hold the network, or the files cannot be written: they
            are there already, or their place is that of a run's checkpoints or of the source.
    """
    if format not in _FORMATS:
        raise ValueError(f"unknown format {format!r}; there are {', '.join(FORMATS)}")
    endings = _FORMATS[format].endings
    ending = next((x for x in sorted(endings, key=len)[::-1] if out.name.endswith(x)), "")
    if not ending:
        raise ValueError(f"{out}: a file of format {format} ends in {', '.join(endings)}")
    card = out.with_name(f"{out.name}.md")
    for target in (out, card):
        _check_target(target, pretrained.path, force=force)
    _require_room(pretrained, format)
    pretrained = replace(pretrained, model=_as_called_in(format, pretrained.model))
    content = _FORMATS[format].content(pretrained, out.name)
    text = model_card(pretrained, format=format, file=out.name, results=results)
    writer = {".safetensors": files.write_safetensors, ".pkl": files.write_pickle}
    files.write(out, content, writer.get(ending, files.write_torch))
    files.write(card, text, files.write_text)
    return [out, card]


def refusals(model: ModelConfig) -> dict[str, str]:
    """Return for each format why it cannot hold a network, in a few words; empty if it can.

    Raises:
        ValueError, BackendError: there is no such network, or timm is not installed.
    """
    called = {name: _as_called_in(name, model) for name in FORMATS}
    return {name: kind.against(called[name]) for name, kind in _FORMATS.items()}


def exports_of(model: ModelConfig) -> str:
    """Say in a line what a network can be exported as, and as what not and why."""
    why = refusals(model)
    reasons: dict[str, list[str]] = {}
    for format, reason in why.items():
        reasons.setdefault(reason, []).append(format)
    line = f"exports: {', '.join(reasons.pop(''))}"
    refused = [f"{', '.join(formats)} ({reason})" for reason, formats in reasons.items()]
    return f"{line}; not {', '.join(refused)}" if refused else line


def _require_room(pretrained: Pretrained, format: str) -> None:
    """Refuse a format that cannot hold the network.

    Raises:
        CheckpointError: says why, and which formats can.
    """
    why = refusals(pretrained.model)
    for name, kind in _FORMATS.items():
        if lacking := [part for part in kind.parts if not pretrained.has(part)]:
            why[name] = f"no {lacking[0]} in the file"
    if why[format]:
        possible = " or ".join(f"--format {name}" for name, reason in why.items() if not reason)
        raise CheckpointError(
            f"cannot write {pretrained.path} as {format} ({why[format]}): use {possible}"
        )


def _check_target(target: Path, source: Path, *, force: bool) -> None:
    """Refuse to write over what is not ours to destroy."""
    with explained(CheckpointError, f"cannot write {target}"):
        there = target.exists()
        same = there and source.exists() and target.samefile(source)
        folder = target.resolve().parent
        last = checkpoints.last(folder.parent)
        of_a_run = last.parent == folder and last.is_file()
    if same:
        raise CheckpointError(f"{target} is the file that the weights come from: choose another")
    if of_a_run:
        raise CheckpointError(f"{folder} holds a run's checkpoints: choose another folder")
    if there and not force:
        raise CheckpointError(f"{target} is there already: choose another, or give --force")


def _as_called_in(format: str, model: ModelConfig) -> ModelConfig:
    """Call a ResNet of timm's that others have too as they do."""
    name = model.backbone.removeprefix("timm/")
    if format in ("plain", "timm") or name not in SHARED_RESNETS:
        return model
    return replace(model, backbone=name)


def _backbone(pretrained: Pretrained) -> dict[str, torch.Tensor]:
    weights = pretrained.part("backbone")
    return {key.removeprefix("backbone."): value for key, value in weights.items()}
