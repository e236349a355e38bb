"""Masks between COCO's ways to write them and arrays of pixels, by pycocotools."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import BackendError

from .dataset import Segmentation


def coco_tools(name: str) -> ModuleType:
    """Import a module of pycocotools: "mask", "coco" or "cocoeval".

    Raises:
        BackendError: the package is missing, or does not work; says what to install.
    """
    try:
        import importlib

        return importlib.import_module(f"pycocotools.{name}")
    except ImportError as error:
        raise BackendError(
            f"COCO's masks and average precision take pycocotools ({error}): "
            "pip install 'fastsiam[detection]'"
        ) from error


def run_lengths(mask: Segmentation, height: int, width: int) -> dict[str, Any]:
    """Return a mask as compressed run lengths: {"size": [height, width], "counts": bytes}.

    Args:
        mask: polygons, which are joined, or run lengths of either kind.
        height: of the image, in pixels.
        width: of the image, in pixels.

    Raises:
        BackendError: pycocotools is missing.
    """
    tools = coco_tools("mask")
    if isinstance(mask, list):
        found: dict[str, Any] = tools.merge(tools.frPyObjects(mask, height, width))
        return found
    if isinstance(mask["counts"], list):
        found = tools.frPyObjects(mask, height, width)
        return found
    return mask


def pixels(mask: Segmentation, height: int, width: int) -> NDArray[np.bool_]:
    """Return which of an image's pixels a mask covers: (height, width).

    Raises:
        BackendError: pycocotools is missing.
    """
    tools = coco_tools("mask")
    found: NDArray[np.bool_] = tools.decode(run_lengths(mask, height, width)).astype(bool)
    return found


def from_pixels(covered: NDArray[np.bool_]) -> dict[str, Any]:
    """Return the run lengths of a mask of (height, width) pixels, as detections have them.

    Raises:
        BackendError: pycocotools is missing.
    """
    found: dict[str, Any] = coco_tools("mask").encode(np.asfortranarray(covered, np.uint8))
    return found
