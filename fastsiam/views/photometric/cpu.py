"""The photometric stage on the CPU: compiled, vectorised, in threads.

One thread takes a view through the whole stage, in chunks that stay in the processor's first cache,
and in two sweeps, because the contrast operation needs the mean of the whole view. Every operation
rounds as the reference does; views before normalisation are equal to it to the last bit. The code
is in ``fastsiam/kernels/source``: photometric.cpp, colours.cpp, blur.cpp and layout.cpp.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.kernels import library
from fastsiam.kernels.buffers import BufferPool
from fastsiam.kernels.threads import in_threads
from fastsiam.views.batch import Crops
from fastsiam.views.draws import ViewParams

from . import reference
from .operations import Operations, side_by_side
from .reference import box_weights

_TYPES = {
    torch.float32: (0, np.float32),
    torch.bfloat16: (1, np.uint16),
    torch.float16: (2, np.uint16),
}
"""What the kernels write: their number for it, and numpy's type of the same size."""
_buffers = BufferPool(8)
"""Memory of views: eight batches may be ready or in use when an epoch ends."""


def photometric(
    crops: Crops, params: ViewParams, config: AugmentConfig, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Do what ``fastsiam.views.photometric.photometric`` says."""
    return side_by_side(_finish, crops, params, config, dtype)


def _finish(crops: Tensor, what: Operations, config: AugmentConfig, dtype: torch.dtype) -> Tensor:
    """Take crops of one side through the stage; see ``operations.Finish``."""
    count, height, width, _ = crops.shape
    pixels = crops.contiguous().numpy()
    stage = Stage(what, config, height, width, dtype)
    finish, taken = library.kernels().fastsiam_finish, np.zeros(1, np.int64)

    def work() -> None:
        crops, at_work = library.at(pixels, np.uint8), library.at(taken)
        if finish(crops, count, height, width, stage.compiled, at_work) >= 0:
            raise MemoryError(
                f"no memory for the photometric stage of a crop of {height} x {width} pixels: "
                "use smaller crops"
            )

    in_threads(work, count)
    return stage.views()


class Stage:
    """The stage for M crops of one side, as compiled code takes it.

    Args:
        what: is done to each of them.
        config: for the normalisation.
        height: of the crops, in pixels.
        width: of the crops, in pixels.
        dtype: of the result.
    """

    def __init__(
        self,
        what: Operations,
        config: AugmentConfig,
        height: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        count = len(what.order)
        self._shape = (count, height, width, 3)
        mean, std = np.array(config.mean), np.array(config.std)
        written = dtype if dtype in _TYPES and library.writes_halves() else torch.float32
        number, kind = _TYPES[written]
        self._written, self._dtype = written, dtype
        self._out = _buffers.array((count, 3 * height * width), kind)
        arrays: list[NDArray[Any]] = [
            np.ascontiguousarray(what.order, np.int8),
            np.ascontiguousarray(what.factor, np.float32),
            np.ascontiguousarray(what.gray, np.bool_),
            _boxes(what.blur),
            np.ascontiguousarray(what.solarise, np.int16),
            (1 / (255 * std)).astype(np.float32),
            (-mean / std).astype(np.float32),
            self._out,
        ]
        self._arrays = arrays  # they live as long as their addresses are used
        self.compiled = library.FinishOf(*map(library.at, arrays), number)

    def views(self) -> Tensor:
        """Return the views (M, 3, height, width), channels-last."""
        views = torch.from_numpy(self._out).view(self._written).to(self._dtype)
        return views.view(self._shape).permute(0, 3, 1, 2)


def _boxes(sigma: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return (M, 3) of each view's box blur: inner weight, outer weight, whole radius; 0: none."""
    box = np.zeros((len(sigma), 3), np.uint32)
    blurred = sigma > 0
    if blurred.any():
        box[blurred] = np.stack(box_weights(sigma[blurred]), axis=1)
    return box


def normalize(crops: Tensor, config: AugmentConfig, dtype: torch.dtype) -> Tensor:
    """Do what ``photometric.normalized`` says, in one pass: there are but 256 levels."""
    levels = torch.arange(256.0).view(256, 1, 1, 1).expand(256, 3, 1, 1)
    table = reference.normalize(levels, config).reshape(256, 3).to(dtype).contiguous()
    source, out = crops.contiguous(), torch.empty(crops.shape, dtype=dtype)
    look_up, taken = library.kernels().fastsiam_normalize, np.zeros(1, np.int64)
    count, pixels = len(crops), crops.shape[1] * crops.shape[2]

    def work() -> None:
        look_up(
            source.data_ptr(),
            count,
            pixels,
            table.data_ptr(),
            dtype.itemsize,
            out.data_ptr(),
            library.at(taken),
        )

    in_threads(work, count)
    return out.permute(0, 3, 1, 2)
