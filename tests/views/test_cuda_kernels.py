"""The GPU kernels without a GPU: run by Triton's interpreter, and compiled for sm_90.

Results must be bitwise equal: photometric kernels to the reference, crops to PIL (Pillow 13, see
``fastsiam.pipelines.crop_kernels``). tests/gpu repeats the comparisons on a GPU.
"""

# ruff: noqa: E402 (imports that need Triton follow the check for it)
from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import permutations
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fastsiam.config import AugmentConfig
from fastsiam.views.draws import BRIGHTNESS, CONTRAST, HUE, SATURATION, ViewParams, draw_views
from fastsiam.views.photometric import reference
from tests.conftest import import_or_skip
from tests.processes import Forked
from tests.tiers import rest_slow, slow
from tests.views.cases import UNEQUAL
from tests.without_gpu.fake_gpu import TritonDriver

# torch installs Triton where CUDA GPUs are supported.
import_or_skip("triton", allow_module_level=True)

from fastsiam.pipelines import crop_kernels
from fastsiam.pipelines.cuts import cut_views
from fastsiam.pipelines.job import crop_views
from fastsiam.views.photometric import cuda as photometric_cuda
from tests.views.kernel_checks import (
    Run,
    assert_equal_pil,
    assert_equal_reference,
    crops_of_sides,
)

OFF = AugmentConfig.alike(jitter_p=0, gray_p=0, blur_p=0)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Run]:
    """Call a function in a process in which Triton interprets kernels on the CPU.

    Triton decides this at its import and patches its own functions, so it needs a process.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(int).result()
        yield lambda function, *a, **k: pool.submit(function, *a, **k).result()


@pytest.fixture(scope="module")
def photographs(real_images: Path) -> list[Image.Image]:
    return [Image.open(file).convert("RGB") for file in sorted(real_images.glob("*/*.JPEG"))[:26]]


def draw(config: AugmentConfig, count: int, **changes: Any) -> ViewParams:
    size = [(config.crop, config.crop)] * count
    params = draw_views(config, seed=0, epoch=0, index=np.arange(count), size=size)
    return replace(params, **changes)


def jitter_params(op: int) -> dict[str, Any]:
    """Return parameters of a single jitter operation, with factors over its entire range."""
    low, high = (-0.5, 0.5) if op == HUE else (0.0, 2.0)
    order = np.full((2, 2, 4), -1, np.int8)
    order[..., 2] = op
    factor = np.linspace(low, high, 4, dtype=np.float32).reshape(2, 2, 1).repeat(4, 2)
    return {"order": order, "factor": factor, "jitter": np.ones((2, 2), np.bool_)}


def solarise_params(sigma: float) -> dict[str, Any]:
    """Return thresholds from all to none, for views with either kind of blur and without blur."""
    threshold = np.array([[0, 90], [256, 255]], np.int16)
    return {"solarise": threshold, "blur": np.array([[sigma, 4 * sigma], [0, sigma]], "f4")}


FULL, HALF = torch.float32, torch.bfloat16
ORDERS = np.array(list(permutations(range(4))), np.int8).reshape(2, 12, 4)
SIGMAS = np.geomspace(0.05, 6, 6).astype(np.float32).reshape(2, 3)
CASES: dict[str, tuple[AugmentConfig, dict[str, Any], int, torch.dtype]] = {
    # A view of 33 pixels needs several programs; from 19 pixels on, blur uses several per view.
    **{
        f"jitter {op}": (OFF.changed(crop=33), jitter_params(op), 2, FULL)
        for op in (HUE, SATURATION, CONTRAST, BRIGHTNESS)
    },
    "every order": (OFF.changed(crop=19, jitter_p=1), {"order": ORDERS}, 12, FULL),
    # From boxes of less than three pixels to boxes wider than the view.
    **{
        f"blur of {side}": (OFF.changed(crop=side, blur_p=1), {"blur": SIGMAS}, 3, FULL)
        for side in (19, 1, 5, 40)
    },
    # Boxes of radius 0 and 1, which have separate kernels.
    "blur of 32": (
        OFF.changed(crop=32, blur_p=1), {"blur": np.array([[1.3], [1.5]], "f4")}, 1, HALF
    ),
    **{
        f"solarise {side}": (OFF.changed(crop=side, gray_p=gray), solarise_params(sigma), 2, FULL)
        for side, gray, sigma in ((19, 0.0, 1.1), (16, 1.0, 0.0))
    },
    "float64": (AugmentConfig.alike(crop=8), {}, 2, torch.float64),
    **{f"sides, {dtype}": (UNEQUAL, {}, 3, dtype) for dtype in (FULL, HALF)},
    **{
        f"strided, {dtype}": (AugmentConfig.alike(crop=20), {}, 6, dtype)
        for dtype in (HALF, FULL, torch.float16)
    },
}  # fmt: skip
SLOW = {f"jitter {op}" for op in (SATURATION, CONTRAST, BRIGHTNESS)}
SLOW |= {f"blur of {side}" for side in (1, 5, 40)} | {f"sides, {HALF}", f"strided, {FULL}"}
SLOW |= {f"strided, {torch.float16}"}


@pytest.mark.parametrize("case", [slow(c) if c in SLOW else c for c in CASES])
def test_photometric_kernels_equal_reference(
    case: str, interpreter: Run, photographs: list[Image.Image]
) -> None:
    config, changes, count, dtype = CASES[case]
    params, crops = draw(config, count, **changes), crops_of_sides(photographs, count, config)
    if case.startswith("strided"):
        assert params.blur.any() and params.gray.any() and not params.jitter.all()
        crops = tuple(crop.transpose(2, 3) for crop in crops)
    before = [crop.clone() for crop in crops]
    views = assert_equal_reference(interpreter, crops, params, config, dtype)
    assert all(map(torch.equal, crops, before))
    assert [view.shape[2] for view in views] == [view.crop for view in config.views]
    same = reference.photometric(
        crops,
        draw(config.changed(jitter_p=0, gray_p=0, blur_p=0, solarise_p=0), count),
        config,
    )
    gap = max(float((a - b).abs().mean()) for a, b in zip(views, same, strict=True))
    assert gap > 0.1 or case == "blur of 1"


def test_crops_of_different_sides_equal_cpu(interpreter: Run) -> None:
    """The kernels of each side are compared with the CPU's crops."""
    random = np.random.default_rng(0)
    size = np.array([[25, 40]])
    start, pixels = np.zeros(1, np.int64), torch.from_numpy(random.integers(0, 256, 3000, np.uint8))
    params = draw_views(UNEQUAL, seed=0, epoch=0, index=np.arange(1), size=size)
    expected = crop_views(pixels, start, size, params, UNEQUAL)
    assert [crop.shape[:3] for crop in expected] == [(2, 1, 24), (3, 1, 12)]
    for cuts, crop in zip(cut_views(params, UNEQUAL), expected, strict=True):
        actual = interpreter(crop_kernels.crop_side, pixels, start, size, cuts, crop.shape[2])
        assert torch.equal(actual, crop)


