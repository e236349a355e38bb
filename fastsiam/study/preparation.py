"""What comes before the first run of a study: its images, room for it, this machine's devices."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fastsiam.config import DataConfig, TrainConfig
from fastsiam.config.study import StudyRunConfig
from fastsiam.console import Console, size
from fastsiam.errors import DataError
from fastsiam.study.runs import Run
from fastsiam.study.scales import Scale
from fastsiam.study.variants import Change


def images(scale: Scale, config: StudyRunConfig) -> str:
    """Return where the images are; the demo's are made if they are not there.

    Raises:
        DataError: they cannot be made.
    """
    if not scale.makes_images:
        return str(DataConfig(data=config.data).root)
    from fastsiam.demo import make_images_once

    folder = Path(config.out) / "images"
    make_images_once(folder)
    return str(folder)


def machine(config: StudyRunConfig, data: str) -> Change:
    """Return the change of settings that makes them this machine's."""

    def change(own: TrainConfig) -> TrainConfig:
        return replace(
            own,
            data=replace(own.data, data=data),
            run=replace(own.run, gpus=config.gpus, device=config.device),
        )

    return change


def check(runs: Sequence[Run]) -> list[str]:
    """Refuse runs that cannot work; return what the machine's GPUs are called, none on a CPU.

    Raises:
        ValueError: a batch cannot be shared by so many GPUs.
        FastSiamError: images, labels or devices are not there, or runs were begun on other images.
    """
    left = [run for run in runs if not run.is_done]
    _check_left(left)
    _check_images(runs)
    _say_room(left)
    return _gpus(runs[0].config)


def _check_left(left: Sequence[Run]) -> None:
    """Refuse what cannot work of the runs that are left, by one of each variant."""
    import torch

    from fastsiam.distributed import Place
    from fastsiam.evaluate.subject import labelled_loaders
    from fastsiam.train.command import preflight

    for run in {run.variant.name: run for run in left}.values():
        preflight(run.config, world=run.config.run.gpus)
        bank, _ = labelled_loaders(
            run.config.data,
            run.config.augment,
            resize=run.config.eval_resize,
            place=Place(0, 1, torch.device("cpu")),
        )
        if len(bank.classes) != run.scale.classes:
            raise DataError(
                f"{run.config.data.root} has {len(bank.classes):,} classes; --scale "
                f"{run.scale.name} is for {run.scale.title}, {run.scale.classes:,} classes"
            )


def _check_images(runs: Sequence[Run]) -> None:
    """Refuse to continue beside runs of other images, whose figures are not comparable.

    Images none of which has its old name are taken for the same if they are as many: a container
    of another kind names them in its own way.
    """
    from fastsiam.train.images import names_begun_with, training_names

    data, scale = runs[0].config.data, runs[0].scale
    names = training_names(data)
    here = set(names)
    if len(names) != scale.images:
        Console().warn(
            f"{data.root} has {len(names):,} training images; --scale {scale.name} is for "
            f"{scale.images:,}, {scale.title}"
        )
    for run in runs:
        before = set(names_begun_with(run.folder))
        is_renamed = len(before) == len(here) and before.isdisjoint(here)
        if before and before != here and not is_renamed:
            raise DataError(
                f"{run.folder} is of other images than {data.root} holds ({len(before):,} and "
                f"{len(here):,}, {len(before & here):,} of them in both); choose another --out, "
                "or delete the folder"
            )


def _say_room(left: Sequence[Run]) -> None:
    """Say how large the checkpoints of the runs that are left become, and warn of a full disk."""
    if not left:
        return
    from fastsiam.methods import method_skeleton
    from fastsiam.run.checkpoint import KEPT

    need, sizes = 0, dict[str, int]()
    for run in left:
        if run.variant.name not in sizes:
            method = method_skeleton(run.config.model, images=run.scale.images)
            weights = sum(x.nbytes for x in method.state_dict().values())
            momentum = sum(x.nbytes for x in method.parameters() if x.requires_grad)
            sizes[run.variant.name] = weights + momentum
        need += KEPT * sizes[run.variant.name]
    there = next(x for x in left[0].folder.absolute().parents if x.exists())
    free = shutil.disk_usage(there).free
    console = Console()
    say = console.warn if need + max(sizes.values()) > free else console.say
    say(f"checkpoints of {len(left):,} runs: up to {size(need)}; {size(free)} free in {there}")


def _gpus(config: TrainConfig) -> list[str]:
    """Return what the machine's GPUs are called; none if the runs are on a CPU."""
    import torch

    if config.run.device == "cpu" or not (count := torch.cuda.device_count()):
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",") if named else [str(number) for number in range(count)]
