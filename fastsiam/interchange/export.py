"""Export of weights in the layouts of other libraries, each with a model card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastsiam
from fastsiam.config import BackboneConfig
from fastsiam.errors import CheckpointError
from fastsiam.files import os_errors_as, require_local
from fastsiam.model.backbones import BLOCKS, skeleton
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.records import Record

from . import weight_files
from .card import model_card, snippet
from .head_weights import HEADS, Head, layers_of
from .layouts import AUTHORS, DETECTRON2, Layout, substitute
from .pretrained import Pretrained

SHARED_RESNETS = (
    *(name for name in BLOCKS if name != "resnet10"),
    *("wide_resnet50_2", "wide_resnet101_2"),
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d"),
)
"""ResNets with the same model name and the same weight names in torchvision and timm."""

_TORCH = (".pt", ".pth", ".pth.tar", ".bin")
_FORMATS = {
    **dict.fromkeys(("plain", "torchvision", "timm"), (".safetensors", *_TORCH)),
    **dict.fromkeys(AUTHORS, _TORCH),
    "detectron2": (".pkl",),
}
"""The accepted file endings of each format."""


def _backbone(pretrained: Pretrained) -> dict[str, Tensor]:
    weights = pretrained.part("backbone")
    return {key.removeprefix("backbone."): value for key, value in weights.items()}


def plain_content(pretrained: Pretrained, file: str) -> dict[str, Any]:
    """Return the content of a plain file: the backbone's weights, loading code, and metadata."""
    model, preprocessing = pretrained.model, pretrained.input
    metadata = {
        "version": fastsiam.__version__,
        "backbone": {"backbone": model.backbone, "stem": model.stem, "width": model.width},
        "epoch": pretrained.epoch,
        "input": preprocessing and asdict(preprocessing),
    }
    code = snippet(pretrained, "plain", file)
    return {"state_dict": _backbone(pretrained), "snippet": code, "fastsiam": metadata}


def _checkpoint(authors: Layout, pretrained: Pretrained) -> dict[str, Any]:
    """Return a checkpoint in the authors' layout, without a momentum encoder."""
    weights: dict[str, Tensor] = {}
    number, replacement = authors.renamed
    for key, value in pretrained.part(*authors.parts).items():
        part, _, rest = key.partition(".")
        name = f"module.{authors.parts[part]}{rest}".replace(number, replacement)
        weights[name] = value
        if name == f"module.{authors.zero_bias}.weight":  # never trained, or cancelled by a BN
            weights[f"module.{authors.zero_bias}.bias"] = torch.zeros(len(value))
    arch = pretrained.model.backbone
    return {"epoch": int(pretrained.epoch or 0), "arch": arch, "state_dict": weights}


def _content(format: str, pretrained: Pretrained, file: str) -> dict[str, Any]:
    if format == "plain":
        return plain_content(pretrained, file)
    if format in AUTHORS:
        return _checkpoint(AUTHORS[format], pretrained)
    weights = _backbone(pretrained)
    if format != "detectron2":
        return weights
    arrays = {
        substitute(key, DETECTRON2): value.numpy()
        for key, value in weights.items()
        if not key.endswith("num_batches_tracked")
    }
    return {"model": arrays, "__author__": "fastsiam", "matching_heuristics": True}


