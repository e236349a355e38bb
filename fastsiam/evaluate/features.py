"""Features of a frozen encoder, or of none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastsiam.batch import EvalLoader


@torch.inference_mode()
def backbone_features(
    backbone: nn.Module, loader: EvalLoader, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Compute pooled features of this rank's share of a data set, in evaluation mode.

    The backbone is left exactly as it was: its mode is restored, its BN statistics do not move.

    Args:
        backbone: (N, 3, S, S) to (N, d).
        loader: the images.
        dtype: autocast type of the forward pass.

    Returns:
        (n, d) float32 features and (n,) int64 labels on the loader's device.
    """
    training = backbone.training
    backbone.eval()
    try:

        def encode(image: Tensor) -> Tensor:
            with torch.autocast(image.device.type, dtype=dtype, enabled=dtype != torch.float32):
                features: Tensor = backbone(image)
            return features.float()

        return _collect(encode, loader)
    finally:
        backbone.train(training)


@torch.inference_mode()
def pixel_features(loader: EvalLoader) -> tuple[Tensor, Tensor]:
    """Return the normalised pixels themselves, (n, 3 * S * S) float32, and (n,) int64 labels."""
    return _collect(lambda image: image.flatten(1), loader)


def _collect(encode: Callable[[Tensor], Tensor], loader: EvalLoader) -> tuple[Tensor, Tensor]:
    features, labels = [], []
    for batch in loader:
        features.append(encode(batch.image))
        labels.append(batch.label)
    return torch.cat(features), torch.cat(labels)
