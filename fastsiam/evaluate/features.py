"""Feature extraction with frozen networks, and the records of their evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fastsiam.interchange import Pretrained
from fastsiam.model.numerics import autocast
from fastsiam.run.checkpoint import weights_hash
from fastsiam.run.records import Record, read_records
from fastsiam.views.batch import EvalBatch

Part = TypeVar("Part", bound=tuple[Any, ...])


def feature_batches(
    network: nn.Module,
    batches: Iterable[EvalBatch],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Compute features batch by batch, in evaluation mode.

    The network is left unchanged: its mode is restored and its BN statistics are not updated.

    Args:
        network: maps (N, 3, S, S) to (N, d).
        dtype: autocast type of the forward pass.
        device: device of the images.

    Yields:
        (N, d) float32 features, (N,) int64 labels and (N,) int64 positions in the data set, on
        ``device``; one empty batch if there are no images.
    """
    training, batch = network.training, None
    network.eval()
    try:
        for batch in batches:
            yield frozen_output(network, batch.image, dtype=dtype), batch.label, batch.index
        if batch is None:
            width: Any = network.features
            yield no_features(width, device)
    finally:
        network.train(training)


@torch.no_grad()
def frozen_output(network: nn.Module, image: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return a network's output for a batch of images as float32, without a gradient.

    cuDNN's benchmark mode is off. An evaluation has up to four batch shapes, because the last batch
    of each split is smaller. Trying every algorithm for each shape takes longer than it saves.
    """
    benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        with autocast(image.device, dtype):
            features: Tensor = network(image)
    finally:
        torch.backends.cudnn.benchmark = benchmark
    return features.float()


def no_features(width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return an empty batch of features, labels and positions."""
    empty = torch.empty(0, dtype=torch.int64, device=device)
    return torch.empty(0, width, device=device), empty, empty


def concat_batches(parts: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Concatenate each column of batches such as (features, labels, positions)."""
    columns = zip(*parts, strict=True)
    return tuple(x[0] if len(x) == 1 else torch.cat(x) for x in columns)  # cat copies


def group_batches(parts: Iterable[Part], rows: int) -> Iterator[list[Part]]:
    """Collect batches, whose features come first, in groups of at least ``rows`` rows.

    The last group may be smaller. A caller frees the batches by clearing the list.
    """
    group: list[Part] = []
    for part in parts:
        group.append(part)
        del part
        if sum(len(features) for features, *_ in group) >= rows:
            yield group
            group = []
    if group:
        yield group


def own_records(pretrained: Pretrained) -> list[Record]:
    """Return the run's evaluation records whose network has exactly these weights."""
    records = read_records(pretrained.run) if pretrained.run else []
    own_fingerprint = weights_hash(pretrained.network().state_dict()) if records else ""
    return [record for record in records if record.network.fingerprint == own_fingerprint]
