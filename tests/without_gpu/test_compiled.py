"""The compiled model as inductor writes it for an H200, without one: what is launched, and where.

Nothing of it runs, so nothing is known of its speed; tests/training/test_step.py has the numbers,
compiled for a CPU.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from fastsiam.methods import build_method
from fastsiam.model.batch_norm import use_view_batch_norm
from tests.rank_jobs import MODEL

from .fake_gpu import CUDA, Gpu

pytest.importorskip("triton")  # comes with torch where there can be a CUDA GPU

from .inductor import Code, cuda_code

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None, reason="needs a torch that knows cuDNN's layouts"
)

IMAGES = 8


def images(count: int, channels: int, side: int) -> Tensor:
    there = torch.empty(count, side, side, channels, dtype=torch.bfloat16, device=CUDA)
    return there.permute(0, 3, 1, 2)


def compiled(layers: nn.Module, *args: object) -> tuple[Code, Code]:
    """Return what becomes of a part of the model on the GPU, both views in one batch."""
    use_view_batch_norm(layers, images=IMAGES)
    layers = layers.to(CUDA).to(memory_format=torch.channels_last).train()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return cuda_code(layers, *args)


def assert_no_layout_turns(code: Code) -> None:
    """All images and weights are channels-last, and no kernel goes through memory in tiles."""
    assert code.images
    assert all(batch.stride[1] == 1 for batch in code.images), code.images
    assert "YBLOCK" not in code.text  # inductor's tiles, with which it transposes


def written(code: Code) -> Counter[tuple[int, ...]]:
    """Count, by their size, the batches of both views that new memory is taken for."""
    return Counter(batch.size for batch in code.images if batch.size[0] == 2 * IMAGES)


def test_bn_and_relu_are_one_pass_over_both_views(gpu: Gpu) -> None:
    """Of a convolution, BN, ReLU, convolution, BN: as the CPU's test has them."""
    layers = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
    )
    forward, backward = compiled(layers, images(2 * IMAGES, 16, 14))
    for code in (forward, backward):
        assert_no_layout_turns(code)
    assert forward.calls("extern_kernels.convolution") == 2  # each for both views
    assert backward.calls("convolution_backward") == 2
    # Statistics in two steps; running averages, small, beside them.
    assert sum("red_fused" in kernel for kernel in forward.kernels) == 2
    assert sum("rsqrt" in kernel for kernel in forward.kernels) == 2
    # The result of a BN and a ReLU; the last BN's is what comes out.
    assert written(forward) == {(2 * IMAGES, 32, 14, 14): 2}


def test_a_residual_block_writes_each_activation_once(gpu: Gpu) -> None:
    """The sum with the shortcut, its BN and the ReLU are one kernel; so is all that goes back.

    ReLUs that are done in place make copies, and turn layouts round, where BN returns a view.
    """
    shortcut = nn.Sequential(nn.Conv2d(16, 32, 1, 2, bias=False), nn.BatchNorm2d(32))
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
    layers = nn.Sequential(*stem, BasicBlock(16, 32, 2, shortcut))
    forward, backward = compiled(layers, images(2 * IMAGES, 3, 14))
    for code in (forward, backward):
        assert_no_layout_turns(code)
    stem_size, size = (2 * IMAGES, 16, 14, 14), (2 * IMAGES, 32, 7, 7)
    # Of the block: within it, its result, and where its ReLU lets gradients through.
    assert written(forward) == {stem_size: 1, size: 3}
    assert sum("red_fused" in kernel for kernel in backward.kernels) == 3  # two BNs read one
    assert max(written(backward).values()) == 1


def test_simsiam_is_one_graph_without_layout_turns(gpu: Gpu) -> None:
    """From the two views to the loss, and back."""
    method = build_method(MODEL)
    method.views_together = True
    views = images(IMAGES, 3, 16), images(IMAGES, 3, 16)
    forward, backward = compiled(method, views, torch.arange(IMAGES, device=CUDA))
    for code in (forward, backward):
        assert_no_layout_turns(code)
    convolutions = sum(isinstance(layer, nn.Conv2d) for layer in method.modules())
    assert forward.calls("extern_kernels.convolution") == convolutions
    assert backward.calls("convolution_backward") == convolutions
