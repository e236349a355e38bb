"""Checks before the first run of a study: its images, disk space and this machine's GPUs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from fastsiam.config import DataConfig, TrainConfig
from fastsiam.config.study import StudyRunConfig
from fastsiam.console import Console, size
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
        FastSiamError: images, labels or devices are missing, or a run started on other images.
    """
    left = {run.variant.name: run for run in runs if not run.is_done}
    if left:
        _check_settings(list(left.values()))
    _check_images(runs)
    if left:
        _print_disk_space([run for run in runs if not run.is_done])
    return _gpus(runs[0].config)


def _check_settings(left: Sequence[Run]) -> None:
    """Check the settings of the remaining runs, and the number of classes."""
    import torch

    from fastsiam.distributed import Place
    from fastsiam.evaluate.subject import labelled_loaders
    from fastsiam.train.command import preflight

    for run in left:
        preflight(run.config, world=run.config.run.gpus)
    scale, config = left[0].scale, left[0].config
    bank, _ = labelled_loaders(
        config.data,
        config.augment,
        resize=config.eval_resize,
        place=Place(0, 1, torch.device("cpu")),
    )
    if len(bank.classes) != scale.classes:
        raise DataError(
            f"{config.data.root} has {len(bank.classes):,} classes; --scale "
            f"{scale.name} is for {scale.title}, {scale.classes:,} classes"
        )


def _check_images(runs: Sequence[Run]) -> None:
    """Check that the present runs have the same images, so that results are comparable.

    If all names differ but the number of images is the same, they count as the same images: names
    depend on the container.
    """
    from fastsiam.train.images import recorded_names, training_names

    data, scale = runs[0].config.data, runs[0].scale
    names = training_names(data)
    here = set(names)
    if len(names) != scale.images:
        Console().warn(
            f"{data.root} has {len(names):,} training images; --scale {scale.name} is for "
            f"{scale.images:,}, {scale.title}"
        )
    for run in runs:
        before = set(recorded_names(run.folder))
        is_renamed = len(before) == len(here) and before.isdisjoint(here)
        if before and before != here and not is_renamed:
            raise DataError(
                f"{run.folder} was trained on other images than those of {data.root} "
                f"({len(before):,} and {len(here):,} images, {len(before & here):,} in common); "
                "choose another --out, or delete the folder"
            )


def _print_disk_space(left: Sequence[Run]) -> None:
    """Print the size of the remaining runs' checkpoints; as a warning if the disk is too small."""
    from fastsiam.methods import method_skeleton
    from fastsiam.run.checkpoint import KEPT

    sizes: dict[str, int] = {}
    for run in left:
        if run.variant.name not in sizes:
            method = method_skeleton(run.config.model, images=run.scale.images)
            weights = sum(x.nbytes for x in method.state_dict().values())
            momentum = sum(x.nbytes for x in method.parameters() if x.requires_grad)
            sizes[run.variant.name] = weights + momentum
    need = KEPT * sum(sizes[run.variant.name] for run in left)
    there = next(x for x in left[0].folder.absolute().parents if x.exists())
    free = shutil.disk_usage(there).free
    console = Console()
    say = console.warn if need + max(sizes.values()) > free else console.say
    say(f"checkpoints of {len(left):,} runs: up to {size(need)}; {size(free)} free on {there}")


def _gpus(config: TrainConfig) -> list[str]:
    """Return the names of the machine's GPUs; empty if the runs use the CPU."""
    import torch

    if config.run.device == "cpu" or not (count := torch.cuda.device_count()):
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",") if named else [str(number) for number in range(count)]
