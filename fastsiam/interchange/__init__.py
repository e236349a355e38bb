"""Weights in and out: of runs, and in the layouts of other programs."""

from __future__ import annotations

from .export import FORMATS, export_weights, exports_of
from .pretrained import Input, Pretrained
from .reading import load_pretrained

__all__ = [
    "FORMATS",
    "Input",
    "Pretrained",
    "export_weights",
    "exports_of",
    "load_pretrained",
]
