"""Batch normalisation over ranks whose batches differ in shape, as images and boxes do."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as TorchSyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from fastsiam.distributed import gather_with_gradient


class UnevenBatchNorm(_BatchNorm):
    """A ``BatchNorm`` whose statistics are of all ranks' samples, however many each has.

    Alone, and in evaluation mode, it is torch's. Parameters, buffers and names are torch's too. On
    GPUs it is the function of torch's ``SyncBatchNorm``, which has none for CPUs.
    """

    group: dist.ProcessGroup | None = None
    """Ranks that share statistics; none is this one alone."""

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.dim() >= 2

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (N, C, ...) over all axes but C."""
        if not self.training or self.group is None:
            return super().forward(input)
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None and self.momentum is not None
        self.num_batches_tracked += 1
        if input.is_cuda:
            out: Tensor = TorchSyncBatchNorm.apply(
                input, self.weight, self.bias, self.running_mean, self.running_var, self.eps,
                self.momentum, self.group, self.group.size(),
            )  # fmt: skip
            return out
        return self._over_ranks(input.float()).to(input.dtype)

    def _over_ranks(self, input: Tensor) -> Tensor:
        assert self.group is not None and self.momentum is not None
        assert self.running_mean is not None and self.running_var is not None
        axes = [axis for axis in range(input.dim()) if axis != 1]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        var, mean = torch.var_mean(input, axes, correction=0)
        samples = torch.full_like(mean, input.numel() / input.shape[1])
        own = torch.stack([mean, var, samples])[None]
        means, variances, counts = gather_with_gradient(own, self.group).unbind(1)
        total = counts.sum(0)
        shares = (counts / total).detach()
        mean = (shares * means).sum(0)
        var = (shares * (variances + (means - mean).square())).sum(0)
        with torch.no_grad():
            unbiased = var * total / (total - 1).clamp(min=1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(unbiased, self.momentum)
        scale = torch.rsqrt(var + self.eps) * self.weight
        return input * scale.view(shape) + (self.bias - mean * scale).view(shape)


def use_uneven_batch_norm(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Turn a module's BatchNorms into ``UnevenBatchNorm``, in place; all else stays as it is."""
    for child in module.modules():
        if isinstance(child, _BatchNorm):
            child.__class__ = UnevenBatchNorm
            assert isinstance(child, UnevenBatchNorm)
            child.group = group
