"""The FFCV pipeline: the engine on one .beton file, memory-mapped or read by FFCV's page cache.

Importing FFCV sets the thread counts of torch and numba to one; this module restores them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from functools import partial
from queue import Empty
from typing import Any

import numba
import numba.typed
import numpy as np
import torch
from numpy.typing import NDArray

from fastsiam.errors import DataError

from .job import Images
from .loaders import Augmented, LoaderSpec
from .native_backend import NativeLoader
from .store import BetonStore

_threads = torch.get_num_threads(), numba.get_num_threads()
_typed, numba.typed.Dict = numba.typed.Dict, dict  # compiling numba's takes seconds
from ffcv.fields import RGBImageField  # noqa: E402
from ffcv.memory_managers import ProcessCacheManager  # noqa: E402
from ffcv.reader import Reader  # noqa: E402

numba.typed.Dict = _typed
torch.set_num_threads(_threads[0])
numba.set_num_threads(_threads[1])

_POLL_SECONDS = 1.0  # between checks that FFCV's reader threads are alive


class FfcvLoader(NativeLoader):
    """Loader of a .beton file that was written by ``fastsiam convert`` or by FFCV.

    With ``os_cache`` the file is memory-mapped, and the OS caches it. Otherwise FFCV reads the
    pages that the epoch needs, each once, into its own memory.
    """

    def __init__(self, spec: LoaderSpec) -> None:
        super().__init__(spec)
        self._manager: Any = None
        if not spec.data.os_cache:
            assert isinstance(self._store, BetonStore)
            self._beton = self._store
            reader = Reader(str(self._beton.root), {self._beton.image_field: RGBImageField})
            self._manager = ProcessCacheManager(reader)

    def _views_or_crops(self, epoch: int, skip: int, *, as_views: bool) -> Generator[Augmented]:
        results = super()._views_or_crops(epoch, skip, as_views=as_views)
        if self._manager is None or skip == self.steps:  # FFCV cannot schedule an empty epoch
            yield from results
            return
        batches = [self._order.indices(epoch, step) for step in range(skip, self.steps)]
        pages = _Pages(self._beton, self._manager, batches)
        with contextlib.closing(results), contextlib.closing(pages):
            self._read = partial(self._load, pages)
            # Bad images that are shared later change the order, but not the schedule.
            self._indices = lambda epoch, step: batches[step - skip]
            for batch in results:  # noqa: UP028  # closes `pages` first, which ends a blocked read
                yield batch

    def _load(self, pages: _Pages, index: NDArray[np.int64]) -> Images:
        """Read the images of the next batch into the memory of the previous batch."""
        self._engine.wait()
        memory, start = pages.load(index)
        address, size = memory.ctypes.data + start, self._beton.size[index].astype(np.int64)
        return self._engine.headers.images(index, address, size, memory)


class _Pages:
    """The pages of an epoch, which FFCV reads ahead, batch by batch.

    Args:
        store: the .beton file.
        manager: FFCV's cache of the file's pages.
        batches: positions of each batch's images.
    """

    def __init__(
        self, store: BetonStore, manager: Any, batches: Sequence[NDArray[np.int64]]
    ) -> None:
        self._store, self._batch, self._closed = store, 0, False
        self._context = manager.schedule_epoch([store.full_positions(index) for index in batches])
        self._context.__enter__()
        self._loaded = self._context.executor.loaded_queue
        self._get, self._loaded.get = self._loaded.get, self._next_page  # FFCV's own blocks forever

    def load(self, index: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Wait for the pages of the next batch, which overwrite those of the previous batch.

        Args:
            index: (N,) positions of the batch's images.

        Returns:
            The memory that holds the pages, (bytes,), and the offset of each record in it, (N,).

        Raises:
            DataError: the file can no longer be read.
        """
        self._context.start_batch(self._batch)
        self._batch += 1
        memory, *_, page_to_slot = self._context.state
        page_size, start = memory.shape[1], self._store.start[index]
        slot = page_to_slot[start // page_size].astype(np.int64)
        return memory.reshape(-1), slot * page_size + start % page_size

    def close(self) -> None:
        """End FFCV's reader threads; a ``load`` that waits for them raises an error."""
        self._closed = True
        self._context.__exit__(None, None, None)

    def _next_page(self) -> Any:
        while not self._closed:
            try:
                return self._get(timeout=_POLL_SECONDS)
            except Empty:
                if not any(reader.is_alive() for reader in self._context.executor.threads):
                    raise DataError(
                        f"the threads that read {self._store} died; is the file still there?"
                    ) from None
        raise RuntimeError("the epoch was closed")
