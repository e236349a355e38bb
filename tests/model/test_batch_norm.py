"""BN over a batch of several views equals torch's BN over each view separately."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fastsiam.model.batch_norm import ViewBatchNorm, groups_of, recomputation, use_view_batch_norm


def bn(kind: Any = nn.BatchNorm2d, **settings: Any) -> Any:
    torch.manual_seed(0)
    layer = kind(6, **settings)
    if layer.weight is not None:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "shape", "settings"),
    [
        (nn.BatchNorm2d, (16, 6, 5, 7), {}),
        (nn.BatchNorm1d, (16, 6), {}),
        (nn.BatchNorm1d, (16, 6), {"affine": False}),
    ],
)
def test_joint_views_are_normalised_separately(
    kind: type[nn.Module],
    shape: tuple[int, ...],
    settings: dict[str, Any],
    dtype: torch.dtype,
    compiling: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare output, gradients and running statistics with torch's BN, called once per view.

    This covers torch's kernels and the formula that the compiler receives.
    """
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    reference, layer = bn(kind, **settings), bn(kind, **settings)
    use_view_batch_norm(layer, images=8)
    assert isinstance(layer, ViewBatchNorm)
    x = torch.randn(shape) * torch.linspace(0.2, 5, 16).view(-1, *[1] * (len(shape) - 1)) + 3
    x, weight = x.to(dtype), torch.randn(shape)
    if len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    outs = layer(ours), torch.cat([reference(view) for view in theirs.chunk(2)])
    for out in outs:
        (out.float() * weight).sum().backward()
    exact = dtype == torch.float32
    close: Any = {"atol": 1e-4, "rtol": 1e-4} if exact else {"atol": 0.1, "rtol": 0.02}
    torch.testing.assert_close(*outs, **close)
    torch.testing.assert_close(ours.grad, theirs.grad, **close)
    if layer.weight is not None:
        torch.testing.assert_close(layer.weight.grad, reference.weight.grad, **close)
        torch.testing.assert_close(layer.bias.grad, reference.bias.grad, **close)
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(layer.get_buffer(name), buffer, atol=1e-5, rtol=1e-5)
    assert layer.state_dict().keys() == reference.state_dict().keys()
    if len(shape) == 4:
        assert outs[0].is_contiguous(memory_format=torch.channels_last)
        assert ours.grad is not None
        assert ours.grad.is_contiguous(memory_format=torch.channels_last)


def test_groups_of_counts_bn_groups() -> None:
    """Count the groups for a view with 16 images on each of 4 ranks."""
    layer = nn.Sequential(bn())
    assert groups_of(layer, 16, 4) == 4
    for images, groups in ((0, 4), (16, 4), (8, 8), (2, 32)):
        use_view_batch_norm(layer, images=images)
        assert groups_of(layer, 16, 4) == groups
    assert groups_of(nn.Linear(2, 2), 16, 4) == 4


@pytest.mark.parametrize("images", [0, 8, 12])
def test_one_view_or_less_is_bitwise_equal_to_torch(images: int) -> None:
    reference, layer = bn(), bn()
    use_view_batch_norm(layer, images=images)
    x = torch.randn(8, 6, 5, 5)
    for training in (True, False):
        reference.train(training)
        layer.train(training)
        assert torch.equal(layer(x), reference(x))
        assert all(map(torch.equal, layer.buffers(), reference.buffers()))


def test_incomplete_last_view_is_rejected() -> None:
    layer = bn()
    use_view_batch_norm(layer, images=8)
    with pytest.raises(ValueError, match="BN got 12 images, which is not a multiple of 8; pass"):
        layer(torch.randn(12, 6, 5, 5))


def test_recomputation_does_not_update_running_statistics() -> None:
    for images in (0, 4):
        layer = bn()
        use_view_batch_norm(layer, images=images)
        before = [buffer.clone() for buffer in layer.buffers()]
        with recomputation():
            again = layer(torch.randn(8, 6, 5, 5, generator=torch.Generator().manual_seed(0)))
        assert all(map(torch.equal, layer.buffers(), before))
        first = layer(torch.randn(8, 6, 5, 5, generator=torch.Generator().manual_seed(0)))
        assert torch.equal(again, first) and not torch.equal(layer.running_mean, before[0])
