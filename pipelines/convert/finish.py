"""Completes a .beton file whose images are written: tables, notes, and at last the header."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fastsiam
from fastsiam.config import ConvertConfig

from ..store import Store
from ..store.beton import METADATA, RAW, RECORD, Annex, head
from .journal import Block
from .layout import aligned, page_of
from .plan import of_one_set

_SIDES = (32, 64, 128, 224, 256, 384, 512, 1024, 2048)
"""Bounds of the manifest's histogram of shorter sides, in pixels."""


def finish(
    store: Store, blocks: list[Block], partial: Path, plan: dict[str, Any], config: ConvertConfig
) -> dict[str, Any]:
    """Write metadata, annex and table, and after all of them the header.

    Args:
        store: where the images came from.
        blocks: all of the file, in order.
        partial: the file, which holds the images.
        plan: what was to be made.
        config: what became of the images.

    Returns:
        The split's part of the manifest, which the annex holds too.
    """
    rows = np.concatenate([block.rows for block in blocks])
    metadata = np.zeros(len(rows), METADATA)
    for ours, theirs in (("mode", "mode"), ("width", "width"), ("height", "height")):
        metadata["image"][ours] = rows[theirs]
    metadata["image"]["data_ptr"] = rows["start"]
    metadata["label"] = store.labels[rows["source"]]
    table = np.zeros(len(rows), RECORD)
    table["sample_id"] = np.arange(len(rows))
    table["ptr"], table["size"] = rows["start"], rows["size"]
    names = [store.name(index).replace("\0", "_") for index in rows["source"].tolist()]
    about = _about(store, blocks, rows, plan, config)
    about["tables_crc32"] = zlib.crc32(table.tobytes(), zlib.crc32(metadata.tobytes()))
    joined = "\0".join(names).encode("utf-8", "surrogateescape")
    annex = Annex(about, store.classes, rows["crc"].astype(np.uint32), joined).pack()
    annex_start = aligned(blocks[-1].end, 8)
    table_start = aligned(annex_start + len(annex), 8)
    first = head(
        images=len(rows),
        page_size=page_of(int(rows["size"].max())),
        table=table_start,
        annex=annex,
        annex_start=annex_start,
    )
    with partial.open("r+b") as file:
        file.truncate(table_start)
        file.seek(len(first))
        file.write(metadata.tobytes())
        file.seek(annex_start)
        file.write(annex)
        file.seek(table_start)
        file.write(table.tobytes())
        file.seek(0)
        file.write(first)
    return about


def _about(
    store: Store,
    blocks: list[Block],
    rows: NDArray[np.void],
    plan: dict[str, Any],
    config: ConvertConfig,
) -> dict[str, Any]:
    """Describe the file for the manifest."""
    how: Counter[str] = Counter()
    for block in blocks:
        how.update(block.how)
    shorter = np.minimum(rows["width"], rows["height"])
    counts, _ = np.histogram(shorter, [0, *_SIDES, 2**16])
    edges = itertools.pairwise([0, *_SIDES, 2**16])
    first = np.cumsum([0, *(len(block.rows) for block in blocks)]).tolist()
    return {
        "fastsiam": fastsiam.__version__,
        "source": str(store.root),
        "images": len(rows),
        "classes": len(np.unique(store.labels[rows["source"]])) if store.classes else 0,
        "bytes": int(rows["size"].astype(np.int64).sum()),
        "raw": int((rows["mode"] == RAW).sum()),
        "stored": dict(sorted(how.items())),
        "left_out": [
            {"name": store.name(index), "reason": reason}
            for block in blocks
            for index, reason in block.bad
        ],
        "shorter_sides": {
            f"{low}-{high - 1}": int(count)
            for (low, high), count in zip(edges, counts, strict=True)
            if count
        },
        "options": plan["options"],
        "plan": plan,
        "set": of_one_set(plan, config),
        "blocks": [
            {
                "first": first[block.number],
                "images": len(block.rows),
                "start": block.start,
                "bytes": block.end - block.start,
                "crc32": zlib.crc32(block.rows["crc"].tobytes()),
            }
            for block in blocks
        ],
    }
