"""Batch normalisation of each view separately, on one rank or synchronised over several.

BN is the only layer whose output for an image depends on the rest of the batch. So it must know
which images belong to the same view, and which ranks have the rest of the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules._functions import SyncBatchNorm as TorchSyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from fastsiam.collectives import gather_with_gradient

_recomputing = False


class ViewBatchNorm(_BatchNorm):
    """A ``BatchNorm`` that normalises each view of a batch separately, over one or several ranks.

    In training mode it behaves as if it were called once for each view of the global batch: each
    view is normalised by its own mean and variance over all ranks of the group, and updates the
    running statistics in turn. In evaluation mode it is a plain ``BatchNorm``. Its parameters,
    buffers and state dict keys are those of ``BatchNorm``. Batches must have the same shape on all
    ranks.

    Statistics are float32, as in torch's kernels. With a group, each layer communicates once in
    each pass, for all views together. The forward pass gathers means and variances, so that they
    can be combined without cancellation. The backward pass reduces their gradients.
    """

    images: int = 0
    """Number of consecutive images that share statistics: a view, or a part of one. With 0, and in
    smaller batches, the entire batch shares them."""
    group: dist.ProcessGroup | None = None
    """Ranks that share statistics; None means this rank alone."""

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.dim() >= 2

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (views * N, C, ...), in any floating type, over all axes except C.

        Raises:
            ValueError: the batch size exceeds that of a view, but is not a multiple of it.
        """
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        has_several_views = 0 < self.images < len(input)
        views, remainder = divmod(len(input), self.images) if has_several_views else (1, 0)
        if remainder:
            raise ValueError(
                f"BN got {len(input)} images, which is not a multiple of {self.images}; pass the "
                "views through Method.by_view"
            )
        assert self.num_batches_tracked is not None and self.momentum is not None
        assert self.running_mean is not None and self.running_var is not None
        running = self.running_mean, self.running_var
        if _recomputing:
            # Copies instead of None, so that torch's kernel saves the same tensors for backward.
            running = self.running_mean.clone(), self.running_var.clone()
        else:
            self.num_batches_tracked += views
        if not torch.compiler.is_compiling():  # use torch's own kernels
            if self.group is None:
                parts = [
                    F.batch_norm(
                        part, *running, self.weight, self.bias, True, self.momentum, self.eps
                    )
                    for part in input.chunk(views)
                ]
                return torch.cat(parts) if views > 1 else parts[0]
            if views == 1 and input.is_cuda:
                out: Tensor = TorchSyncBatchNorm.apply(
                    input, self.weight, self.bias, *running, self.eps, self.momentum,
                    self.group, self.group.size(),
                )  # fmt: skip
                return out
        return self._normalise(input, views, *running)

    def _normalise(
        self, input: Tensor, views: int, running_mean: Tensor, running_var: Tensor
    ) -> Tensor:
        """Normalise with elementwise operations, which ``torch.compile`` fuses.

        Channels are the last dimension during the computation, because otherwise the compiler loses
        the layout of the five-dimensional tensor and copies it. The result is cast after the
        permutation, because otherwise torch 2.11 writes NCHW gradients.
        """
        x = input.movedim(1, -1).unflatten(0, (views, -1))  # (views, N, ..., C)
        axes = tuple(range(1, x.dim() - 1))
        x_float = x.float()
        var, mean = torch.var_mean(x_float, axes, correction=0, keepdim=True)
        count = x.numel() // (views * x.shape[-1])
        if self.group is not None:
            # Every rank has the same number of samples.
            moments = torch.stack([mean, var])[None]
            means, variances = gather_with_gradient(moments, self.group).unbind(1)
            mean = means.mean(0)
            var = variances.mean(0) + (means - mean).square().mean(0)
            count *= self.group.size()
        assert self.momentum is not None
        with torch.no_grad():
            unbiased = var * (count / max(1, count - 1))
            self._update_running(running_mean, mean.flatten(1))
            self._update_running(running_var, unbiased.flatten(1))
        scale = torch.rsqrt(var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        out: Tensor = (x_float * scale + shift).flatten(0, 1).movedim(-1, 1).to(input.dtype)
        return out

    def _update_running(self, running: Tensor, statistics: Tensor) -> None:
        """Update running statistics (C,) with the statistics of each part (parts, C), in order."""
        assert self.momentum is not None
        decay = 1 - self.momentum
        exponents = torch.arange(len(statistics) - 1, -1, -1, device=statistics.device)
        weights = self.momentum * decay**exponents
        running.mul_(decay ** len(statistics)).add_((weights[:, None] * statistics).sum(0))


class ViewBatchNormAct(ViewBatchNorm):
    """``ViewBatchNorm`` for timm's ``BatchNormAct2d``, which includes dropout and activation."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        """Normalise like ``ViewBatchNorm``, then apply dropout and activation."""
        out: Tensor = self.act(self.drop(super().forward(input)))
        return out


def unknown_batch_norm(module: nn.Module) -> str:
    """Return the class name of an unsupported batch normalisation layer, or "" if all work."""
    for child in module.modules():
        if _view_kind(child) is None and (
            isinstance(child, _BatchNorm)
            or "running_var" in dict(child.named_buffers(recurse=False))
        ):
            return type(child).__name__
    return ""


def use_view_batch_norm(
    module: nn.Module, *, images: int = 0, group: dist.ProcessGroup | None = None
) -> None:
    """Convert a module's BatchNorms to ``ViewBatchNorm``; parameters and buffers stay the same.

    Unsupported layers are left unchanged, so check for them with ``unknown_batch_norm`` first.

    Args:
        module: changed in place.
        images: number of consecutive images on this rank that share statistics: a view or a part of
            one; 0 means the entire batch.
        group: ranks that share statistics; None means this rank alone.
    """
    for child in module.modules():
        if (kind := _view_kind(child)) is not None:
            child.__class__ = kind
            assert isinstance(child, ViewBatchNorm)
            child.images, child.group = images, group


@contextlib.contextmanager
def recomputation() -> Iterator[None]:
    """Freeze running statistics while a pass is recomputed: the first pass has updated them."""
    global _recomputing
    previous, _recomputing = _recomputing, True
    try:
        yield
    finally:
        _recomputing = previous


def groups_of(module: nn.Module, images: int, ranks: int) -> int:
    """Return the number of equal parts of a view's global batch that BN normalises separately.

    Args:
        module: a module after ``use_view_batch_norm``; for other modules each rank is a part.
        images: images of the view on each rank.
        ranks: number of ranks.
    """
    for child in module.modules():
        if isinstance(child, ViewBatchNorm):
            ranks_per_group = 1 if child.group is None else child.group.size()
            return images // (child.images or images) * ranks // ranks_per_group
    return ranks


def _view_kind(module: nn.Module) -> type[ViewBatchNorm] | None:
    """Return the ``ViewBatchNorm`` class for a BatchNorm; None for other or unsupported layers."""
    if isinstance(module, ViewBatchNorm):
        return type(module)
    if not isinstance(module, _BatchNorm):
        return None
    if not module.track_running_stats or module.momentum is None:  # no exponential average
        return None
    if type(module).forward is _BatchNorm.forward:
        return ViewBatchNorm
    class_names = (kind.__name__ for kind in type(module).__mro__)
    return ViewBatchNormAct if "BatchNormAct2d" in class_names else None
