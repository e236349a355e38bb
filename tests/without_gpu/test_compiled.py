"""The compiled model as inductor writes it for an H200, without one: what is launched, and where.

Nothing of it runs, so nothing is known of its speed; tests/train/test_compile.py has the
numbers, compiled for a CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from fastsiam.methods import build_method
from fastsiam.model.batch_norm import use_view_batch_norm
from tests.configs import model_of
from tests.networks import short_resnet10
from tests.tiers import rest_slow

from .fake_gpu import CUDA, fake_gpu

pytest.importorskip("triton")  # comes with torch where there can be a CUDA GPU

from .inductor import Code, cuda_code

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available(),
    reason="needs a torch that knows cuDNN's layouts, and no GPU",
)

IMAGES = 512  # small ones get other kernels, tiled ones among them


@pytest.fixture(scope="module")
def apart() -> Iterator[Executor]:
    """A process of its own: torch remembers for good whether there is a GPU with Triton."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield pool


def images(count: int, channels: int) -> Tensor:
    there = torch.empty(count, 32, 32, channels, dtype=torch.bfloat16, device=CUDA)
    return there.permute(0, 3, 1, 2)


def compiled(layers: nn.Module, channels: int = 0) -> tuple[Code, Code]:
    """Return layers, or a method, as they are on the GPU: both views in one batch."""
    use_view_batch_norm(layers, images=IMAGES)
    with fake_gpu(), torch.autocast("cuda", dtype=torch.bfloat16):
        layers = layers.to(CUDA).to(memory_format=torch.channels_last).train()
        if channels:
            return cuda_code(layers, images(2 * IMAGES, channels))
        views = images(IMAGES, 3), images(IMAGES, 3)
        return cuda_code(layers, views, torch.arange(IMAGES, device=CUDA))


def assert_no_layout_turns(code: Code) -> None:
    """All images and weights are channels-last, and no kernel goes through memory in tiles."""
    assert code.images
    assert all(batch.stride[1] == 1 for batch in code.images), code.images
    assert "YBLOCK" not in code.text  # inductor's tiles, with which it transposes


def written(code: Code) -> Counter[tuple[int, ...]]:
    """Count, by their size, the activations of both views that new memory is taken for."""
    of_views = (batch for batch in code.images if batch.size[0] == 2 * IMAGES)
    return Counter(batch.size for batch in of_views if batch.size[2:] != (3, 3))


def test_bn_and_relu_are_one_pass_over_both_views(apart: Executor) -> None:
    """Of a convolution, BN, ReLU, convolution, BN: as the CPU's test has them."""
    layers = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
    )
    forward, backward = apart.submit(compiled, layers, 16).result()
    for code in (forward, backward):
        assert_no_layout_turns(code)
    assert forward.calls("extern_kernels.convolution") == 2  # each for both views
    assert backward.calls("convolution_backward") == 2
    # Those that turn sums of parts into the scale of both views: one for each BN.
    assert sum("rsqrt" in kernel for kernel in forward.kernels) == 2
    assert written(forward) == {(2 * IMAGES, 32, 32, 32): 2}  # by the ReLU and by the last BN


def test_a_residual_block_writes_each_activation_once(apart: Executor) -> None:
    """The sum with the shortcut, its BN and the ReLU are one kernel."""
    shortcut = nn.Sequential(nn.Conv2d(64, 128, 1, 2, bias=False), nn.BatchNorm2d(128))
    stem = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)
    layers = nn.Sequential(*stem, BasicBlock(64, 128, 2, shortcut))
    forward, backward = apart.submit(compiled, layers, 3).result()
    for code in (forward, backward):
        assert_no_layout_turns(code)
    # Of the block: within it, its result, and where its ReLU lets gradients through.
    assert written(forward) == {(2 * IMAGES, 64, 32, 32): 1, (2 * IMAGES, 128, 16, 16): 3}


@pytest.mark.parametrize("network", rest_slow(["short", "whole"]))
def test_simsiam_is_one_graph_without_layout_turns(network: str, apart: Executor) -> None:
    """From the two views to the loss, and back; the blocks between have a test above."""
    with short_resnet10() if network == "short" else nullcontext():
        method = build_method(model_of(backbone="resnet10", stem="cifar"))
    method.views_together = True
    convolutions = sum(isinstance(layer, nn.Conv2d) for layer in method.modules())
    forward, backward = apart.submit(compiled, method).result()
    for code in (forward, backward):
        assert_no_layout_turns(code)
    assert forward.calls("extern_kernels.convolution") == convolutions
    assert backward.calls("convolution_backward") == convolutions
