"""A program that ends with loaders open: python -m tests.pipelines.left_open KIND PIPELINE DATA ...

Kinds: in the middle of an epoch of training, after one, in the middle of a pass of evaluation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.pipelines import build_eval_loader, build_loader

AUGMENT = AugmentConfig.alike(crop=16)
KINDS = ("training", "trained", "evaluation")
CODE = 7
"""How the program ends."""


def begin(kind: str, pipeline: Any, data: str) -> tuple[object, Iterator[Any]]:
    """Return a loader and what it gives: a loader that nobody holds would be closed by Python."""
    source = DataConfig(data=data, pipeline=pipeline, workers=2)
    loader: Any
    if kind == "evaluation":
        loader = build_eval_loader(source, "train", AUGMENT, resize=20, batch=4)
        batches = iter(loader)
    else:
        loader = build_loader(source, AUGMENT, batch=4)
        batches = loader.epoch(0)
    next(batches)
    if kind == "trained":
        list(batches)
    return loader, batches


if __name__ == "__main__":
    each = iter(sys.argv[1:])
    left = [begin(*arguments) for arguments in zip(each, each, each, strict=True)]
    sys.exit(CODE)
