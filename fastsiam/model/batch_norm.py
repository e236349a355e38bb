"""Batch normalisation of a training step: of each view by itself, over one rank or several.

BN ties the images of a batch together, so it alone has to know what else lies in the batch (the
other view) and where the rest of it is (on other ranks). Everything else computes image by image.
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

from fastsiam.distributed import gather_with_gradient

_recomputing = False


class ViewBatchNorm(_BatchNorm):
    """A ``BatchNorm`` whose batch may hold several views and lie on several ranks.

    In training mode each view is normalised by its own mean and variance, taken over all ranks of
    the group, and moves the running statistics in its turn: the same as one call for each view on
    the joint batch. In evaluation mode it is a plain ``BatchNorm``, and so are its parameters,
    buffers and their names. Every rank holds a batch of the same shape, which every loader here
    guarantees.

    Statistics are float32, as in torch's kernels. With a group there is one exchange for each layer
    and direction, of both views at once: means and variances forward (gathered, so that they can be
    joined without cancellation), their gradients backward.
    """

    images: int = 0
    """Images of each view, or of the part of one that shares statistics: a batch is as many of
    them, one after the other, as it holds of these. 0: a batch is one view, of any length."""
    group: dist.ProcessGroup | None = None
    """Ranks that share statistics; none is this one alone."""

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.dim() >= 2

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (views * N, C, ...), in any floating type, over all axes but C."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        views = len(input) // self.images if self.images else 1
        assert len(input) % views == 0
        assert self.num_batches_tracked is not None and self.momentum is not None
        assert self.running_mean is not None and self.running_var is not None
        running = self.running_mean, self.running_var
        if _recomputing:
            # Not None: torch's kernel keeps as many tensors for the backward pass as before.
            running = self.running_mean.clone(), self.running_var.clone()
        else:
            self.num_batches_tracked += views
        if not torch.compiler.is_compiling():  # torch has kernels for these
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
        return self._formula(input, views, *running)

    def _formula(
        self, input: Tensor, views: int, running_mean: Tensor, running_var: Tensor
    ) -> Tensor:
        """Normalise by a formula of plain operations, which ``torch.compile`` fuses.

        Channels come last within it: the compiler then writes channels-last results, without
        copies (it loses the layout of a five-dimensional tensor otherwise).
        Rounding comes after the permutation: torch 2.11 writes NCHW gradients otherwise.
        """
        x = input.movedim(1, -1).unflatten(0, (views, -1))  # (views, N, ..., C)
        axes = tuple(range(1, x.dim() - 1))
        wide = x.float()
        var, mean = torch.var_mean(wide, axes, correction=0, keepdim=True)
        count = x.numel() // (views * x.shape[-1])
        if self.group is not None:
            mean, var = _joined(mean, var, self.group)
            count *= self.group.size()
        assert self.momentum is not None
        with torch.no_grad():
            unbiased = var * (count / max(1, count - 1))
            self._move(running_mean, mean.flatten(1))
            self._move(running_var, unbiased.flatten(1))
        scale = torch.rsqrt(var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        out: Tensor = (wide * scale + shift).flatten(0, 1).movedim(-1, 1).to(input.dtype)
        return out

    def _move(self, running: Tensor, seen: Tensor) -> None:
        """Move running statistics (C,) by those of each part in turn, (parts, C), in one sum."""
        assert self.momentum is not None
        stays = 1 - self.momentum
        ages = torch.arange(len(seen) - 1, -1, -1, device=seen.device)
        weights = self.momentum * stays**ages
        running.mul_(stays ** len(seen)).add_((weights[:, None] * seen).sum(0))


class ViewBatchNormAct(ViewBatchNorm):
    """The same for timm's ``BatchNormAct2d``, which holds the dropout and activation after it."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        """Normalise as ``ViewBatchNorm``, then activate."""
        out: Tensor = self.act(self.drop(super().forward(input)))
        return out


def unknown_batch_norm(module: nn.Module) -> str:
    """Name the kind of layer within that normalises batches in a way unknown here; "" if none."""
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
    """Turn a module's BatchNorms into ``ViewBatchNorm``; parameters and buffers stay as they are.

    Check ``unknown_batch_norm`` first: a layer that it names keeps mixing views and ranks.

    Args:
        module: is changed in place.
        images: of each view, on this rank, where batches hold several views, or of the parts of a
            view that have statistics of their own; 0: a batch is one view.
        group: ranks that share statistics; none is this one alone.
    """
    for child in module.modules():
        if (kind := _view_kind(child)) is not None:
            child.__class__ = kind
            assert isinstance(child, ViewBatchNorm)
            child.images, child.group = images, group


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """Leave running statistics alone inside: the forward pass that counts has moved them."""
    global _recomputing
    before, _recomputing = _recomputing, True
    try:
        yield
    finally:
        _recomputing = before


def groups_of(module: nn.Module, images: int, ranks: int) -> int:
    """Return into how many parts of one size BN cuts a view, each with statistics of its own.

    Args:
        module: has been through ``use_view_batch_norm``; of others each rank's share is a part.
        images: of the view on each rank.
        ranks: that have as many each.
    """
    for child in module.modules():
        if isinstance(child, ViewBatchNorm):
            together = 1 if child.group is None else child.group.size()
            return images // (child.images or images) * ranks // together
    return ranks


def _view_kind(module: nn.Module) -> type[ViewBatchNorm] | None:
    """Return what replaces a BatchNorm and computes the same; None for all other layers."""
    if isinstance(module, ViewBatchNorm):
        return type(module)
    if not isinstance(module, _BatchNorm):
        return None
    if not module.track_running_stats or module.momentum is None:  # other averages than ours
        return None
    if type(module).forward is _BatchNorm.forward:
        return ViewBatchNorm
    named = (kind.__name__ for kind in type(module).__mro__)
    return ViewBatchNormAct if "BatchNormAct2d" in named else None


def _joined(mean: Tensor, var: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Join the ranks' means and biased variances, each of as many samples."""
    own = torch.stack([mean, var])[None]
    means, variances = gather_with_gradient(own, group).unbind(1)
    mean = means.mean(0)
    return mean, variances.mean(0) + (means - mean).square().mean(0)
