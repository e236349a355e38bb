"""Weights in and out: of runs, and in the layouts of other programs."""

from __future__ import annotations

from .export import FORMATS, export_weights
from .pretrained import Input, Pretrained
from .reading import load_pretrained

__all__ = [
    "FORMATS",
    "Input",
    "Pretrained",
    "export_weights",
    "load_pretrained",
]
