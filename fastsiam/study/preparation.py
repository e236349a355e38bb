"""Checks before the first run of a study: its settings, its images and this machine's GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fastsiam.config import DataConfig, TrainConfig
from fastsiam.config.study import StudyRunConfig
from fastsiam.console import Console
from fastsiam.errors import DataError
from fastsiam.study.runs import Run
from fastsiam.study.scales import Scale


def images(scale: Scale, config: StudyRunConfig) -> str:
    """Return the folder of the images; generate those of the demo if they are missing.

    Raises:
        DataError: they cannot be generated.
    """
    if not scale.makes_images:
        return str(DataConfig(data=config.data).root)
    from fastsiam.demo import make_images_once

    folder = Path(config.out) / "images"
    make_images_once(folder)
    return str(folder)


def check(runs: Sequence[Run]) -> list[str]:
    """Check that the runs can work.

    Returns:
        The names of the machine's GPUs; empty if the runs use the CPU.

    Raises:
        ValueError: a batch cannot be divided among the GPUs.
        FastSiamError: images, labels or devices are missing.
    """
    left = {run.variant.name: run for run in runs if not run.is_done}
    if left:
        from fastsiam.train.command import preflight

        for run in left.values():
            preflight(run.config, world=run.config.run.gpus)
        _check_images(runs[0].scale, runs[0].config)
    return _gpus(runs[0].config)


def _check_images(scale: Scale, config: TrainConfig) -> None:
    """Check that the images are those of the scale, by their number and that of their classes."""
    import torch

    from fastsiam.distributed import Place
    from fastsiam.evaluate.subject import labelled_loaders

    place = Place(0, 1, torch.device("cpu"))
    bank, _ = labelled_loaders(config.data, config.augment, resize=config.eval_resize, place=place)
    found = f"{config.data.root} has {bank.images:,} training images of {len(bank.classes):,}"
    wanted = f"--scale {scale.name} is for {scale.images:,} of {scale.classes:,}, {scale.title}"
    if len(bank.classes) != scale.classes:
        raise DataError(f"{found} classes; {wanted}")
    if bank.images != scale.images:
        Console().warn(f"{found} classes; {wanted}")


def _gpus(config: TrainConfig) -> list[str]:
    """Return the names of the machine's GPUs; empty if the runs use the CPU."""
    import torch

    if config.run.device == "cpu" or not (count := torch.cuda.device_count()):
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",") if named else [str(number) for number in range(count)]
