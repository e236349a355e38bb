"""FFCV's loader with an operation of our own: one read, one decode, all crops.

FFCV brings the file, the page cache, the loader thread, the pinned buffers that rotate, and
libjpeg-turbo. Ours are the order, the boxes, the decoding operation (PyPI's FFCV cannot cut two
views from one decode) and the resampling, which equals PIL's. The operation runs in threads of its
own (``ffcv_decoder``): FFCV's deal out images before it is known how long each takes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastsiam.config import AugmentConfig
from fastsiam.views.batch import Batch, Crops
from fastsiam.views.draws import ViewParams

from .copies import copy_stream
from .ffcv_decoder import Cutter, Work
from .ffcv_epoch import Epoch, Layout, Made
from .ffcv_library import SimpleRGBImageDecoder, State, open_loader
from .finish import Finisher
from .order import Order
from .store import Store
from .store.beton import BetonStore
from .workers import closes_at_exit, count


class FfcvLoader:
    """Batches by FFCV's loader; see ``fastsiam.views.batch.Loader``.

    Args:
        store: a .beton file, of ours or of FFCV's own writer.
        order: which images make up which batch.
        augment: what becomes of them.
        workers: threads that decode and crop; -1 is one for each core of this rank.
        prefetch: batches that are made ahead of the training step.
        os_cache: map the file and leave caching to the system; otherwise FFCV reads the pages that
            the epoch needs, each once, into memory of its own.
        device: where the views shall lie.
        dtype: of the views.
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
        self.source, self.images, self.steps = str(store), order.images, order.steps
        self._store, self._order, self._augment = store, order, augment
        self._device, self._dtype = device, dtype
        self._finisher = Finisher(store, order, augment, device=device, dtype=dtype)
        self._layout, batch = Layout(augment), order.batch // order.world
        self._operation = DecodeAndCrop(store, augment, self._layout, max(1, count(workers)))
        self._loader = open_loader(
            str(store.root),
            dict.fromkeys(store.fields) | {store.image_field: [self._operation]},
            images=store.image_field,
            batch=batch,
            prefetch=prefetch,
            os_cache=os_cache,
        )
        # Those that wait, the one that the caller has, and two in the making.
        self._slots = self._make_slots(batch, prefetch + 3)
        self._epoch: Epoch | None = None
        self._closed = False
        closes_at_exit(self)

    def crops(
        self, number: int, *, skip: int = 0
    ) -> Iterator[tuple[NDArray[np.int64], ViewParams, Crops]]:
        """Yield what ``epoch`` makes its batches of; see ``fastsiam.views.batch.CropLoader``."""
        for made in closes_at_exit(self._batches(number, skip, finished=False)):
            yield made.index, made.params, made.crops

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from step ``skip`` on; one epoch at a time."""
        finished = self._device.type == "cpu"
        batches = closes_at_exit(self._batches(number, skip, finished=finished))
        for step, made in enumerate(batches, skip):
            where, finisher = {"epoch": number, "step": step}, self._finisher
            if made.views is None:
                yield finisher.finish(made.index, made.params, made.crops, **where)
            else:
                yield finisher.made(made.index, made.params, made.views, **where)

    def _batches(self, number: int, skip: int, *, finished: bool) -> Generator[Made]:
        if self._closed:
            raise RuntimeError("this loader is closed")
        self._leave()
        order, dtype = self._order, self._dtype if finished else None
        steps = [
            (order.indices(number, step), order.drawn_for(number, step))
            for step in range(skip, order.steps)
        ]
        if not steps:
            return
        epoch = self._epoch = Epoch(
            self._loader,
            self._store,
            self._augment,
            self._layout,
            self._slots,
            order.seed,
            number,
            steps,
            self._device,
            dtype,
        )
        try:
            yield from epoch
        finally:
            epoch.leave()
        if epoch is not self._epoch and not self._closed:
            raise RuntimeError("another epoch of this loader was begun; it makes one at a time")

    def _make_slots(self, batch: int, slots: int) -> list[torch.cuda.Stream | None]:
        """Give FFCV the buffers that it would allocate, and pin, for every epoch anew.

        Returns:
            For each slot of them the stream that copies it to the device, None on a CPU.
        """
        shape, gpu = (slots, batch, self._layout.bytes_per_image), self._device.type == "cuda"
        crops = torch.empty(shape, dtype=torch.uint8, pin_memory=gpu).numpy()
        (node,) = self._loader.graph.root_nodes
        memory = {"operation": {node.id: crops}, "shared": {node.id: None}}
        self._loader.graph.allocate_memory = lambda *_: memory
        return [copy_stream(self._device) for _ in range(slots)]

    def close(self) -> None:
        """End the threads and free the buffers."""
        if not self._closed:
            self._closed = True
            self._leave()
            for stream in self._slots:
                if stream is not None:
                    stream.synchronize()  # a copy may still read the buffers
            self._operation.close()
            del self._loader

    def _leave(self) -> None:
        if self._epoch is not None:
            self._epoch.leave()
            self._epoch = None


class DecodeAndCrop(SimpleRGBImageDecoder):  # type: ignore[misc]
    """FFCV operation: decode each image once, make all its crops, in threads.

    FFCV takes an operation for an image field's decoder if it descends from the simple one.

    Its output is a pair: the crops as bytes, laid out as ``Layout`` says, and the ``Making`` by
    which one waits for them.
    """

    def __init__(
        self, store: BetonStore, augment: AugmentConfig, layout: Layout, workers: int
    ) -> None:
        super().__init__()
        self._layout, self._cutter = layout, Cutter(store, list(augment.by_side), workers)

    def declare_state_and_memory(self, previous_state: State) -> tuple[State, None]:
        """Say what comes out; the buffers are the loader's, for all epochs."""
        shape = (self._layout.bytes_per_image,)
        return State(True, previous_state.device, shape, np.dtype("u1")), None

    def generate_code(self) -> Any:
        """Return the function that FFCV calls for each batch."""

        def decode_and_crop(indices: Any, memory: Any, metadata: Any, work: Work) -> Any:
            crops = None if work.stages else self._layout.crops(torch.from_numpy(memory))
            return memory, self._cutter.begin(work, crops)

        return decode_and_crop

    def close(self) -> None:
        """End the threads."""
        self._cutter.close()
