"""The photometric augmentations on a GPU: Triton kernels, bit-identical to the reference.

- Blends repeat the reference's float32 arithmetic step by step. The kernels are compiled without
  fused multiply-adds, which would round once where PIL rounds twice.
- Hue in float32 truncates like PIL's mix of float and double, for all 2**24 colours and 256 shifts;
  see ``cuda_colours``.
- Luma, the mean for contrast, and the blur are sums of integers.
- Solarising, normalisation and rounding to ``dtype`` are lookups in a 3 x 256 table per threshold
  in the batch, computed by the reference.

The blur keeps PIL's six passes: three box filters along each axis, each rounded to integers. A
single composed filter would round differently.

For the views of one size, a batch launches an upload of parameters, the colour kernel, and the blur
kernels for rows and for columns, all on the current stream, without synchronising with the host.
The colour kernel is limited by instructions, the blurs by memory or nearly so; see
docs/performance.md for the counts.

Wider boxes, from a sigma of 2.45 on, and sides that are not multiples of 16 are blurred in six
separate passes of 105 to 143 instructions per pixel. Views with odd sides are copied before and
after the colour kernel, to align them to 32-bit words.
"""

from __future__ import annotations

import contextlib
import os
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fastsiam.config import AugmentConfig
from fastsiam.errors import BackendError
from fastsiam.files import check_private_folder, create_private_folder, why
from fastsiam.views.batch import to_device
from fastsiam.views.draws import CONTRAST, HUE

from . import cuda_blur, cuda_colours
from .operations import Operations, augment_by_size
from .reference import box_weights, normalize, solarise

# Check this before a kernel is compiled or read from the cache.
_TRITON = os.environ.get("TRITON_HOME") or "~"
_CACHE = Path(os.environ.get("TRITON_CACHE_DIR") or f"{_TRITON}/.triton/cache")
with contextlib.suppress(OSError):  # Triton reports it
    create_private_folder(_CACHE)
check_private_folder(
    _CACHE,
    what="Triton's compiled code",
    instead="set TRITON_CACHE_DIR to a folder of your own",
)

_BLOCK = 1024  # values per program of ``box_blur``
_COMPILER = {"enable_fp_fusion": False}


def _finish(
    crops: Tensor, operations: Operations, config: AugmentConfig, dtype: torch.dtype
) -> Tensor:
    """Augment crops of the same size; see ``operations.Finish``.

    The crops must be on a GPU, or on the CPU for Triton's interpreter.
    """
    if dtype == torch.float64:
        return _finish(crops, operations, config, torch.float32).double()
    side = crops.shape[1]
    assert crops.dtype == torch.uint8 and dtype.itemsize in (2, 4)
    crops = crops.contiguous()
    if crops.storage_offset() % 16:  # a user's transform may return part of a larger tensor
        crops = crops.clone()
    rows, narrow = _boxes(operations, side)
    thresholds, table = np.unique(operations.solarise, return_inverse=True)
    lookup, views, boxes = _upload(
        _lookup(config, dtype, tuple(thresholds.tolist())),
        *(torch.from_numpy(array) for array in (_views(operations, table), rows)),
        device=crops.device,
    )
    bits = lookup.view(torch.int32 if dtype.itemsize == 4 else torch.int16)
    with torch.cuda.device_of(crops):
        levels, out = _change_colours(crops, views, bits, dtype)
        _blur_narrow(boxes[:narrow], views, bits, levels, out)
        _blur_wide(boxes[narrow:], views, bits, levels, out)
    return out.permute(0, 3, 1, 2)


photometric = partial(augment_by_size, _finish)
"""GPU implementation of ``fastsiam.views.photometric.photometric``."""


def check_compiler() -> None:
    """Check that Triton can compile the C code that launches its kernels.

    Raises:
        BackendError: it cannot; the message says what to install.
    """
    try:
        _ = triton.runtime.driver.active.utils
    except Exception as error:  # such as a missing compiler, missing headers, a corrupt cache
        raise BackendError(
            f"Triton cannot start its kernels ({why(error)}): install a C compiler and Python's "
            "headers (apt-get install gcc python3-dev), or pass --pipeline torchvision"
        ) from error


