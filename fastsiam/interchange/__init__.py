"""Import and export of weights: fastsiam's checkpoints, and the layouts of other libraries."""

from __future__ import annotations

from .export import export_weights
from .pretrained import Input, Pretrained
from .reading import load_pretrained

__all__ = [
    "Input",
    "Pretrained",
    "export_weights",
    "load_pretrained",
]
