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


def begin(kind: str, pipeline: Any, data: str) -> Iterator[Any]:
    source = DataConfig(data=data, pipeline=pipeline, workers=2)
    if kind == "evaluation":
        batches: Iterator[Any] = iter(
            build_eval_loader(source, "train", AUGMENT, resize=20, batch=4)
        )
    else:
        batches = iter(build_loader(source, AUGMENT, batch=4).epoch(0))
    next(batches)
    if kind == "trained":
        list(batches)
    return batches


if __name__ == "__main__":
    each = iter(sys.argv[1:])
    left = [begin(*arguments) for arguments in zip(each, each, each, strict=True)]
    sys.exit(CODE)
