"""Weights in the layouts of other programs, each with a model card beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fastsiam.config import MethodConfig, MoCoV2Config, ModelConfig, SimSiamConfig, SwAVConfig
from fastsiam.errors import CheckpointError
from fastsiam.files import explained
from fastsiam.methods import MoCoV2, SimSiam, SwAV
from fastsiam.model.backbones import BLOCKS, skeleton
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.records import Record

from . import plain, weight_files
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
    """As the authors write it: section 3's heads, the projector in place of ``fc``."""
    theirs = {"backbone": "encoder.", "projector": "encoder.fc.", "predictor": "predictor."}
    content = _checkpoint(pretrained, theirs)
    # Never trained there, and taken away by the BN after it.
    _add_bias(content["state_dict"], "module.encoder.fc.6")
    return content


def _moco(pretrained: Pretrained, file: str) -> dict[str, Any]:
    """As the authors write it, without the momentum encoder and the queue."""
    theirs = {"backbone": "encoder_q.", "projector": "encoder_q.fc."}
    content = _checkpoint(pretrained, theirs)
    second = "module.encoder_q.fc.3."  # there is no BN to be counted there
    content["state_dict"] = {
        key.replace(second, "module.encoder_q.fc.2."): value
        for key, value in content["state_dict"].items()
    }
    return content


def _swav(pretrained: Pretrained, file: str) -> dict[str, Any]:
    """As the authors write it: head and prototypes beside the ResNet's layers."""
    theirs = {"backbone": "", "projector": "projection_head.", "prototypes": "prototypes."}
    content = _checkpoint(pretrained, theirs)
    _add_bias(content["state_dict"], "module.projection_head.0")
    return content


def _checkpoint(pretrained: Pretrained, theirs: Mapping[str, str]) -> dict[str, Any]:
    """Return a checkpoint as all these authors write one, by the names that parts have there."""
    weights = {}
    for key, value in pretrained.part(*theirs).items():
        part, _, rest = key.partition(".")
        weights[f"module.{theirs[part]}{rest}"] = value
    arch = pretrained.model.backbone
    return {"epoch": int(pretrained.epoch or 0), "arch": arch, "state_dict": weights}


def _add_bias(weights: dict[str, torch.Tensor], layer: str) -> None:
    """Give a layer before a BN the bias that it has there, and has not with us."""
    if f"{layer}.weight" in weights:
        weights[f"{layer}.bias"] = torch.zeros(len(weights[f"{layer}.weight"]))


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
    if heads.predictor == "none":
        return "no predictor"
    if heads.head_bn != "default":
        return f"head-bn {heads.head_bn}: the authors' heads are those of default"
    if heads.output_affine:
        return "a scale and offset of the projector's output BN: the authors' has none"
    if heads.projector_layers != 3:
        return f"a projector of {heads.projector_layers} layers: the authors' has 3"
    hidden, features = heads.projector_dim or heads.dim, skeleton(model).features
    if hidden != features:
        return f"a projector {hidden} wide: the authors' is as wide as the features, {features}"
    return ""


def _against_moco(model: ModelConfig) -> str:
    if against := _against_a_standard_resnet(model):
        return against
    head = model.method
    if not isinstance(head, MoCoV2Config):
        return f"the heads of {head.title}"
    if head.projector_layers != 2:
        return f"a projector of {head.projector_layers} layers: the authors' has 2"
    features = skeleton(model).features
    if head.projector_dim != features:
        wide = head.projector_dim
        return f"a projector {wide} wide: the authors' is as wide as the features, {features}"
    return ""


def _against_swav(model: ModelConfig) -> str:
    if model.backbone != "resnet50" or model.width not in (64, 128, 256, 320):
        return "its authors have ResNet-50 alone, 1, 2, 4 or 5 times as wide"
    if model.stem != "imagenet":
        return f"{model.stem} stem"
    head = model.method
    if not isinstance(head, SwAVConfig):
        return f"the heads of {head.title}"
    if head.predictor != "none":
        return "a predictor: the authors have none"
    layers = head.projector_layers
    return "" if layers == 2 else f"a projector of {layers} layers: the authors' has 2"


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
    method: type[MethodConfig] = MethodConfig
    """Whose heads it holds; a format of the backbone alone is of all."""


_FORMATS = {
    "plain": _Format(_plain, _against_nothing, (".safetensors", *_TORCH)),
    "torchvision": _Format(_state_dict, _against_torchvision, (".safetensors", *_TORCH)),
    "timm": _Format(_state_dict, _against_timm, (".safetensors", *_TORCH)),
    "simsiam": _Format(_simsiam, _against_simsiam, _TORCH, SimSiam.parts, SimSiamConfig),
    "moco": _Format(_moco, _against_moco, _TORCH, MoCoV2.parts, MoCoV2Config),
    "swav": _Format(_swav, _against_swav, _TORCH, SwAV.parts, SwAVConfig),
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
            strictly; ``simsiam``, ``moco`` and ``swav``: a checkpoint as their authors write it;
            ``detectron2``: a pickle of numpy arrays.
        out: ``.safetensors`` or torch's ``.pt``, ``.pth``, ``.pth.tar``, ``.bin``; the authors'
            formats: one of torch's; detectron2: ``.pkl``. The card has its name with ``.md``
            behind.
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
    writer = {".safetensors": weight_files.write_safetensors, ".pkl": weight_files.write_pickle}
    weight_files.write(out, content, writer.get(ending, weight_files.write_torch))
    weight_files.write(card, text, weight_files.write_text)
    return [out, card]


def refusals(model: ModelConfig) -> dict[str, str]:
    """Return for each format why it cannot hold a network, in a few words; empty if it can.

    Raises:
        ValueError, BackendError: there is no such network, or timm is not installed.
    """
    called = {name: _as_called_in(name, model) for name in FORMATS}
    return {name: kind.against(called[name]) for name, kind in _FORMATS.items()}


def exports_of(model: ModelConfig) -> str:
    """Say in a line what a network can be exported as, and as what not and why.

    Formats of other methods' authors are left out.
    """
    why = {
        format: reason
        for format, reason in refusals(model).items()
        if isinstance(model.method, _FORMATS[format].method)
    }
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
        lacking = [part for part in kind.parts if not pretrained.has(part)]
        if lacking and isinstance(pretrained.model.method, kind.method):
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
