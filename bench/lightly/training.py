"""A training run of lightly's parts, loader and transform, with the settings of one of ours."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
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

from fastsiam.bench.lightly.methods import Composed, Views, backbone_weights, composed
from fastsiam.bench.measure import cpu_seconds
from fastsiam.config import AugmentConfig, TrainConfig, ViewConfig
from fastsiam.console import Console
from fastsiam.environment import environment
from fastsiam.errors import BackendError, FastSiamError, TrainingError
from fastsiam.files import explained, write_json
from fastsiam.interchange import plain, weight_files
from fastsiam.interchange.loading import snippet
from fastsiam.interchange.pretrained import Input, Pretrained
from fastsiam.methods.optim import decaying_rate, peak_lr
from fastsiam.model.numerics import keep_freed_memory
from fastsiam.pipelines import open_training_images
from fastsiam.pipelines.store import Store
from fastsiam.pipelines.workers import count as count_workers

WEIGHTS, RESULT = "backbone.pt", "result.json"
"""Files of a run: a plain file of the backbone, and what is known of the run."""


def train(config: TrainConfig, recipe: str) -> dict[str, Any]:
    """Train, and leave the backbone and the result in the run's folder.

    Args:
        config: all settings; ``run.out`` is the folder. Nothing is compiled, and precision is
            float32. ``channels_last`` holds for this loop as for ours.
        recipe: name of the recipe that the settings are changes of.

    Returns:
        The result: losses, seconds, processor seconds, settings and versions.

    Raises:
        BackendError: lightly's parts lack a setting.
        DataError: the images cannot be read.
        TrainingError: the loss is no number any more.
        FastSiamError: the folder cannot be written.
    """
    out = Path(config.run.out)
    with explained(FastSiamError, f"cannot write {out}"):
        out.mkdir(parents=True, exist_ok=True)
    use_gpu = config.run.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if use_gpu else "cpu")
    if not use_gpu:
        keep_freed_memory()
    images = open_training_images(config.data, batch=config.optim.batch)
    workers = max(0, count_workers(config.data.workers))
    batches: DataLoader[list[Tensor]] = DataLoader(
        _Images(images, transform_of(config.model.method.name, config.augment)),
        batch_size=config.optim.batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        generator=torch.Generator().manual_seed(config.numerics.seed),
    )
    torch.manual_seed(config.numerics.seed)
    model = composed(config, steps_per_epoch=len(batches)).to(device)
    if laid_out_by_channels(config):
        model = model.to(memory_format=torch.channels_last)
    wall, cpu = time.perf_counter(), cpu_seconds()
    losses = _train(config, model, batches, device)
    result = {
        "method": config.model.method.name,
        "lightly": metadata.version("lightly"),
        "data": config.data.data,
        "images": len(images),
        "seed": config.numerics.seed,
        "epochs": config.optim.epochs,
        "steps": config.optim.epochs * len(batches),
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": cpu_seconds() - cpu,
        "losses": losses,
        "weights": str(out / WEIGHTS),
    }
    _write(config, model, out / WEIGHTS)
    about = {"recipe": recipe, "config": config.to_dict(), "environment": environment()}
    write_json(out / RESULT, result | about)
    return result


class Step:
    """Takes optimizer steps: loss, backward, torch's SGD at the rates of a run.

    Raises:
        BackendError: the settings ask for another optimizer, or for parts of a batch.
    """

    def __init__(self, config: TrainConfig, model: Composed) -> None:
        optim = config.optim
        if optim.optimizer != "sgd":
            raise BackendError(f"lightly's loop takes SGD's steps, not {optim.optimizer}'s")
        if optim.accumulate > 1:
            raise BackendError("lightly's loop takes whole batches: leave accumulate out")
        constant = model.constant()
        apart = {id(parameter) for parameter in constant}
        trained = [one for one in model.parameters() if one.requires_grad]
        decaying = [one for one in trained if id(one) not in apart]
        self.config, self.model = config, model
        self.optimizer = torch.optim.SGD(
            [{"params": decaying}, *([{"params": constant}] if constant else [])],
            lr=peak_lr(optim),
            momentum=optim.momentum,
            weight_decay=optim.weight_decay,
        )

    def __call__(self, views: Views, *, at: int) -> Tensor:
        """Take step ``at``, from 0, on normalised views (N, 3, S, S); return the loss before it."""
        rate = decaying_rate(self.config.optim, at, self.model.steps_per_epoch)
        self.optimizer.param_groups[0]["lr"] = rate
        loss = self.model.loss(views, at)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def laid_out_by_channels(config: TrainConfig) -> bool:
    """Tell whether convolutions run channels last, which lightly's split BN cannot."""
    return config.numerics.channels_last and not config.numerics.bn_images


