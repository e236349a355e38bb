"""``fastsiam bench lightly``: train a method built from lightly's components."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightly.models.batchnorm import SplitBatchNorm
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fastsiam import distributed
from fastsiam.bench.lightly_methods import Step, check_defaults, transform_of
from fastsiam.bench.measure import cpu_seconds
from fastsiam.config import TrainConfig
from fastsiam.config.train import changes_text, differences
from fastsiam.console import Console
from fastsiam.distributed import Place, StopSignals
from fastsiam.environment import environment
from fastsiam.errors import FastSiamError, TrainingError
from fastsiam.files import (
    atomic_write_for_user,
    os_errors_as,
    parse_json,
    value_errors_as_data_error,
    write_json,
)
from fastsiam.interchange import weight_files
from fastsiam.interchange.export import plain_content
from fastsiam.interchange.pretrained import Input, Pretrained
from fastsiam.pipelines import ViewLoader, open_training_images
from fastsiam.pipelines.store import Store
from fastsiam.pipelines.workers import count as count_workers
from fastsiam.run.records import check_targets
from fastsiam.train.knn_monitor import knn_monitor


@dataclass(frozen=True)
class _Images(Dataset[list[Tensor]]):
    """Views of a store's images, decoded by PIL and made by lightly's transform."""

    store: Store
    transform: Callable[[Any], list[Tensor]]

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> list[Tensor]:
        return self.transform(self.store.decode(index))


def train(config: TrainConfig, recipe: str, *, loader: str = "lightly") -> dict[str, Any]:
    """Train in float32 without compilation; write backbone.pt and result.json to the run's folder.

    A run that was stopped resumes after its last complete epoch. A finished run is not repeated.

    Args:
        config: all settings; ``run.out`` is the folder.
        recipe: name of the recipe that the settings are based on.
        loader: "lightly" for its transform in torch's DataLoader, "fastsiam" for a ``ViewLoader``.

    Returns:
        The result: losses, kNN accuracies, images/s, seconds, processor seconds, and lightly's
        version. result.json has the settings and the environment too.

    Raises:
        BackendError: lightly's components do not support a setting.
        DataError: the images cannot be read.
        DeviceError: the device is missing.
        TrainingError: the loss is infinite or NaN.
        FastSiamError: the folder cannot be written, or has a run with other settings.
    """
    out, optim, seed = Path(config.run.out), config.optim, config.numerics.seed
    if (out / "result.json").exists():
        return _finished(out / "result.json", config, loader)
    place = distributed.start(config.run)
    check_targets(out / "result.json")
    images = open_training_images(config.data, batch=optim.batch)
    batches: Any
    if loader == "lightly":
        check_defaults("lightly's loader", config.data, ("bad_images", "shuffle", "weights"))
        workers = count_workers(config.data.workers)
        batches = DataLoader(
            _Images(images, transform_of(config.model.method.name, config.augment)),
            batch_size=optim.batch, shuffle=True, drop_last=True, num_workers=workers,
            persistent_workers=workers > 0,
        )  # fmt: skip
    else:
        batches = ViewLoader(
            config.data, config.augment, batch=optim.batch, seed=seed, device=place.device,
            transform=lambda batch: batch.views,
        )  # fmt: skip
    torch.manual_seed(seed)
    step = Step(config, len(batches), place.device)
    progress = _train_epochs(step, batches, config, place, loader)
    steps = optim.epochs * len(batches)
    result = {
        "method": config.model.method.name, "lightly": metadata.version("lightly"),
        "data": config.data.data, "images": len(images), "seed": seed, "epochs": optim.epochs,
        "steps": steps,
        "images_per_second": steps * optim.batch / progress["seconds"], **progress,
        "weights": str(out / "backbone.pt"),
    }  # fmt: skip
    _write_backbone(config, step.model.backbone.eval(), out / "backbone.pt")
    provenance = {"recipe": recipe, "config": config.to_dict(), "environment": environment()}
    write_json(out / "result.json", result | provenance)
    (out / "state.pt").unlink(missing_ok=True)
    return result


def _train_epochs(
    step: Step, batches: Any, config: TrainConfig, place: Place, loader: str
) -> dict[str, Any]:
    """Train for all epochs, and evaluate after the epochs that the settings name.

    Returns:
        "loader": its name. "seconds" and "cpu_seconds" of training, without evaluations.
        "losses": mean of each epoch. "knn": epoch, seconds of training before it, and accuracy of
        each evaluation.
    """
    path = Path(config.run.out) / "state.pt"
    state = _unfinished(path, config, loader, step) if path.exists() else None
    state = state or {"loader": loader, "seconds": 0.0, "cpu_seconds": 0.0, "losses": [], "knn": []}
    console, epochs = Console(), config.optim.epochs
    evaluate = knn_monitor(config, place, console, torch.float32)
    for epoch in range(len(state["losses"]), epochs + 1):
        if evaluate and config.monitor.evaluates_after(epoch, epochs):
            result = evaluate(step.model.backbone, StopSignals(place))
            state["knn"] += [{"epoch": epoch, "seconds": state["seconds"], **result.record()}]
            console.say(f"epoch {epoch}: {result}")
        if epoch == epochs:
            break
        wall, cpu = time.perf_counter(), cpu_seconds()
        loss = _train_epoch(step, batches, epoch, config.numerics.seed)
        state["seconds"] += time.perf_counter() - wall
        state["cpu_seconds"] += cpu_seconds() - cpu
        if not math.isfinite(loss):
            raise TrainingError(f"the loss is {loss} in epoch {epoch + 1}: lower --lr")
        state["losses"] += [loss]
        console.say(f"epoch {epoch + 1}/{epochs}: loss {loss:.4f}")
        with atomic_write_for_user(path) as temporary:
            torch.save({"config": config.to_dict(), **step.state(), **state}, temporary)
    return state


def _unfinished(path: Path, config: TrainConfig, loader: str, step: Step) -> dict[str, Any]:
    """Load the weights of an unfinished run into ``step``, and return its figures.

    Raises:
        FastSiamError: its file cannot be read, or it had other settings.
    """
    with os_errors_as(FastSiamError, f"cannot read {path}"):
        state: dict[str, Any] = torch.load(path, map_location=step.device, weights_only=True)
    _check_same_settings(state, config, loader, path)
    del state["config"]
    step.load(state.pop("model"), state.pop("optimizer"))
    return state


def _finished(path: Path, config: TrainConfig, loader: str) -> dict[str, Any]:
    """Return the figures of a finished run.

    Raises:
        FastSiamError: its file cannot be read, or it had other settings.
    """
    with os_errors_as(FastSiamError, f"cannot read {path}"), value_errors_as_data_error(path):
        result: dict[str, Any] = parse_json(path.read_bytes())
        _check_same_settings(result, config, loader, path)
        del result["recipe"], result["config"], result["environment"]
    Console().say(f"{path.parent} is already trained")
    return result


def _check_same_settings(
    saved: dict[str, Any], config: TrainConfig, loader: str, path: Path
) -> None:
    """Check that the run whose content of ``path`` is ``saved`` had the same settings and data.

    Raises:
        FastSiamError: they differ; the message names them.
    """
    old = TrainConfig.from_dict(saved["config"])
    changes = differences(old, config)
    if not old.data.has_same_root(config.data):
        changes["data"] = old.data.places, config.data.places
    if saved.get("loader", loader) != loader:  # older versions did not save it
        changes["loader"] = saved["loader"], loader
    if changes:
        raise FastSiamError(
            f"{path.parent} holds a run with other settings ({changes_text(changes)}): pass "
            f"another --out, or delete {path}"
        )


def _train_epoch(step: Step, batches: Any, epoch: int, seed: int) -> float:
    """Train for one epoch, counted from 0; return its mean loss.

    Random numbers depend on seed and epoch, so a resumed run draws the same ones. Loader processes,
    if any, continue with their own generators.
    """
    seed %= 2**31
    torch.manual_seed(seed << 32 | epoch)
    np.random.seed((seed, epoch))
    if isinstance(batches, ViewLoader):
        batches.set_epoch(epoch)
    total = torch.zeros((), device=step.device)
    for number, views in enumerate(batches, start=epoch * len(batches)):
        total += step(views, at=number)
    return total.item() / len(batches)


def _write_backbone(config: TrainConfig, backbone: nn.Module, path: Path) -> None:
    """Write the weights of a backbone in eval mode in the format of ``export --format plain``."""
    weights = {key: value.cpu().contiguous() for key, value in backbone.state_dict().items()}
    for name, module in backbone.named_modules():
        if isinstance(module, SplitBatchNorm):  # in eval mode all splits are equal
            for statistic in (f"{name}.running_mean", f"{name}.running_var"):
                weights[statistic] = weights[statistic][: module.num_features].clone()
    pretrained = Pretrained(
        path=path,
        layout="lightly",
        model=config.model,
        state={f"backbone.{key}": value for key, value in weights.items()},
        epoch=float(config.optim.epochs),
        input=Input.of(config),
    )
    weight_files.write(path, plain_content(pretrained, path.name))
