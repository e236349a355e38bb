"""A small data set, decoded once, kept as uint8 on the training device, augmented there in batches.

The crop's resampling is PIL's: a triangle filter, widened when it shrinks, horizontally then
vertically, each pass rounded to uint8. A pass is a matrix product with the filter's weights, which
suits both a GPU and a CPU. PIL's weights are whole 2**-22ths, so the sums are whole numbers below
2**31, which float64 holds exactly: the crops equal PIL's to the last bit. Pillow 13 takes the
vertical pass first for some boxes, which moves pixels of such crops by one level of 255.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fastsiam.augment import ViewParams, draw_views
from fastsiam.batch import TwoViewBatch, to_device
from fastsiam.config import AugmentConfig
from fastsiam.errors import DataError
from fastsiam.photometric import photometric

from .order import Order
from .store import Store
from .workers import in_workers


class MemoryLoader:
    """Two-view batches from device memory; see ``fastsiam.batch.Loader``."""

    def __init__(
        self,
        store: Store,
        order: Order,
        augment: AugmentConfig,
        *,
        workers: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.source, self.images, self.steps = str(store), len(store), order.steps
        self._order, self._augment, self._device, self._dtype = order, augment, device, dtype
        self._pixels = Pixels(store, workers, device)
        self._labels = torch.from_numpy(store.labels).to(device)

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[TwoViewBatch]:
        """Yield the batches of an epoch from step ``skip`` on."""
        for step in range(skip, self.steps):
            chosen = self._order.indices(number, step)
            params = draw_views(
                self._augment,
                seed=self._order.seed,
                epoch=number,
                index=chosen,
                size=self._pixels.size[chosen],
            )
            crops = crop_views(self._pixels.gather(chosen), params, self._augment.crop)
            view1, view2 = photometric(crops, params, self._augment, dtype=self._dtype)
            index = to_device(chosen, self._device)
            yield TwoViewBatch(view1, view2, index, self._labels[index])

    def close(self) -> None:
        """Free the pixels."""
        del self._pixels


class _Decode(Dataset[tuple[NDArray[np.int64], Tensor] | DataError]):
    """One item is a stretch of images: sizes (n, 2), and all their planes in one uint8 tensor."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __getitem__(self, indices: range) -> tuple[NDArray[np.int64], Tensor] | DataError:
        try:
            images = [np.asarray(self.store.decode(i)) for i in indices]
        except DataError as error:
            return error
        planes = np.concatenate([image.transpose(2, 0, 1).reshape(-1) for image in images])
        return np.array([image.shape[:2] for image in images]), torch.from_numpy(planes)


class Pixels:
    """The decoded images of a store, planar uint8, one after the other on the device."""

    def __init__(self, store: Store, workers: int, device: torch.device) -> None:
        stretches = [range(i, min(i + 256, len(store))) for i in range(0, len(store), 256)]
        room, used = _room(device), 0
        copies = 2 if device.type == "cpu" else 1  # the parts, and then the whole
        sizes: list[NDArray[np.int64]] = []
        planes: list[Tensor] = []
        host = torch.device("cpu")
        for item in in_workers(
            _Decode(store), stretches, workers=workers, device=host, persistent=False
        ):
            if isinstance(item, DataError):
                raise item
            used += item[1].numel()
            if used * copies > 0.8 * room:
                raise DataError(
                    f"{store.root} does not fit: {sum(len(part) for part in sizes):,} of "
                    f"{len(store):,} images fill four fifths of the {room / 2**30:.1f} GiB free "
                    f"on {device}; use --pipeline torchvision"
                )
            sizes.append(item[0])
            planes.append(item[1].clone())  # out of the worker's shared memory
        self.size = np.concatenate(sizes)
        """(N, 2) height and width of each image."""
        count = 3 * self.size.prod(1)
        self._start = np.cumsum(count) - count
        self._flat = torch.empty(used, dtype=torch.uint8, device=device)
        for part, place in zip(planes, self._flat.split([len(p) for p in planes]), strict=True):
            place.copy_(part)
        self._uniform = bool((self.size == self.size[0]).all())

    def gather(self, chosen: NDArray[np.int64]) -> Tensor:
        """Return images as (N, 3, H, W) uint8; where sizes differ, zeros fill up to the largest."""
        height, width = self.size[chosen].max(0).tolist()
        if self._uniform:
            index = to_device(chosen, self._flat.device)
            return self._flat.view(-1, 3, height, width).index_select(0, index)
        images = self._flat.new_zeros(len(chosen), 3, height, width)
        for row, i in enumerate(chosen.tolist()):
            h, w = self.size[i].tolist()
            start = int(self._start[i])
            images[row, :, :h, :w] = self._flat[start : start + 3 * h * w].view(3, h, w)
        return images


def crop_views(images: Tensor, params: ViewParams, side: int) -> Tensor:
    """Cut both crops of each image, resize them and flip them.

    Args:
        images: (N, 3, H, W) uint8.
        params: crop boxes and flips of the N images.
        side: of the result, in pixels.

    Returns:
        (2, N, side, side, 3) uint8 on the images' device.
    """
    n, channels, height, width = images.shape
    box = to_device(params.box.astype(np.float64), images.device)
    flip = to_device(params.flip, images.device)
    top, left, h, w = box.unbind(-1)
    across = _filter(left, w, width, side)
    across = torch.where(flip[..., None, None], across.flip(-2), across)
    down = _filter(top, h, height, side)
    x = images.reshape(n, channels * height, width).double()
    x = _to_levels(x @ across.transpose(-1, -2)).view(2, n, channels, height, side)
    x = _to_levels(down.unsqueeze(2) @ x)
    return x.to(torch.uint8).permute(0, 1, 3, 4, 2)


def _filter(start: Tensor, length: Tensor, size: int, side: int) -> Tensor:
    """Weights (..., side, size), in 2**-22ths, that resize [start, start + length) of ``size``."""
    device, length = start.device, length[..., None, None]
    scale = length / side
    support = scale.clamp(min=1)
    centre = (torch.arange(side, device=device) + 0.5).view(-1, 1) * scale
    pixel = torch.arange(size, device=device) - start[..., None, None]
    weight = (1 - ((pixel - centre + 0.5) * (1 / support)).abs()).clamp(min=0)
    weight = torch.where((pixel >= 0) & (pixel < length), weight, 0)
    weight = weight / weight.sum(-1, keepdim=True)
    return (weight * 2**22 + 0.5).floor()


def _to_levels(x: Tensor) -> Tensor:
    return ((x + 2**21) * 2.0**-22).floor().clamp(0, 255)


def _room(device: torch.device) -> int:
    """Bytes that can still be had on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
