"""Crops, and views, on the CPU: compiled, in threads, one image after the other.

PIL resamples by a triangle filter, widened when it shrinks, along one axis and then along the
other, and rounds to whole levels after each. Its weights are whole 2**-22ths and its sums integers,
here as there: crops are equal to PIL's to the last bit. The code is in ``fastsiam/kernels/source``:
job.cpp deals out the images, geometric.cpp crops.
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
"""Forms in which images lie in memory; a .beton file's modes are the same."""
PILLOW = 255
"""Form of an image that compiled code leaves out: ``Job.make_pixels`` takes it when decoded."""
_STAGES = "decode", "crop", "photometric"


@dataclass(frozen=True, slots=True)
class Images:
    """N images anywhere in memory, whose owner has to keep them until they are used."""

    address: NDArray[np.int64]
    """(N,) of each one's first byte."""
    bytes: NDArray[np.int64]
    """(N,)"""
    height: NDArray[np.int32]
    """(N,)"""
    width: NDArray[np.int32]
    """(N,)"""
    form: NDArray[np.uint8]
    """(N,) JPEG, PIXELS (H x W x 3, RGB) or PILLOW."""

    @staticmethod
    def of_pixels(address: NDArray[np.int64], size: NDArray[np.integer[Any]]) -> Images:
        """Return images that are pixels.

        Args:
            address: (N,) of each one's first byte.
            size: (N, 2) height and width of each.
        """
        height, width = (np.ascontiguousarray(side, np.int32) for side in np.asarray(size).T)
        count = 3 * height.astype(np.int64) * width
        form = np.full(len(height), PIXELS, np.uint8)
        return Images(np.ascontiguousarray(address, np.int64), count, height, width, form)

    @staticmethod
    def of_arrays(arrays: Sequence[NDArray[np.uint8]]) -> Images:
        """Return images that are contiguous arrays H x W x 3."""
        address = np.array([library.at(array, np.uint8) for array in arrays], np.int64)
        return Images.of_pixels(address, np.array([array.shape[:2] for array in arrays]))


class Job:
    """A batch's crops and views, to be made by threads that all call ``run``.

    Args:
        images: N of them.
        cuts: of each side.
        sides: of the crops, in pixels.
        crops: of each side (V, N, S, S, 3) uint8, contiguous, filled in; None where only the views
            are wanted.
        stages: of each side, where views shall be made of the crops.
        decode: the address of the function that decodes JPEGs; 0 where there are none.

    Raises:
        ValueError: compiled code would read or write outside of these arrays.
    """

    def __init__(
        self,
        images: Images,
        cuts: Sequence[Cuts],
        sides: Sequence[int],
        crops: Crops | None = None,
        stages: Sequence[Stage] = (),
        *,
        decode: int = 0,
    ) -> None:
        self.count = count = len(images.address)
        """Images."""
        if crops is None and not stages:
            raise ValueError("neither crops nor views are wanted: pass crops or stages")
        if not decode and (images.form == JPEG).any():
            raise ValueError("some images are JPEGs: pass the address of a decoder")
        self._refused = np.zeros(count, np.uint8)
        self._times, self._threads = np.zeros((count, 4), np.int64), np.zeros(count, np.int64)
        turn = np.argsort(-images.bytes, kind="stable")  # no thread is left with a long one
        taken, at = np.zeros(1, np.int64), library.at
        self._taken, self._images = taken, images
        made = (library.SideOf * len(cuts))()
        kept: list[object] = [turn, stages, made]
        for number, (own, side) in enumerate(zip(cuts, sides, strict=True)):
            box, flip, resized, corner = arrays = _contiguous(own)
            _check_cuts(box, resized, images)
            target = None if crops is None else crops[number]
            if target is not None and not target.is_contiguous():
                raise ValueError(f"crops of shape {tuple(target.shape)} are not contiguous")
            made[number] = library.SideOf(
                side,
                len(box),
                library.CutsOf(at(box), at(flip), at(resized), at(corner)),
                None if target is None else target.data_ptr(),
                ctypes.pointer(stages[number].compiled) if stages else None,
            )
            kept += arrays, target
        self._kept = kept  # whose addresses are used
        self._job = library.JobOf(
            count,
            at(taken, np.int64),
            at(turn, np.int64),
            at(images.address, np.int64),
            at(images.bytes, np.int64),
            at(images.height, np.int32),
            at(images.width, np.int32),
            at(images.form, np.uint8),
            decode or None,
            len(made),
            made,
            at(self._refused),
            at(self._times),
            at(self._threads),
        )
        self._make = library.kernels().fastsiam_make
        self._make_pixels = library.kernels().fastsiam_make_pixels

    def run(self) -> None:
        """Take one image after the other, as long as there are any.

        Raises:
            MemoryError: an image needs more than is free; the batch is incomplete.
        """
        self._check_memory(self._make(ctypes.byref(self._job)))

    def make_pixels(self, row: int, pixels: NDArray[np.uint8]) -> None:
        """Make the crops and views of one image that was decoded elsewhere.

        Args:
            row: its number among the images.
            pixels: (H, W, 3) of the size that ``images`` states.

        Raises:
            MemoryError: it needs more than is free.
            ValueError: it is of another size.
        """
        size = (int(self._images.height[row]), int(self._images.width[row]), 3)
        if pixels.shape != size:
            raise ValueError(f"pixels have the shape {pixels.shape}, but {size} is expected")
        pixels = np.ascontiguousarray(pixels)
        job, address = ctypes.byref(self._job), library.at(pixels, np.uint8)
        self._check_memory(self._make_pixels(job, row, address))

    def _check_memory(self, row: int) -> None:
        """Raise MemoryError if compiled code had too little for the image in a row; -1: enough."""
        if row >= 0:
            raise MemoryError(
                f"no memory for the crops of an image of {self._images.height[row]} x "
                f"{self._images.width[row]} pixels: use fewer --workers, or smaller images"
            )

    def cancel(self) -> None:
        """Let the threads end after the image that each works on."""
        self._taken[0] = self.count

    def refused(self) -> NDArray[np.int64]:
        """Return the rows of the images that could not be decoded, once all threads have ended."""
        note_stages(_STAGES, self._times, self._threads)
        return np.flatnonzero(self._refused)


