"""What loader processes hand over waits in shared memory: how much may, and whether there is room.

A process that writes more into /dev/shm than it holds is killed by SIGBUS, without a word, and
Docker gives it 64 MiB. So items are made as small as their number demands.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import BackendError
from fastsiam.kernels.cores import local_ranks

ITEMS_AHEAD = 2
"""Items that wait for each loader process: what torch's DataLoader calls its prefetch factor."""
_MOST_BYTES = 2**30
"""Of all items of a rank together: some seconds of work, whatever the number of processes."""
_PLACE = Path("/dev/shm")


def images_of_an_item(shapes: Sequence[tuple[int, int, int, int, int]], *, workers: int) -> int:
    """Return how many of a batch's images make up an item of a loader process.

    All items that can wait at once take 1 GiB at most, and half of the shared memory that is free.

    Args:
        shapes: of a rank's batch, uint8, for each side of its crops: (V, N, S, S, 3). An item has
            N images at most.
        workers: loader processes of this rank; without any, nothing goes through shared memory.

    Raises:
        BackendError: there is no room for items of a single image.
    """
    batch = shapes[0][1]
    if workers == 0:
        return batch
    each = sum(map(math.prod, shapes)) // batch
    least = workers * ITEMS_AHEAD * each
    room = _MOST_BYTES
    if (free := _free_bytes()) is not None:
        ranks = local_ranks()
        own = free // ranks
        if least > own:
            whose = f"{workers} loader processes" + (f" of each of {ranks} ranks" * (ranks > 1))
            fewer = own // (ITEMS_AHEAD * each)
            raise BackendError(
                f"{_PLACE} has {free / 2**20:,.1f} MiB free, and {whose} need at least "
                f"{least * ranks / 2**20:,.1f} MiB: give a container more of it (docker run "
                f"--shm-size=8g), choose --workers {fewer}, or --pipeline native, "
                "which works in threads"
            )
        room = min(room, own // 2)
    return min(batch, max(1, room // least))


def cut(batch: NDArray[np.int64], images: int) -> list[NDArray[np.int64]]:
    """Cut a batch into parts of at most so many images, of nearly the same size, in order."""
    return np.array_split(batch, math.ceil(len(batch) / images))


def _free_bytes() -> int | None:
    """Return how much shared memory is free; None where the system keeps it elsewhere."""
    if not _PLACE.is_dir():
        return None
    found = os.statvfs(_PLACE)
    return found.f_bavail * found.f_frsize
