"""Weights in and out: of our runs, and in the layouts of other programs."""

from __future__ import annotations

from .export import FORMATS, export_weights
from .recognise import Pretrained, load_pretrained

__all__ = ["FORMATS", "Pretrained", "export_weights", "load_pretrained"]
