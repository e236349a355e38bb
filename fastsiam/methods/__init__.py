"""Self-supervised methods, one module each; ``Method`` is their common interface."""

from __future__ import annotations

from functools import cache
from pkgutil import resolve_name

import torch
from torch import Tensor

from fastsiam.config import ModelConfig
from fastsiam.model.backbones import Backbone, build_backbone, skeleton

from .base import Method as Method
from .base import Moment as Moment
from .base import Output as Output
from .base import ParamGroup as ParamGroup
from .base import Schedule as Schedule


def build_method(config: ModelConfig, *, images: int = 0) -> Method:
    """Build a method with a randomly initialised backbone, on the CPU.

    Call ``torch.manual_seed`` first for reproducible weights.

    Args:
        config: names the backbone and the method.
        images: number of images in the data set, for methods that store one row per image.

    Raises:
        ValueError, BackendError: as ``build_backbone``.
    """
    return _build(config, build_backbone(config), images)


def method_skeleton(config: ModelConfig, *, images: int = 0) -> Method:
    """Build a method on the meta device: parameter names and shapes, without memory.

    Raises:
        ValueError, BackendError: as ``build_backbone``.
    """
    backbone = skeleton(config)
    with torch.device("meta"):
        return _build(config, backbone, images)


@cache
def image_rows(config: ModelConfig) -> dict[str, Tensor]:
    """Return a sample row of each buffer that has one row per image, by buffer name.

    These are the buffers whose shape depends on the number of images. The sample rows have shape
    (1, ...) and are on the meta device.

    Raises:
        ValueError, BackendError: as ``build_backbone``.
    """
    one, two = (dict(method_skeleton(config, images=n).named_buffers()) for n in (1, 2))
    return {name: row for name, row in one.items() if row.shape != two[name].shape}


def _build(config: ModelConfig, backbone: Backbone, images: int) -> Method:
    build = resolve_name(config.method.builder)
    method: Method = build(config.method, backbone, images=images)
    return method
