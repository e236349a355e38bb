"""The engine over one .beton file, which the system maps or FFCV's page cache reads."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fastsiam.config import AugmentConfig

from .engine import EncodedBatch
from .ffcv_library import PageCache, Pages
from .native_backend import NativeLoader
from .order import Order
from .store import BetonStore, Store


class FfcvLoader(NativeLoader):
    """Batches of a .beton file; see ``fastsiam.views.batch.Loader``.

    Args:
        store: a .beton file that ``fastsiam convert`` or FFCV's own writer made.
        order: which images make up which batch.
        augment: how views are drawn.
        workers: as for ``NativeLoader``, as are ``prefetch``, ``device`` and ``dtype``.
        os_cache: map the file and leave caching to the system. Otherwise FFCV reads the pages that
            the epoch needs, each once, into memory of its own.
    """

    def __init__(
        self,
        store: Store,
        order: Order,
        augment: AugmentConfig,
        *,
        workers: int,
        prefetch: int,
        os_cache: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        assert isinstance(store, BetonStore)
        super().__init__(
            store, order, augment, workers=workers, prefetch=prefetch, device=device, dtype=dtype
        )
        self._cache = None if os_cache else PageCache(store)
        self._pages: Pages | None = None

    def _open_epoch(self, number: int, skip: int) -> None:
        if self._cache is not None:
            steps = range(skip, self.steps)
            self._pages = self._cache.epoch([self._order.indices(number, step) for step in steps])

    def _read(self, index: NDArray[np.int64]) -> EncodedBatch:
        if self._pages is None:
            return super()._read(index)
        if self._submitted is not None:
            self._submitted.wait()  # its pages are overwritten
        return self._engine.in_memory(index, *self._pages.load(index))

    def _close_epoch(self) -> None:
        if self._pages is not None:
            self._pages.close()
            self._pages = None
