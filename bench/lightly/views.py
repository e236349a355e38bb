"""lightly's transform of each method with the settings of a run, and torch's DataLoader of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightly.transforms.byol_transform import BYOLView2Transform
from lightly.transforms.multi_view_transform import MultiViewTransform
from lightly.transforms.simclr_transform import SimCLRViewTransform
from lightly.transforms.simsiam_transform import SimSiamViewTransform
from lightly.transforms.swav_transform import SwaVViewTransform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from fastsiam.config import AugmentConfig, TrainConfig, ViewConfig
from fastsiam.errors import BackendError
from fastsiam.pipelines.store import Store


@dataclass(frozen=True)
class Images(Dataset[list[Tensor]]):
    """A data set's images as lightly's transform makes views of them, decoded by PIL."""

    store: Store
    transform: Callable[[Any], list[Tensor]]

    def __len__(self) -> int:
        """Count the images."""
        return len(self.store)

    def __getitem__(self, index: int) -> list[Tensor]:
        """Return the views of an image: (3, S, S) each."""
        return self.transform(self.store.decode(index))


def loader(config: TrainConfig, store: Store, *, workers: int) -> DataLoader[list[Tensor]]:
    """Return a loader of a run's batches: (N, 3, S, S) for each view, in random order.

    Args:
        config: views, batch and seed.
        store: the images.
        workers: processes that load; 0 loads in this one.

    Raises:
        BackendError: lightly's transform lacks a setting of the views.
    """
    return DataLoader(
        Images(store, transform_of(config.model.method.name, config.augment)),
        batch_size=config.optim.batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        generator=torch.Generator().manual_seed(config.numerics.seed),
    )


def transform_of(method: str, augment: AugmentConfig) -> Callable[[Any], list[Tensor]]:
    """Return what makes an image's views, by lightly's transforms for a method.

    Raises:
        BackendError: they lack a setting.
    """
    transform: Callable[[Any], list[Tensor]] = MultiViewTransform(
        [_view(method, view, augment) for view in augment.views]
    )
    return transform


def _view(method: str, view: ViewConfig, augment: AugmentConfig) -> Callable[[Any], Tensor]:
    """Return what makes one view; SwAV's has its crop apart, as in lightly's own."""
    solarises = {"solarization_prob": view.solarise_p} if method == "byol" else {}
    lacking = _unlike(view, ("ratio_min", "ratio_max", "solarise_threshold"))
    if method != "swav":
        lacking += _unlike(view, ("scale_max",))
    if method != "byol":
        lacking += _unlike(view, ("solarise_p",))
    if lacking:
        flag = lacking[0].replace("_", "-")
        raise BackendError(f"lightly's transform for {method} has no {flag}: leave it out")
    common = {
        "cj_prob": view.jitter_p,
        "cj_strength": 1.0,
        "cj_bright": view.brightness,
        "cj_contrast": view.contrast,
        "cj_sat": view.saturation,
        "cj_hue": view.hue,
        "random_gray_scale": view.gray_p,
        "gaussian_blur": view.blur_p,
        "sigmas": (view.blur_sigma_min, view.blur_sigma_max),
        "hf_prob": view.flip_p,
        "normalize": {"mean": list(augment.mean), "std": list(augment.std)},
    }
    if method == "swav":
        crop = v2.RandomResizedCrop(view.crop, scale=(view.scale_min, view.scale_max))
        cropped: Callable[[Any], Tensor] = v2.Compose([crop, SwaVViewTransform(**common)])
        return cropped
    kinds = {"byol": BYOLView2Transform, "simsiam": SimSiamViewTransform}
    kind = kinds.get(method, SimCLRViewTransform)
    made: Callable[[Any], Tensor] = kind(
        input_size=view.crop, min_scale=view.scale_min, **common, **solarises
    )
    return made


def _unlike(view: ViewConfig, names: tuple[str, ...]) -> list[str]:
    """Return the settings that are not as by default."""
    usual = ViewConfig()
    return [name for name in names if getattr(view, name) != getattr(usual, name)]