def export_weights(
    pretrained: Pretrained,
    *,
    format: str,
    out: Path,
    results: Sequence[Record] = (),
    force: bool = False,
) -> list[Path]:
    """Export weights for another library, with a model card next to them.

    Args:
        pretrained: the network to export.
        format: ``plain``: the backbone's state dict with Python code that rebuilds the network,
            for any network; ``torchvision`` and ``timm``: a state dict that their model without
            classifier loads with ``strict=True``; ``simsiam``, ``moco`` and ``swav``: a checkpoint
            in their authors' layout; ``detectron2``: a pickle of numpy arrays.
        out: file to write. It must end in ``.safetensors`` or torch's ``.pt``, ``.pth``,
            ``.pth.tar`` or ``.bin``; for the authors' formats in one of torch's endings, for
            detectron2 in ``.pkl``. The card's name is this name with ``.md`` appended.
        results: evaluations of these exact weights, for the card.
        force: overwrite existing files.

    Returns:
        The files written.

    Raises:
        ValueError: the format is unknown, or it does not support the file's ending.
        CheckpointError: the format does not support the network, or a file cannot be written: it
            exists already, is the source of the weights, or is in a run's checkpoint folder.
        FastSiamError: the target is not a local path.
    """
    if format not in _FORMATS:
        raise ValueError(f"unknown format {format!r}; there are {', '.join(_FORMATS)}")
    endings = _FORMATS[format]
    if not out.name.endswith(endings):
        raise ValueError(f"{out}: files of format {format} must end in {', '.join(endings)}")
    card = out.with_name(f"{out.name}.md")
    for target in (out, card):
        _check_target(target, pretrained.path, force=force)
    reasons = unsupported_formats(pretrained)
    if reasons[format]:
        possible = " or ".join(f"--format {name}" for name, reason in reasons.items() if not reason)
        raise CheckpointError(
            f"cannot write {pretrained.path} as {format} ({reasons[format]}): use {possible}"
        )
    pretrained = replace(pretrained, model=_rename_backbone(format, pretrained.model))
    content = _content(format, pretrained, out.name)
    text = model_card(pretrained, format=format, file=out.name, results=results)
    weight_files.write(out, content)
    weight_files.write(card, text)
    return [out, card]


def unsupported_formats(pretrained: Pretrained) -> dict[str, str]:
    """Return for each format a short reason why it does not support a network; "" if it does."""
    reasons = {}
    for name in _FORMATS:
        reasons[name] = _find_backbone_problem(name, _rename_backbone(name, pretrained.model))
        if name in AUTHORS and not reasons[name]:
            reasons[name] = _find_heads_problem(AUTHORS[name], pretrained)
    return reasons


def _find_backbone_problem(format: str, model: BackboneConfig) -> str:
    name, width, of_timm = model.backbone, model.width, model.backbone.startswith("timm/")
    if format == "plain" or (format == "timm" and of_timm):
        return ""
    if format == "torchvision" and of_timm:
        return "a timm network"
    if format == "swav" and (name != "resnet50" or width not in (64, 128, 256, 320)):
        return "its authors have only ResNet-50, at 1, 2, 4 or 5 times the width"
    if format != "torchvision":
        if name not in SHARED_RESNETS or (format == "detectron2" and name not in BLOCKS):
            return f"not for {name}: only for ResNets whose weights have the same names"
        if model.stem != "imagenet":
            return f"{model.stem} stem"
    if width != 64 and format != "swav":
        return f"width {width}: {format}'s ResNets are 64 wide"
    return ""


def _find_heads_problem(authors: Layout, pretrained: Pretrained) -> str:
    state, method = pretrained.state, pretrained.method
    if method and authors.method and not issubclass(method, authors.method):
        return f"the heads of {method.title}"
    for part in (*HEADS, "prototypes"):
        present = any(key.startswith(f"{part}.") for key in state)
        if present != (part in authors.parts):
            return f"the authors have no {part}" if present else f"no {part}"
    for part, expected in authors.heads.items():
        if not layers_of(state, part):
            return f"a {part} whose layers are not numbered"
        head = Head.of(state, part)
        if expected.widths[0] == 0 and head.widths[0] != skeleton(pretrained.model).features:
            return f"a {part} of width {head.widths[0]}: the authors' has the features' width"
        if head.norms != expected.norms or len(head.widths) != len(expected.widths):
            return f"a {part} with different layers or BN than the authors'"
    return ""


def _check_target(target: Path, source: Path, *, force: bool) -> None:
    """Raise if the target is no local path, is the source, is in a checkpoint folder, or exists.

    With ``force`` it may exist.
    """
    require_local(target)
    with os_errors_as(CheckpointError, f"cannot write {target}"):
        if target.exists() and source.exists() and target.samefile(source):
            raise CheckpointError(f"{target} is the source of the weights: choose another file")
        folder = target.resolve().parent
        last = checkpoints.last(folder.parent)
        if last.parent == folder and last.is_file():
            raise CheckpointError(f"{folder} holds a run's checkpoints: choose another folder")
        if target.exists() and not force:
            raise CheckpointError(f"{target} already exists: choose another, or pass --force")


def _rename_backbone(format: str, model: BackboneConfig) -> BackboneConfig:
    """Remove ``timm/`` from the name of a shared ResNet, unless the format is plain or timm."""
    name = model.backbone.removeprefix("timm/")
    if format in ("plain", "timm") or name not in SHARED_RESNETS:
        return model
    return replace(model, backbone=name)
