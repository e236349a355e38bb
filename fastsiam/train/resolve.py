"""Resolution of a run's settings before it starts: each "auto", and those set by a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from fastsiam.config import Compile, Pipeline, TrainConfig
from fastsiam.config.settings_files import RunSettings
from fastsiam.distributed import Place, from_leader, minimum_across_ranks
from fastsiam.environment import free_bytes
from fastsiam.errors import CheckpointError, DataError
from fastsiam.methods.optim import peak_lr
from fastsiam.model.numerics import autocast_type
from fastsiam.pipelines import Store
from fastsiam.pipelines.automatic import Choice, choose_pipeline
from fastsiam.pipelines.backends import BACKENDS, CEILING
from fastsiam.run.checkpoint import Checkpoint
from fastsiam.train.compile import without_compilation
from fastsiam.train.memory import training_bytes
from fastsiam.train.run_images import ADVICE, RunImages, run_images
from fastsiam.train.start import Start, start_of
from fastsiam.train.trainer import last_step

_WORTH_COMPILING = 1000
"""Minimum length of a run, in steps, to compile it by default: compiling takes a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """The resolved settings, images and start of a run."""

    user_config: TrainConfig
    """The settings as the user passed them, in this command or when the run was started."""
    config: TrainConfig
    """The settings with each "auto" resolved, as saved in checkpoints and config.json."""
    place: Place
    beginning: Start
    images: RunImages
    notes: tuple[str, ...] = ()
    """Messages for the user, one line each."""

    @property
    def start(self) -> Checkpoint | None:
        """Checkpoint to resume from, with this run's settings; None for a new run."""
        return self.beginning.checkpoint

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of views and activations."""
        return autocast_type(self.config.numerics.precision, self.place.device)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch; an incomplete last batch is dropped."""
        return len(self.images) // self.config.optim.batch

    @property
    def last_step(self) -> int:
        """Number of optimizer steps after which this run ends."""
        return last_step(self.config, self.steps_per_epoch)

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint is at or past the run's last step."""
        return self.start is not None and self.start.step >= self.last_step

    def record(self) -> dict[str, Any]:
        """Return the content of config.json, as plain JSON values."""
        optim, ranks = self.config.optim, self.place.world
        history = {}
        if self.start is not None:
            history = {"branch": self.start.branch, "extensions": self.start.extensions}
        return {
            "config": self.config.to_dict(),
            "asked": self.user_config.to_dict(),
            "resolved": {
                "ranks": ranks,
                "device": self.place.device.type,
                "images_per_rank": optim.batch // ranks,
                "peak_lr": peak_lr(optim),
                "eval_resize": self.config.eval_resize,
                "steps_per_epoch": self.steps_per_epoch,
                "last_step": self.last_step,
            },
            "compiled": self.config.step.compile == "on",
            **{name: value for name, value in history.items() if value},
        }


def resolve(user_config: TrainConfig, run: Path, place: Place) -> ResolvedConfig:
    """Resolve all settings of a run; every rank must call this, and gets the same result.

    A resumed run keeps the resolved settings that it started with, unless the user changes them.

    Raises:
        BackendError: the pipeline's package is missing.
        CheckpointError: the run cannot be resumed, or not with these settings.
        DataError: the training images cannot be read, or are fewer than a batch.
    """
    data = user_config.data
    if data.loads_images and not data.data:  # $FASTSIAM_DATA may name other images later
        data = replace(data, data=str(data.root))
    config, beginning = start_of(replace(user_config, data=data), run, place)
    start = beginning.checkpoint
    images = run_images(config, beginning.folder)
    # The user accepts only this change of the data, not later ones.
    config = replace(config, run=replace(config.run, data_changed="refuse"))
    config, pipeline_note = with_pipeline(config, place, images.store, start)
    if start is not None and start.images != len(images):  # the run saved no list of images
        raise CheckpointError(
            f"the data changed: {len(images):,} images now, {start.images:,} when the run "
            f"started; {ADVICE}"
        )
    end = last_step(config, len(images) // config.optim.batch)
    config = with_compilation(config, start, end=end)
    if beginning.folder is not None:
        user_config = _first_user_config(
            user_config, beginning.folder, is_branch=beginning.is_branch(run)
        )
    return ResolvedConfig(
        user_config=user_config,
        config=config,
        place=place,
        beginning=beginning,
        images=images,
        notes=tuple(filter(None, (pipeline_note, beginning.note, *images.notes))),
    )


def _first_user_config(user_config: TrainConfig, run: Path, *, is_branch: bool) -> TrainConfig:
    """Return the settings that the user passed, of which a resumed run keeps those of its start.

    ``--resume RUN`` passes on the settings that the run uses, in which each "auto" is resolved.
    """
    try:
        first = RunSettings.read(run)
    except DataError:  # a checkpoint is enough to resume a run
        return user_config
    used, flags = first.config.to_flags(), first.user_config.to_flags()
    if is_branch:  # it has the epochs of an extended run, without --extend
        del flags["epochs"]
    return TrainConfig.from_flags(
        {
            name: flags.get(name, value) if used.get(name) == value else value
            for name, value in user_config.to_flags().items()
        }
    )


def with_pipeline(
    config: TrainConfig, place: Place, store: Store | None, start: Checkpoint | None
) -> tuple[TrainConfig, str]:
    """Resolve the pipeline "auto": keep that of the resumed run, or take rank 0's choice.

    Every rank must call this. ``store`` is None if the pipeline generates noise.

    Returns:
        The settings, and a message about the choice, which is empty if the user named a pipeline.
    """
    if store is None or config.data.pipeline != "auto":
        return config, ""
    free = torch.tensor(float(free_bytes(place.device)), dtype=torch.float64)  # CPU: gloo
    free = minimum_across_ranks(free)
    name = line = ""
    if place.is_leader:
        choice = _pipeline_of_resumed_run(store, start) or choose_pipeline(
            store,
            device=place.device,
            free=free.item(),
            model=training_bytes(config, place, images=len(store)),
        )
        name, line = choice.name, str(choice)
    pipeline = cast(Pipeline, from_leader(name))
    return replace(config, data=replace(config.data, pipeline=pipeline)), line


def _pipeline_of_resumed_run(store: Store, start: Checkpoint | None) -> Choice | None:
    """Return the pipeline of the resumed run; None for a new run or if it no longer works."""
    name = "auto" if start is None else start.config.data.pipeline
    if name == "auto" or name == CEILING or not BACKENDS[name].works_on(store):
        return None
    return Choice(name, "as when the run started")


def with_compilation(config: TrainConfig, start: Checkpoint | None, *, end: int) -> TrainConfig:
    """Resolve ``compile`` "auto": as in the resumed run, or by the length of the run (``end``)."""
    choice: Compile = config.step.compile
    resumed_value: Compile = "auto" if start is None else start.config.step.compile
    if start is not None and start.step >= end:  # no steps are left
        if resumed_value != "on":
            return without_compilation(config)
        choice = "on"
    elif choice == "auto" and config.step.cuda_graphs:
        choice = "on"
    elif choice == "auto" and resumed_value != "auto":
        choice = resumed_value
    elif choice == "auto":
        choice = "on" if end >= _WORTH_COMPILING else "off"
    return replace(config, step=replace(config.step, compile=choice))
