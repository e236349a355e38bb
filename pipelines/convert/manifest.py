"""Metadata of converted files: the plan, the description, and manifest.json.

The plan identifies the images and options of a conversion. It is stored in the journal and in the
finished file. A conversion resumes, or accepts an existing file, only if the plans are equal.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fastsiam
from fastsiam.config import ConvertConfig
from fastsiam.errors import DataError
from fastsiam.files import atomic_write, os_errors_as, parse_json

from ..store import BetonStore, Store
from ..store.beton import RAW
from .journal import Block

_FORMAT = 3
"""Increment it to make unfinished conversions start over. Since 3, gray JPEGs keep their bytes."""
_ADDED_LATER = {"exif", "alpha", "image_column", "label_column", "parts", "scheduler"}
"""Options added after the first version. Plans omit them at their defaults, so old plans match."""
_WITHOUT_EFFECT = ("source", "out", "skip_bad", "workers", "parts", "scheduler",
                   "image_column", "label_column")  # fmt: skip
"""Options that do not change the file. Columns do, but the store's stamp and labels cover them."""
_SIDES = (32, 64, 128, 224, 256, 384, 512, 1024, 2048)
"""Bin edges of the histogram of shorter sides, in pixels."""


def plan_of(store: Store, indices: NDArray[np.int64], config: ConvertConfig) -> dict[str, Any]:
    """Return the plan of a conversion. Plans are equal only for the same images and options."""
    images = [store.stamp(), store.classes, zlib.crc32(store.labels.tobytes())]
    default = asdict(ConvertConfig())
    options = asdict(config) | {name: default[name] for name in _WITHOUT_EFFECT}
    number, count = config.part_of
    options["part"] = "" if count == 1 else f"{number}/{count}"
    return {
        "format": _FORMAT,
        "options": {
            name: value
            for name, value in options.items()
            if name not in _ADDED_LATER or value != default[name]
        },
        "source": hashlib.sha256(json.dumps(images).encode()).hexdigest(),
        "images": zlib.crc32(indices.tobytes()),
    }


def check_existing(path: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Return the description of an existing output file.

    Raises:
        DataError: the file is corrupt, or has a different plan.
    """
    try:
        about = BetonStore(path).about
    except DataError as error:
        raise DataError(f"{error}; delete it first, or choose another --out") from error
    if {**about.get("plan", {}), "format": _FORMAT} == plan:  # earlier formats are valid too
        return about
    raise DataError(
        f"{path} already exists, but was converted with other options, from other images, or from "
        "files with other modification times; delete it or choose another --out"
    )


def describe(
    store: Store, blocks: list[Block], plan: dict[str, Any], tables_crc32: int
) -> dict[str, Any]:
    """Return the description of a file, which goes into its annex and the manifest."""
    rows = np.concatenate([block.rows for block in blocks])
    processing_counts = sum((Counter(block.how) for block in blocks), Counter[str]())
    bounds = [0, *_SIDES, 2**16]
    counts, _ = np.histogram(np.minimum(rows["width"], rows["height"]), bounds)
    first = np.cumsum([0, *(len(block.rows) for block in blocks)]).tolist()
    # Parts of the same conversion have the same "set"; files of other conversions do not.
    set_key = [plan["source"], {**plan["options"], "part": ""}]
    return {
        "fastsiam": fastsiam.__version__,
        "source": str(store.root),
        "images": len(rows),
        "classes": len(np.unique(store.labels[rows["source"]])) if store.classes else 0,
        "bytes": int(rows["size"].astype(np.int64).sum()),
        "raw": int((rows["mode"] == RAW).sum()),
        "stored": dict(sorted(processing_counts.items())),
        "left_out": [
            {"name": store.name(index), "reason": reason}
            for block in blocks
            for index, reason in block.bad
        ],
        "shorter_sides": {
            f"{low}-{high - 1}": int(count)
            for (low, high), count in zip(itertools.pairwise(bounds), counts, strict=True)
            if count
        },
        "options": plan["options"],
        "plan": plan,
        "set": hashlib.sha256(json.dumps(set_key).encode()).hexdigest(),
        "blocks": [
            {
                "first": first[number],
                "images": len(block.rows),
                "start": block.start,
                "bytes": block.end - block.start,
                "crc32": zlib.crc32(block.rows["crc"].tobytes()),
            }
            for number, block in enumerate(blocks)
        ],
        "tables_crc32": tables_crc32,
    }


def write_manifest(path: Path, classes: tuple[str, ...], files: dict[str, dict[str, Any]]) -> None:
    """Write the manifest of a conversion or of one part; ``files`` maps names to descriptions.

    Raises:
        DataError: the manifest cannot be written.
    """
    manifest = {"fastsiam": fastsiam.__version__, "classes": list(classes), "files": files}
    with os_errors_as(DataError, f"cannot write {path}"), atomic_write(path) as temporary:
        temporary.write_text(json.dumps(manifest, indent=1) + "\n")


def read_manifests(folder: Path) -> dict[str, Any]:
    """Return the file descriptions in all manifests of a folder, by file name.

    A manifest is ignored once all its files are deleted, to convert the images in other parts.

    Raises:
        DataError: a manifest is corrupt or cannot be read.
    """
    descriptions: dict[str, Any] = {}
    for path in sorted([*folder.glob("manifest.json"), *folder.glob("manifest-*-of-*.json")]):
        try:
            files = dict(parse_json(path.read_text())["files"])
            if any((folder / name).exists() for name in files):
                descriptions |= files
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"cannot read {path} ({error}); convert again to recreate it"
            ) from error
    return descriptions
