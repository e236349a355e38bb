"""The photometric augmentations on the CPU: compiled, vectorised and multithreaded.

One thread applies all operations to a view, in chunks that fit in the L1 cache. It takes two
passes, because contrast needs the mean of the entire view. Every operation rounds like the
reference, so views are bit-identical to it before normalisation. The code is in
``fastsiam/kernels/source``: photometric.cpp, colours.cpp, blur.cpp and layout.cpp.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.kernels import library
from fastsiam.kernels.buffers import BufferPool
from fastsiam.kernels.threads import in_threads

from . import reference
from .operations import Operations, augment_by_size
from .reference import box_weights

_TYPES = {
    torch.float32: (0, np.float32),
    torch.bfloat16: (1, np.uint16),
    torch.float16: (2, np.uint16),
}
"""Output dtypes of the kernels: their code in C++, and a numpy dtype of the same size."""
_buffers = BufferPool(8)
"""Memory for views: up to eight batches may be ready or in use when an epoch ends."""


def free_buffers() -> None:
    """Free the memory of views that nothing uses."""
    _buffers.clear()


def _finish(
    crops: Tensor, operations: Operations, config: AugmentConfig, dtype: torch.dtype
) -> Tensor:
    """Augment crops of the same size; see ``operations.Finish``."""
    count, height, width, _ = crops.shape
    pixels = crops.contiguous().numpy()
    stage = Stage(operations, config, height, width, dtype)
    finish, counter = library.kernels().fastsiam_finish, np.zeros(1, np.int64)

    def work() -> None:
        address, counter_address = library.at(pixels, np.uint8), library.at(counter)
        if finish(address, count, height, width, stage.compiled, counter_address) >= 0:
            raise MemoryError(
                f"not enough memory to augment a crop of {height} x {width} pixels: "
                "use smaller crops"
            )

    in_threads(work, count)
    return stage.views()


photometric = partial(augment_by_size, _finish)
"""CPU implementation of ``fastsiam.views.photometric.photometric``."""


class Stage:
    """Parameters and output memory of M crops of the same size, for the C++ kernels.

    Args:
        what: operations of each crop.
        config: settings with the mean and standard deviation.
        height: height of the crops in pixels.
        width: width of the crops in pixels.
        dtype: dtype of the views.
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
        self.shape = count, height, width, 3
        """Shape of the crops: (M, height, width, 3)."""
        mean, std = np.array(config.mean), np.array(config.std)
        output_dtype = dtype if dtype in _TYPES and library.writes_halves() else torch.float32
        number, kind = _TYPES[output_dtype]
        self._output_dtype, self._dtype = output_dtype, dtype
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
        self._arrays = arrays  # keeps them alive while their addresses are used
        self.compiled = library.FinishOf(*map(library.at, arrays), number)

    def views(self) -> Tensor:
        """Return the output as views (M, 3, height, width), channels-last."""
        views = torch.from_numpy(self._out).view(self._output_dtype).to(self._dtype)
        return views.view(self.shape).permute(0, 3, 1, 2)


def _boxes(sigma: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return each view's box blur (M, 3): inner weight, outer weight, radius; all 0: no blur."""
    box = np.zeros((len(sigma), 3), np.uint32)
    blurred = sigma > 0
    if blurred.any():
        box[blurred] = np.stack(box_weights(sigma[blurred]), axis=1)
    return box


def normalize(crops: Tensor, config: AugmentConfig, dtype: torch.dtype) -> Tensor:
    """Normalise crops with a lookup table of the 256 levels; see ``photometric.normalize``."""
    levels = torch.arange(256, dtype=torch.float32, device="cpu")
    levels = levels.view(256, 1, 1, 1).expand(256, 3, 1, 1)
    table = reference.normalize(levels, config).reshape(256, 3).to(dtype).contiguous()
    source, out = crops.contiguous(), torch.empty(crops.shape, dtype=dtype, device="cpu")
    look_up, counter = library.kernels().fastsiam_normalize, np.zeros(1, np.int64)
    count, pixels = len(crops), crops.shape[1] * crops.shape[2]

    def work() -> None:
        look_up(
            source.data_ptr(),
            count,
            pixels,
            table.data_ptr(),
            dtype.itemsize,
            out.data_ptr(),
            library.at(counter),
        )

    in_threads(work, count)
    return out.permute(0, 3, 1, 2)
