"""Weights in the layouts of other programs, each with a model card beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fastsiam import checkpoint as checkpoints
from fastsiam.config import SimSiamConfig
from fastsiam.errors import CheckpointError
from fastsiam.evaluate.records import Record
from fastsiam.files import explained
from fastsiam.methods import SimSiam
from fastsiam.model.backbones import BLOCKS

from . import files
from .card import model_card
from .layouts import to_detectron2
from .recognise import Pretrained

SHARED_RESNETS = (
    *(name for name in BLOCKS if name != "resnet10"),
    *("wide_resnet50_2", "wide_resnet101_2"),
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d"),
)
"""ResNets that torchvision and timm have by the same names, with the same names of weights."""

_TORCH = (".pt", ".pth", ".pth.tar", ".bin")


def _torchvision(pretrained: Pretrained) -> dict[str, Any]:
    model = pretrained.model
    if model.backbone.startswith("timm/"):
        raise _refused(pretrained, "torchvision", "is timm's network: use --format timm")
    if model.width != 64:
        raise _refused(pretrained, "torchvision", f"is {model.width} channels wide, theirs are 64")
    return _backbone(pretrained)


def _timm(pretrained: Pretrained) -> dict[str, Any]:
    model = pretrained.model
    if model.backbone.startswith("timm/"):
        return _backbone(pretrained)
    _require_standard_resnet(pretrained, "timm")
    return _backbone(pretrained)


def _simsiam(pretrained: Pretrained) -> dict[str, Any]:
    """As the authors write it: section 3's heads, the projector in the place of ``fc``."""
    model = pretrained.model
    _require_standard_resnet(pretrained, "simsiam")
    if not isinstance(model.method, SimSiamConfig):
        raise _refused(pretrained, "simsiam", f"is {model.method.title}'s, with other heads")
    state = pretrained.part(*SimSiam.parts)
    hidden, features = state["projector.0.weight"].shape
    layers = sum(key.startswith("projector.") and value.dim() == 2 for key, value in state.items())
    if layers != 3 or hidden != features:
        raise _refused(
            pretrained,
            "simsiam",
            f"has a projector of {layers} layers, {hidden} wide; theirs has 3, as "
            f"wide as the features ({features})",
        )
    new = {"backbone": "encoder", "projector": "encoder.fc", "predictor": "predictor"}
    weights = {}
    for key, value in state.items():
        part, _, rest = key.partition(".")
        weights[f"module.{new[part]}.{rest}"] = value
        if key == "projector.6.weight":  # never trained there, and taken away by the BN after it
            weights["module.encoder.fc.6.bias"] = torch.zeros(len(value))
    return {"epoch": int(pretrained.epoch or 0), "arch": model.backbone, "state_dict": weights}


def _detectron2(pretrained: Pretrained) -> dict[str, Any]:
    if pretrained.model.backbone not in BLOCKS:
        raise _refused(pretrained, "detectron2", "is none of its ResNets")
    _require_standard_resnet(pretrained, "detectron2")
    weights = {
        to_detectron2(key): value.numpy()
        for key, value in _backbone(pretrained).items()
        if not key.endswith("num_batches_tracked")
    }
    return {"model": weights, "__author__": "fastsiam", "matching_heuristics": True}


@dataclass(frozen=True, slots=True)
class _Format:
    content: Callable[[Pretrained], dict[str, Any]]
    endings: tuple[str, ...]


_FORMATS = {
    "torchvision": _Format(_torchvision, (".safetensors", *_TORCH)),
    "timm": _Format(_timm, (".safetensors", *_TORCH)),
    "simsiam": _Format(_simsiam, _TORCH),
    "detectron2": _Format(_detectron2, (".pkl",)),
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
        format: ``torchvision`` and ``timm``: a state dict that their network without classifier
            loads strictly; ``simsiam``: a checkpoint as the paper's authors write it;
            ``detectron2``: a pickle of numpy arrays.
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
    if format != "timm":
        pretrained = _under_its_shared_name(pretrained)
    content = _FORMATS[format].content(pretrained)
    text = model_card(pretrained, format=format, file=out.name, results=results)
    writer = {".safetensors": files.write_safetensors, ".pkl": files.write_pickle}
    files.write(out, content, writer.get(ending, files.write_torch))
    files.write(card, text, files.write_text)
    return [out, card]


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


def _under_its_shared_name(pretrained: Pretrained) -> Pretrained:
    """Call a ResNet of timm's that others have too as they do."""
    name = pretrained.model.backbone.removeprefix("timm/")
    if name not in SHARED_RESNETS:
        return pretrained
    return replace(pretrained, model=replace(pretrained.model, backbone=name))


def _backbone(pretrained: Pretrained) -> dict[str, torch.Tensor]:
    weights = pretrained.part("backbone")
    return {key.removeprefix("backbone."): value for key, value in weights.items()}


def _require_standard_resnet(pretrained: Pretrained, format: str) -> None:
    model = pretrained.model
    if model.backbone not in SHARED_RESNETS:
        raise _refused(pretrained, format, f"is {model.backbone}, which it does not have")
    if model.stem != "imagenet" or model.width != 64:
        raise _refused(
            pretrained,
            format,
            f"has the {model.stem} stem and width {model.width}; ResNets there have the imagenet "
            "stem and width 64",
        )


def _refused(pretrained: Pretrained, format: str, reason: str) -> CheckpointError:
    return CheckpointError(f"cannot write {pretrained.path} as {format}: it {reason}")
