"""FFCV's page cache, imported so that the rest of the process stays as it is.

The first import of FFCV sets torch's and numba's numbers of threads to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from queue import Empty
from typing import Any

import numba
import numba.typed
import numpy as np
import torch
from numpy.typing import NDArray

from fastsiam.errors import DataError

from .store import BetonStore

_threads = torch.get_num_threads(), numba.get_num_threads()
_typed, numba.typed.Dict = numba.typed.Dict, dict  # for two names, it would compile for seconds
from ffcv.fields import RGBImageField  # noqa: E402
from ffcv.memory_managers import ProcessCacheManager  # noqa: E402
from ffcv.reader import Reader  # noqa: E402

numba.typed.Dict = _typed
torch.set_num_threads(_threads[0])
numba.set_num_threads(_threads[1])

_SECONDS_BETWEEN_LOOKS = 1.0  # at whether FFCV's readers still live


class PageCache:
    """FFCV's reader of a .beton file: whole pages, read ahead into memory of this process.

    Args:
        store: the file.
    """

    def __init__(self, store: BetonStore) -> None:
        self._store = store
        reader = Reader(str(store.root), {store.image_field: RGBImageField})
        self._manager = ProcessCacheManager(reader)

    def epoch(self, batches: Sequence[NDArray[np.int64]]) -> Pages:
        """Start to read the pages of an epoch.

        Args:
            batches: positions of each batch's images.
        """
        return Pages(self._store, self._manager, batches)


class Pages:
    """The pages of an epoch, batch by batch; see ``PageCache``."""

    def __init__(
        self, store: BetonStore, manager: Any, batches: Sequence[NDArray[np.int64]]
    ) -> None:
        self._store, self._batch, self._closed = store, 0, False
        self._context = manager.schedule_epoch([store.in_whole(index) for index in batches])
        self._context.__enter__()
        self._loaded = self._context.executor.loaded_queue
        self._get, self._loaded.get = self._loaded.get, self._next_page  # FFCV's waits for ever

    def load(self, index: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Wait for the pages of the next batch; those of the batch before it are overwritten.

        Args:
            index: (N,) positions of its images.

        Returns:
            The memory that holds the pages, and (N,) where each record begins in it.

        Raises:
            DataError: the file cannot be read any more.
        """
        self._context.start_batch(self._batch)
        self._batch += 1
        memory, *_, page_to_slot = self._context.state
        page_size, start = memory.shape[1], self._store.start[index]
        slot = page_to_slot[start // page_size].astype(np.int64)
        return memory.reshape(-1), slot * page_size + start % page_size

    def close(self) -> None:
        """End FFCV's readers."""
        if not self._closed:
            self._closed = True
            self._context.__exit__(None, None, None)

    def _next_page(self) -> Any:
        """Return the next page that was read; FFCV waits for ever where its readers died."""
        while not self._closed:
            try:
                return self._get(timeout=_SECONDS_BETWEEN_LOOKS)
            except Empty:
                if not any(reader.is_alive() for reader in self._context.executor.threads):
                    raise DataError(
                        f"the threads that read {self._store} died; is the file still there?"
                    ) from None
        raise RuntimeError("the epoch was closed")