def _change_colours(
    crops: Tensor, views: Tensor, lookup: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Apply jitter and gray to crops (M, S, S, 3).

    Returns:
        Levels of the views that will be blurred, and results of the others: (M, S, S, 3) each.
    """
    count, side, _, _ = crops.shape
    values, source = 3 * side * side, crops.flatten(1)
    if side % 2:  # pad each view to a multiple of four pixels, which are three words
        source = F.pad(source, (0, -values % 12))
    levels, out = torch.empty_like(source), torch.empty_like(source, dtype=dtype)
    threads = min(256, triton.next_power_of_2(triton.cdiv(side * side, 4)))
    cuda_colours.change_colours[(count,)](
        *(_words(source), views, lookup, _words(levels), _words(out), side * side, threads),
        num_warps=max(1, threads // 32),
        **_COMPILER,
    )
    levels, out = (x[:, :values].contiguous().view(crops.shape) for x in (levels, out))
    return levels, out


def _blur_narrow(boxes: Tensor, views: Tensor, lookup: Tensor, levels: Tensor, out: Tensor) -> None:
    """Blur views with narrow boxes, from ``levels`` to ``out``."""
    if len(boxes):
        side, lines = levels.shape[1], cuda_blur.LINES.value
        levels, out = _words(levels), _words(out)
        rows, columns = triton.cdiv(side, lines), triton.cdiv(side // 4 * 3, lines)
        cuda_blur.blur_rows[(len(boxes) * rows,)](levels, boxes, side, num_warps=1, **_COMPILER)
        cuda_blur.blur_columns[(len(boxes) * columns,)](
            levels, boxes, views, lookup, out, side, num_warps=1, **_COMPILER
        )


def _blur_wide(boxes: Tensor, views: Tensor, lookup: Tensor, levels: Tensor, out: Tensor) -> None:
    """Blur views with boxes of any width, from ``levels`` to ``out``, in six passes."""
    if len(boxes):
        side = levels.shape[1]
        blocks, buffer = triton.cdiv(3 * side * side, _BLOCK), torch.empty_like(levels)
        for number in range(6):
            is_last, stride = number == 5, 3 if number < 3 else 3 * side
            source, target = (buffer, levels) if number % 2 else (levels, buffer)
            cuda_blur.box_blur[(len(boxes) * blocks,)](
                *(source, out.view(lookup.dtype) if is_last else target, boxes, views, lookup),
                *(side, stride, is_last, blocks, _BLOCK),
                **_COMPILER,
            )


def _words(x: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as 32-bit words."""
    return x.flatten().view(torch.int32)


def _views(operations: Operations, table: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the parameters of M views, (M, COLUMNS); see the columns in ``cuda_colours``.

    Args:
        operations: operations of the views.
        table: (M,) index of each view's lookup table.
    """
    constants, octal = cuda_colours, 8 ** np.arange(5)
    blurred, contrast = operations.blur > 0, operations.order == CONTRAST
    codes = np.column_stack([operations.order + 1, operations.gray * constants.GRAY.value])
    divisor = octal[contrast.argmax(1)]  # without contrast argmax is 0: all operations are in REST
    factor = operations.factor.astype(np.float64)
    factor[:, HUE] = np.trunc(factor[:, HUE] * 255) % 256
    views = np.zeros((len(codes), constants.COLUMNS.value), np.float32)
    views[:, constants.FACTORS.value : constants.FACTORS.value + 4] = factor
    views[:, constants.TABLE.value] = table * (3 * 256)
    views[:, constants.MEAN.value] = contrast.any(1)
    views[:, constants.FIRST.value] = codes @ octal % divisor
    views[:, constants.REST.value] = codes @ octal // divisor
    views[:, constants.BLURRED.value] = blurred
    return views


def _boxes(operations: Operations, side: int) -> tuple[NDArray[np.float32], int]:
    """Return the boxes of the blurred views, (B, 4), narrow ones first, and how many are narrow.

    A row has the weight of the box's inner pixels, that of its two ends, its radius, and the view.
    """
    inner, outer, radius = box_weights(operations.blur[operations.blurred])
    narrow = (radius <= cuda_blur.WIDEST) & (side % cuda_blur.MULTIPLE == 0)
    boxes = np.stack([inner, outer, radius, operations.blurred], axis=1).astype(np.float32)
    return boxes[np.argsort(~narrow, kind="stable")], int(narrow.sum())


@lru_cache(maxsize=64)
def _lookup(config: AugmentConfig, dtype: torch.dtype, thresholds: tuple[int, ...]) -> Tensor:
    """Tabulate the solarised, normalised value of each level in each channel.

    Returns:
        (K, 3, 256) of ``dtype``, one table for each of K thresholds.
    """
    levels = (
        torch.arange(256, dtype=torch.float32, device="cpu")
        .view(1, 1, 1, 256)
        .expand(len(thresholds), 3, 1, 256)
    )
    levels = solarise(levels, torch.tensor(thresholds, device="cpu"))
    return normalize(levels, config).view(-1, 3, 256).to(dtype)


def _upload(*tables: Tensor, device: torch.device) -> list[Tensor]:
    """Copy tables to the device in a single copy: each costs the host as much as a launch."""
    parts = [table.flatten().view(torch.uint8) for table in tables]
    copies = to_device(torch.cat(parts).numpy(), device).split([len(part) for part in parts])
    return [
        copy.view(table.dtype).view(table.shape) for copy, table in zip(copies, tables, strict=True)
    ]
