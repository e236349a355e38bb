"""Jobs for the compiled kernels, which make crops and views of a batch of images on a CPU.

The kernels resample like PIL, so crops are bit-identical to PIL's. A triangle filter, widened when
it shrinks an image, runs along one axis and then along the other. Weights are multiples of 2**-22,
sums are integers, and each axis rounds to integer levels. In ``fastsiam/kernels/source``, job.cpp
distributes the images among threads, and geometric.cpp makes the crops.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.kernels import library
from fastsiam.kernels.threads import in_threads
from fastsiam.trace import note_stages, span
from fastsiam.views.batch import Crops, crop_shapes
from fastsiam.views.draws import ViewParams
from fastsiam.views.photometric.cpu import Stage
from fastsiam.views.photometric.operations import operations

from .cuts import Cuts, cut_views

JPEG, PIXELS = range(2)
"""How an image is encoded in memory; the modes of a .beton file are the same numbers."""
PILLOW = 255
"""Marks an image that compiled code skips; decode it and call ``Job.make_pixels``."""
_STAGES = "decode", "crop", "photometric"


@dataclass(frozen=True, slots=True)
class Images:
    """Addresses, sizes and forms of N images in memory. Heights and widths are in pixels."""

    address: NDArray[np.int64]
    """(N,) address of each image's first byte."""
    bytes: NDArray[np.int64]
    """(N,) number of bytes of each image."""
    height: NDArray[np.int32]
    width: NDArray[np.int32]
    form: NDArray[np.uint8]
    """(N,) JPEG, PIXELS (H x W x 3, RGB) or PILLOW."""
    owner: object = None
    """Owner of the memory, which is kept alive as long as this object.

    A list contains the bytes of each image."""

    @property
    def size(self) -> NDArray[np.int64]:
        """(N, 2) height and width of each decoded image."""
        return np.stack([self.height, self.width], axis=1).astype(np.int64)

    @staticmethod
    def of_pixels(
        address: NDArray[np.int64], size: NDArray[np.integer[Any]], owner: object = None
    ) -> Images:
        """Return N decoded images: H x W x 3 uint8 each, with the sizes (N, 2)."""
        height, width = (np.ascontiguousarray(side, np.int32) for side in np.asarray(size).T)
        count = 3 * height.astype(np.int64) * width
        form = np.full(len(height), PIXELS, np.uint8)
        return Images(np.ascontiguousarray(address, np.int64), count, height, width, form, owner)

    @staticmethod
    def of_arrays(arrays: Sequence[NDArray[np.uint8]], owner: object = None) -> Images:
        """Return images from contiguous (H, W, 3) uint8 arrays; ``owner`` owns their memory."""
        address = np.array([library.at(array, np.uint8) for array in arrays], np.int64)
        size = np.array([array.shape[:2] for array in arrays])
        return Images.of_pixels(address, size, (arrays, owner))