@pytest.mark.parametrize("side", rest_slow([5, 1, 17, 24]))
def test_crops_of_any_size_equal_pil(side: int, interpreter: Run) -> None:
    """Noise of all shapes, from one pixel to several times the crop's side; both axis orders."""
    random = np.random.default_rng(side)
    sizes = random.integers(1, 3 * side + 16, (5, 2)).tolist()
    sizes += [(1, 1), (1, 30), (30, 1), (side, side), (2 * side + 40, 3)]
    noise = [random.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
    images = [Image.fromarray(pixels) for pixels in noise]
    params = assert_equal_pil(
        interpreter, images, side, scale_min=0.05, ratio_min=0.1, ratio_max=10
    )
    excess = params.box[..., 2:] - side
    vertical_first = (excess[..., 0] > 0) & (excess[..., 0] > 2 * excess[..., 1])
    assert vertical_first.any() and not vertical_first.all()
    assert params.flip.any() and not params.flip.all()


def compile_for_sm_90() -> None:
    """Compile the kernels of four batches for sm_90, without launches, in a separate process.

    Print the number of kernels after each batch, their PTX code by name, and for each the registers
    and local memory per thread.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    run, kernels = JITFunction.run, dict[str, Any]()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        kernels[kernel.hash] = kernel

    driver.set_active(TritonDriver())
    JITFunction.run = compile_only
    config, counts = AugmentConfig.alike(crop=224), []
    for seed in range(4):
        n, pixels = 5 + seed, 375 * 500 * 3
        size = np.array([(375, 500)] * n)
        params = draw_views(config, seed=seed, epoch=0, index=np.arange(n), size=size)
        source = torch.zeros(n * pixels, dtype=torch.uint8)
        (cuts,) = cut_views(params, config)
        crops = crop_kernels.crop_side(source, np.arange(n) * pixels, size, cuts, 224)
        photometric_cuda.photometric((crops,), params, config, dtype=torch.bfloat16)
        counts.append(len(kernels))
    code = {kernel.metadata.name: kernel.asm["ptx"] for kernel in kernels.values()}
    print(json.dumps([counts, code, {k.metadata.name: usage(k) for k in kernels.values()}]))


def usage(kernel: Any) -> tuple[int, int]:
    """Return a compiled kernel's registers and bytes of local memory per thread."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        result = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    used = {name: int(size) for name, size in re.findall(r"(REG|STACK|LOCAL):(\d+)", result.stdout)}
    return used["REG"], used["STACK"] + used["LOCAL"]


def test_kernels_compile_once_without_fma() -> None:
    """Later batches compile no new kernels. Fused multiply-adds would round differently from PIL.

    The photometric kernels access words instead of bytes, and do not spill registers.
    """
    result = Forked(compile_for_sm_90).wait()
    assert result.returncode == 0, result.stderr
    counts, code_of, used = json.loads(result.stdout)
    assert counts == [5] * 4  # two for crops, one for colours, two for blur
    code = "".join(code_of.values())
    assert "div.rn." in code
    assert "fma." not in code and "div.full" not in code
    for name in ("change_colours", "blur_rows", "blur_columns"):
        registers, local = used[name]
        assert registers <= 128 and local == 0
        assert not re.search(r"\b(ld|st)\.global\S*\.[bus]8\b", code_of[name])
