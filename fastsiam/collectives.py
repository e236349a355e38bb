"""Collectives for tensors and short strings, and detection of ranks that are gone or late.

With a single rank each collective returns its input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from fastsiam.child_process import is_worker
from fastsiam.errors import DataError

_gather_single = getattr(functional, "all_gather_single_autograd", None)  # torch 2.13 renamed it
_gather = _gather_single or functional.all_gather_tensor_autograd
_GONE_MESSAGES = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "timed out connecting",
    "likely closed",
    "remote process exit",
    "ncclremoteerror",
)
_LATE_MESSAGES = (
    "timed out waiting",
    "timed out after",
    "wait timeout after",
    "operation timed out",  # NCCL since torch 2.15
)
"""Parts of error messages of gloo, NCCL and torch's store, in lower case."""


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(tensor: Tensor) -> Tensor:
    """Concatenate equal-shaped tensors of all ranks along the first axis."""
    if not dist.is_initialized():
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def gather_with_gradient(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Concatenate like ``gather``, with gradients: each part gets the sum of all ranks' gradients.

    It works inside ``torch.compile``.

    Args:
        tensor: has the same shape on all ranks.
        group: the ranks to gather from; None means all.
    """
    if not dist.is_initialized():
        return tensor
    ranks: Any = group or dist.group.WORLD
    result: Tensor = _gather(tensor.contiguous(), 0, ranks)
    return result


def gather_uneven(tensor: Tensor) -> Tensor:
    """Concatenate tensors whose first axes may differ in length, in rank order."""
    if not dist.is_initialized():
        return tensor
    lengths = gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
    if not max(lengths):
        return tensor
    padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = gather(padded).split(max(lengths))
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def complete(table: Tensor, shares: Sequence[int]) -> None:
    """Fill in the rows of the other ranks, in place.

    Args:
        table: has the same shape on every rank, with this rank's rows filled in.
        shares: number of rows of each rank, in rank order.
    """
    if dist.is_initialized():
        for rank, rows in enumerate(table.split(list(shares))):
            dist.broadcast(rows, src=rank)


def sum_across_ranks(tensor: Tensor) -> Tensor:
    """Sum a tensor over the ranks."""
    return _all_reduce(tensor, dist.ReduceOp.SUM)


def mean_across_ranks(tensor: Tensor) -> Tensor:
    """Average a tensor over the ranks."""
    return sum_across_ranks(tensor) / (dist.get_world_size() if dist.is_initialized() else 1)


def minimum_across_ranks(tensor: Tensor) -> Tensor:
    """Return the element-wise minimum over the ranks."""
    return _all_reduce(tensor, dist.ReduceOp.MIN)


def _all_reduce(tensor: Tensor, operation: Any) -> Tensor:
    if dist.is_initialized():
        tensor = tensor.clone()
        dist.all_reduce(tensor, operation)
    return tensor


def from_leader(text: str) -> str:
    """Return rank 0's text on every rank."""
    if not dist.is_initialized():
        return text
    box = [text]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def from_all(text: str) -> list[str]:
    """Return all ranks' texts on every rank, in rank order."""
    if not dist.is_initialized():
        return [text]
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


def check_same_images(names: Iterable[str], root: object) -> None:
    """Check that all ranks found the same images in the same order; no later check would notice.

    Args:
        names: names of the images that this rank found; read only if there are several ranks.
        root: path or URL of the data, for the message.

    Raises:
        DataError: this rank's images differ from those of rank 0.
    """
    if not dist.is_initialized():
        return
    name_list = [*names]
    digest = hashlib.sha256("\0".join(name_list).encode("utf-8", "surrogateescape")).hexdigest()
    leader_digest, leader_count = from_leader(f"{digest} {len(name_list):,}").split()
    if (digest, f"{len(name_list):,}") != (leader_digest, leader_count):
        raise DataError(
            f"this rank finds different images than rank 0, or another order "
            f"({len(name_list):,} here, {leader_count} there); give every machine the same data "
            f"({root})"
        )


def peer_is_gone(error: BaseException) -> bool:
    """Return whether a collective failed because another rank ended."""
    return _is_exchange_error(error, _GONE_MESSAGES)


def peer_is_late(error: BaseException) -> bool:
    """Return whether a collective failed because another rank did not arrive in time."""
    return _is_exchange_error(error, _LATE_MESSAGES)


@contextmanager
def closing_unless_lost(used: Any) -> Iterator[None]:
    """Close ``used`` after the block, unless the block fails because a rank is gone or late.

    In that case this process exits at once. Freeing GPU memory would wait for NCCL's kernels, which
    wait for the other rank until NCCL aborts the process.
    """
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        if failure is None or not (peer_is_gone(failure) or peer_is_late(failure)):
            used.close()


def _is_exchange_error(error: BaseException, phrases: tuple[str, ...]) -> bool:
    text = str(error).lower()
    is_exchange = isinstance(error, dist.DistError) or "gloo" in text or "nccl" in text
    return is_worker() and is_exchange and any(phrase in text for phrase in phrases)