def transform_of(method: str, augment: AugmentConfig) -> Callable[[Any], list[Tensor]]:
    """Return what makes an image's views, by lightly's transforms for a method.

    Raises:
        BackendError: they lack a setting.
    """
    transform: Callable[[Any], list[Tensor]] = MultiViewTransform(
        [_view(method, view, augment) for view in augment.views]
    )
    return transform


@dataclass(frozen=True)
class _Images(Dataset[list[Tensor]]):
    """A data set's images, decoded by PIL, as lightly's transform makes views of them."""

    store: Store
    transform: Callable[[Any], list[Tensor]]

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> list[Tensor]:
        return self.transform(self.store.decode(index))


def _view(method: str, view: ViewConfig, augment: AugmentConfig) -> Callable[[Any], Tensor]:
    """Return what makes one view; SwAV's has its crop apart, as in lightly's own."""
    lacking = ["ratio_min", "ratio_max", "solarise_threshold"]
    lacking += ["scale_max"] if method != "swav" else []
    lacking += ["solarise_p"] if method != "byol" else []
    usual = ViewConfig()
    for name in lacking:
        if getattr(view, name) != getattr(usual, name):
            flag = name.replace("_", "-")
            raise BackendError(f"lightly's transform for {method} has no {flag}: leave it out")
    settings = {
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
    made: Callable[[Any], Tensor]
    if method == "swav":
        crop = v2.RandomResizedCrop(view.crop, scale=(view.scale_min, view.scale_max))
        made = v2.Compose([crop, SwaVViewTransform(**settings)])
        return made
    if method == "byol":
        settings["solarization_prob"] = view.solarise_p
    kinds = {"byol": BYOLView2Transform, "simsiam": SimSiamViewTransform}
    kind = kinds.get(method, SimCLRViewTransform)
    made = kind(input_size=view.crop, min_scale=view.scale_min, **settings)
    return made


def _train(config: TrainConfig, model: Composed, batches: Any, device: torch.device) -> list[float]:
    """Train, and return the mean loss of each epoch."""
    step, console, losses = Step(config, model.train()), Console(), []
    layout = torch.channels_last if laid_out_by_channels(config) else torch.contiguous_format
    for epoch in range(config.optim.epochs):
        total = torch.zeros((), device=device)
        for number, views in enumerate(batches, start=epoch * len(batches)):
            moved = [view.to(device, memory_format=layout, non_blocking=True) for view in views]
            total += step(moved, at=number)
        losses.append(total.item() / len(batches))
        if not math.isfinite(losses[-1]):
            raise TrainingError(f"the loss is {losses[-1]} in epoch {epoch + 1}: lower --lr")
        console.say(f"epoch {epoch + 1}/{config.optim.epochs}: loss {losses[-1]:.4f}")
    return losses


def _write(config: TrainConfig, model: Composed, path: Path) -> None:
    """Write a plain file of the backbone."""
    weights = {key: value.cpu().contiguous() for key, value in backbone_weights(model).items()}
    trained = Pretrained(
        path=path,
        layout="lightly",
        model=config.model,
        state={f"backbone.{key}": value for key, value in weights.items()},
        epoch=float(config.optim.epochs),
        config=None,
        images=None,
        left_out=(),
        input=Input.of(config),
    )
    content = plain.content(trained, weights, snippet(trained, "plain", path.name))
    weight_files.write(path, content, weight_files.write_torch)
