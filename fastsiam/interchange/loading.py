"""How exported weights are loaded: code for model cards and plain files, run by the tests."""

from __future__ import annotations

from fastsiam.config import BackboneConfig
from fastsiam.config.views import IMAGENET_MEAN, IMAGENET_STD
from fastsiam.model.backbones import skeleton

from .layouts import AUTHORS
from .pretrained import Pretrained

_PADDING = {"cifar": 1, "cifar-pad2": 2, "cifar-no-relu": 1}


def snippet(pretrained: Pretrained, format: str, file: str) -> str:
    """Return Python that builds the encoder, loads it, and is run in the file's folder.

    Args:
        pretrained: the weights.
        format: the layout of their file: torchvision, timm, plain, or that of a method's authors.
        file: its name.
    """
    model, load = pretrained.model, f'torch.load("{file}", map_location="cpu", weights_only=True)'
    imports, built = _timms(model) if format == "timm" else _built(model)
    if file.endswith(".safetensors"):
        load = f'load_file("{file}")'
        imports = ["from safetensors.torch import load_file", *imports]
    elif format == "plain" or format in AUTHORS:
        load += '["state_dict"]'
    if format in AUTHORS:
        prefix, *others = (f"module.{start}" for start in AUTHORS[format].parts.values())
        starts = dict.fromkeys(
            other.removeprefix(prefix) if other.startswith(prefix) else "module."
            for other in others
        )
        listed = ", ".join(f'"{start}"' for start in starts) + ("," if len(starts) == 1 else "")
        loaded = [
            f"state = {load}",
            f'state = {{k.removeprefix("{prefix}"): v for k, v in state.items()}}',
            f"state = {{k: v for k, v in state.items() if not k.startswith(({listed}))}}",
            "model.load_state_dict(state)",
        ]
    else:
        loaded = [f"model.load_state_dict({load})"]
    end = f"model.eval()  # (N, 3, S, S) to (N, {skeleton(model).features})"
    return "\n".join(["import torch", *imports, "", *built, *loaded, end])


def _built(model: BackboneConfig) -> tuple[list[str], list[str]]:
    """Return imports and lines that build the network, by the library that has it.

    ResNets of another width than 64 are fastsiam's alone.
    """
    if model.backbone.startswith("timm/"):
        return _timms(model)
    if model.width == 64:
        return _torchvisions(model)
    network = f'ResNet("{model.backbone}", stem="{model.stem}", width={model.width})'
    return ["from fastsiam.model.backbones import ResNet"], [f"model = {network}"]


def _timms(model: BackboneConfig) -> tuple[list[str], list[str]]:
    name = model.backbone.removeprefix("timm/")
    return ["import timm"], [f'model = timm.create_model("{name}", num_classes=0)']


def _torchvisions(model: BackboneConfig) -> tuple[list[str], list[str]]:
    imports = ["import torchvision"]
    lines = [f'model = torchvision.models.get_model("{model.backbone}")']
    if model.backbone == "resnet10":
        imports = ["from torchvision.models.resnet import BasicBlock, ResNet"]
        lines = ["model = ResNet(BasicBlock, [1, 1, 1, 1])"]
    if model.stem != "imagenet":
        padding = _PADDING[model.stem]
        lines += [
            f"model.conv1 = torch.nn.Conv2d(3, 64, 3, padding={padding}, bias=False)",
            "model.maxpool = torch.nn.Identity()",
        ]
    if model.stem == "cifar-no-relu":
        lines.append("model.relu = torch.nn.Identity()")
    classifier = skeleton(model).classifier
    return imports, [*lines, f'model.set_submodule("{classifier}", torch.nn.Identity())']


def normalisation(pretrained: Pretrained) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel; ImageNet's, where nothing is known."""
    seen = pretrained.input
    return (seen.mean, seen.std) if seen else (IMAGENET_MEAN, IMAGENET_STD)
