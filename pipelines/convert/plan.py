"""What a conversion is to make: of which images, and how they are treated.

The plan is noted in the journal and in the finished file. By it an earlier try is gone on with, and
a file that is there already is taken for done, only if it is of the same images and options.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import ConvertConfig
from fastsiam.errors import DataError

from ..store import BetonStore, Store

_FORMAT = 3
"""Another number starts half-finished files anew. From 3 on gray JPEGs keep their bytes."""
_HOW: dict[str, Any] = {"parts": 0, "engine": "local", "scheduler": ""}
_COLUMNS: dict[str, Any] = {"image_column": "", "label_column": ""}
"""What they change is in the store's stamp and labels."""
_ANYWHERE: dict[str, Any] = {
    "source": "", "out": "", "skip_bad": False, "workers": -1, **_COLUMNS, **_HOW,
}  # fmt: skip
"""Options that have no part in what a finished file holds: one value stands for all others."""
_LATER: dict[str, Any] = {
    "exif": "ignore", "alpha": "drop", **_COLUMNS, **_HOW,
}  # fmt: skip
"""Options that earlier versions had not: at these values, what they made is the same."""


def planned(store: Store, indices: NDArray[np.int64], config: ConvertConfig) -> dict[str, Any]:
    """Describe what is written; equal only for the same images and the same treatment.

    Args:
        store: where the images come from.
        indices: (images,) which of them.
        config: what becomes of them.
    """
    images = [store.stamp(), store.classes, zlib.crc32(store.labels.tobytes())]
    return {
        "format": _FORMAT,
        "options": _options(replace(config, **_ANYWHERE)),
        "source": hashlib.sha256(json.dumps(images).encode()).hexdigest(),
        "images": zlib.crc32(indices.tobytes()),
    }


def of_one_set(plan: dict[str, Any], config: ConvertConfig) -> str:
    """Return a text that all parts of one conversion share, and no others."""
    options = _options(replace(config, part="", **_ANYWHERE))
    return hashlib.sha256(json.dumps([plan["source"], options]).encode()).hexdigest()


def _options(config: ConvertConfig) -> dict[str, Any]:
    options = asdict(config)
    return {k: v for k, v in options.items() if k not in _LATER or v != _LATER[k]}


def finished(path: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Return what is noted in a file that is there already.

    Raises:
        DataError: the file is damaged, or was made by another plan.
    """
    try:
        about = BetonStore(path).about
    except DataError as error:
        raise DataError(f"{error}; delete it first, or choose another --out") from error
    known = about.get("plan", {})
    if {**known, "format": _FORMAT} == plan:  # what an earlier version finished is as good
        return about
    ours, theirs = (_LATER | own.get("options", {}) for own in (plan, known))
    others = [f"--{k.replace('_', '-')}" for k in ours if k in theirs and ours[k] != theirs[k]]
    what = (
        f"with another {', '.join(others)}"
        if others
        else "of other images, or of files with other times"
    )
    raise DataError(f"{path} exists already and was made {what}; delete it or choose another --out")