class Job:
    """Makes a batch's crops and views; several threads may call ``run`` concurrently.

    Args:
        images: N images.
        cuts: crop boxes and flips, for each view size.
        crops: output for each view size, (V, N, S, S, 3) uint8, contiguous; None if only views are
            requested.
        stages: photometric stage for each view size, with memory for the views; empty if only
            crops are requested.
        decode: address of the function that decodes JPEGs; 0 if no image is a JPEG.

    Raises:
        ValueError: an argument is missing, or compiled code would access memory outside its arrays.
    """

    def __init__(
        self,
        images: Images,
        cuts: Sequence[Cuts],
        crops: Crops | None = None,
        stages: Sequence[Stage] = (),
        *,
        decode: int = 0,
    ) -> None:
        self.count = count = len(images.address)
        """Number of images."""
        if crops is None and not stages:
            raise ValueError("neither crops nor views are requested: pass crops or stages")
        if not decode and (images.form == JPEG).any():
            raise ValueError("some images are JPEGs: pass the address of a decoder")
        self._rejections = np.zeros(count, np.uint8)
        self._times, self._threads = np.zeros((count, 4), np.int64), np.zeros(count, np.int64)
        turn = np.argsort(-images.bytes, kind="stable")  # largest first, to balance threads
        next_turn, at = np.zeros(1, np.int64), library.at
        self._next_turn, self._images = next_turn, images
        sides = (library.SideOf * len(cuts))()
        for number, cut in enumerate(cuts):
            _check_cuts(cut, images)
            target = None if crops is None else crops[number]
            if target is not None and not target.is_contiguous():
                raise ValueError(f"crops of shape {tuple(target.shape)} are not contiguous")
            sides[number] = library.SideOf(
                (stages[number] if target is None else target).shape[-2],
                len(cut.box),
                at(cut.box, np.int32),
                at(cut.flip, np.bool_),
                at(cut.resized, np.int32),
                at(cut.corner, np.int32),
                None if target is None else target.data_ptr(),
                ctypes.pointer(stages[number].compiled) if stages else None,
            )
        self._references = turn, cuts, crops, stages, sides  # keeps the arrays alive
        self._job = library.JobOf(
            count,
            at(next_turn, np.int64),
            at(turn, np.int64),
            at(images.address, np.int64),
            at(images.bytes, np.int64),
            at(images.height, np.int32),
            at(images.width, np.int32),
            at(images.form, np.uint8),
            decode or None,
            len(sides),
            sides,
            at(self._rejections),
            at(self._times),
            at(self._threads),
        )
        self._make = library.kernels().fastsiam_make
        self._make_pixels = library.kernels().fastsiam_make_pixels

    def run(self) -> None:
        """Process images until all are taken; after a MemoryError the batch is incomplete."""
        self._check_memory(self._make(ctypes.byref(self._job)))

    def make_pixels(self, row: int, pixels: NDArray[np.uint8]) -> None:
        """Make the crops and views of one image from its decoded pixels, (H, W, 3) uint8.

        Raises:
            MemoryError: there is not enough free memory.
            ValueError: the size differs from the one in ``images``.
        """
        size = (int(self._images.height[row]), int(self._images.width[row]), 3)
        if pixels.shape != size:
            raise ValueError(f"pixels have the shape {pixels.shape}, but {size} is expected")
        pixels = np.ascontiguousarray(pixels)
        job, address = ctypes.byref(self._job), library.at(pixels, np.uint8)
        self._check_memory(self._make_pixels(job, row, address))

    def _check_memory(self, row: int) -> None:
        """Raise a MemoryError if compiled code returned the row of an image; -1 means success."""
        if row >= 0:
            raise MemoryError(
                f"no memory for the crops of an image of {self._images.height[row]} x "
                f"{self._images.width[row]} pixels: use fewer --workers, or smaller images"
            )

    def cancel(self) -> None:
        """Make each thread stop after the image that it is working on."""
        self._next_turn[0] = self.count

    def rejected_rows(self) -> NDArray[np.int64]:
        """Return the rows of images that compiled code rejected; call it after all threads end."""
        note_stages(_STAGES, self._times, self._threads)
        return np.flatnonzero(self._rejections)


def _check_cuts(cuts: Cuts, images: Images) -> None:
    """Raise a ValueError unless boxes lie inside their images, and resized sizes are positive."""
    box, resized = cuts.box, cuts.resized
    top, left, height, width = np.moveaxis(box.astype(np.int64), -1, 0)
    rows = (top >= 0) & (height > 0) & (top + height <= images.height)
    columns = (left >= 0) & (width > 0) & (left + width <= images.width)
    for view, row in np.argwhere(~(rows & columns)):
        raise ValueError(
            f"box {box[view, row].tolist()} is not inside its image of "
            f"{images.height[row]} x {images.width[row]} pixels"
        )
    for view, row in np.argwhere((resized <= 0).any(-1)):
        raise ValueError(f"box {box[view, row].tolist()} is resized to {resized[view, row]} pixels")


def stages_of(params: ViewParams, config: AugmentConfig, dtype: torch.dtype) -> list[Stage]:
    """Return the photometric stage for each view size; ``dtype`` is that of the views."""
    sides = zip(operations(params, config), config.by_side, strict=True)
    return [Stage(side_operations, config, side, side, dtype) for side_operations, side in sides]


def run_in_threads(job: Job) -> None:
    """Run a job of decoded images in as many threads as torch uses."""
    in_threads(job.run, job.count)
    job.rejected_rows()


def crop_views(
    pixels: Tensor,
    start: NDArray[np.int64],
    size: NDArray[np.int64],
    params: ViewParams,
    config: AugmentConfig,
) -> Crops:
    """Crop, resize and flip N decoded images.

    Args:
        pixels: (bytes,) uint8 on a CPU or a CUDA GPU: the images, H x W x 3 each, in one tensor.
        start: (N,) offset of each image in ``pixels``.
        size: (N, 2) height and width of each image.
        params: crop boxes and flips of the N images.
        config: sides of the views.

    Returns:
        The crops on the pixels' device.
    """
    cuts = cut_views(params, config)
    with span("crop"):
        if pixels.device.type == "cuda":
            from .crop_kernels import crop_side

            pairs = zip(cuts, config.by_side, strict=True)
            return tuple(crop_side(pixels, start, size, cut, side) for cut, side in pairs)
        shapes = crop_shapes(config, len(size))
        crops = tuple(torch.empty(shape, dtype=torch.uint8, device="cpu") for shape in shapes)
        images = Images.of_pixels(pixels.data_ptr() + np.asarray(start), size, pixels)
        run_in_threads(Job(images, cuts, crops))
        return crops