def _contiguous(cuts: Cuts) -> tuple[NDArray[Any], ...]:
    return (
        np.ascontiguousarray(cuts.box, np.int32),
        np.ascontiguousarray(cuts.flip, np.bool_),
        np.ascontiguousarray(cuts.resized, np.int32),
        np.ascontiguousarray(cuts.corner, np.int32),
    )


def _check_cuts(box: NDArray[np.int32], resized: NDArray[np.int32], images: Images) -> None:
    """Check that boxes (V, N, 4) hold pixels of their images alone, and are resized to some.

    Raises:
        ValueError: names the first that does not.
    """
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
    """Return the photometric stage of each side of the views.

    Args:
        params: what becomes of N images.
        config: for the sides and the normalisation.
        dtype: of the views.
    """
    sides = zip(operations(params, config), config.by_side, strict=True)
    return [Stage(what, config, side, side, dtype) for what, side in sides]


def run_in_threads(job: Job) -> None:
    """Do a job whose images are all pixels, in as many threads as torch uses."""
    in_threads(job.run, job.count)
    job.refused()


def crop_views(
    pixels: Tensor,
    start: NDArray[np.int64],
    size: NDArray[np.int64],
    params: ViewParams,
    config: AugmentConfig,
) -> Crops:
    """Cut the crops of N decoded images, resize and flip them.

    Args:
        pixels: (bytes,) uint8: images one after the other, each H x W x 3, on a CPU or a CUDA GPU.
        start: (N,) where each of the images begins.
        size: (N, 2) height and width of each.
        params: crop boxes and flips of the N images.
        config: says which views have which side.

    Returns:
        The crops on the pixels' device.
    """
    cuts, sides = cut_views(params, config), list(config.by_side)
    with span("crop"):
        if pixels.device.type == "cuda":
            from .crop_kernels import crop_side

            pairs = zip(cuts, sides, strict=True)
            return tuple(crop_side(pixels, start, size, own, side) for own, side in pairs)
        shapes = crop_shapes(config, len(size))
        crops = tuple(torch.empty(shape, dtype=torch.uint8) for shape in shapes)
        images = Images.of_pixels(pixels.data_ptr() + np.asarray(start), size)
        run_in_threads(Job(images, cuts, sides, crops))
        return crops
