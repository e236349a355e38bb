"""The train command: check the settings, start the ranks, open the data, run the loop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fastsiam import distributed
from fastsiam.bad_image_list import FILE, read_bad_images
from fastsiam.config import TrainConfig
from fastsiam.config.settings_files import RunSettings
from fastsiam.config.train import changes_text, differences
from fastsiam.console import Console, format_count
from fastsiam.distributed import Place, check_same_images, from_all
from fastsiam.environment import environment
from fastsiam.errors import DataError, DeviceError, FastSiamError
from fastsiam.files import os_errors_as
from fastsiam.methods import Method, build_method, method_skeleton
from fastsiam.methods.optim import peak_lr
from fastsiam.model.backbones import check_backbone
from fastsiam.model.numerics import check_precision
from fastsiam.pipelines import BadImages, build_loader, open_training_images
from fastsiam.pipelines.survey import survey
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import remove_log
from fastsiam.run.run_folder import PATIENCE, RunFolder, create_folder
from fastsiam.run.trackers import check_trackers
from fastsiam.train import image_list
from fastsiam.train.compile import CompilationError, without_compilation
from fastsiam.train.knn_monitor import knn_monitor
from fastsiam.train.memory import check_memory
from fastsiam.train.resolve import ResolvedConfig, resolve
from fastsiam.train.start import (
    find_start,
    initial_weights,
    load_initial_weights,
    will_resume,
)
from fastsiam.train.step import TrainingStep
from fastsiam.train.trainer import Trainer
from fastsiam.views.batch import Loader

_SHARED_FLAGS = ("pipeline", "bad_images", "extend", "log_every", "save_every", "max_steps")
"""Settings of ``data`` and ``run`` that may change on resume but must be equal on all ranks: they
determine when ranks wait for each other."""


def preflight(config: TrainConfig, *, world: int) -> None:
    """Check settings, devices and data before any process starts.

    Raises:
        ValueError: settings contradict each other.
        FastSiamError: devices, data or initial weights are missing or do not fit the settings.
    """
    distributed.check_devices(config.run)
    if os.environ.get("RANK", "0") == "0":
        check_trackers(config.run.trackers)
    check_shares(config, world)
    check_precision(config.numerics.precision, config.run.device)
    if config.step.cuda_graphs and (
        world > 1 or config.run.device == "cpu" or not torch.cuda.is_available()
    ):
        raise DeviceError("--cuda-graphs needs exactly one GPU; pass --no-cuda-graphs")
    if (
        config.step.activation_memory < 1
        and not config.model.is_own
        and config.step.compile != "on"
    ):
        raise ValueError(
            f"activation-memory below 1 with {config.model.backbone} needs --compile on: without "
            "compilation only fastsiam's own ResNets recompute activations"
        )
    for side in config.augment.by_side:
        joins_views = config.step.compile != "off" or config.numerics.bn_images > 0
        check_backbone(config.model, crop=side, joins_views=joins_views)
    if config.run.init and not distributed.is_worker() and not will_resume(config):
        initial_weights(config)
    if world > 1 and config.data.loads_images and not distributed.is_worker():
        # A resumed run keeps its number of images, even if some files are gone.
        open_training_images(config.data, batch=1 if will_resume(config) else config.optim.batch)


def check_run(config: TrainConfig) -> int:
    """Check the settings for every allowed number of machines; return the largest number of ranks.

    Raises:
        ValueError, FastSiamError: as ``preflight``.
    """
    if config.run.max_nodes > 1 and not config.run.out:
        raise ValueError("several machines need --out: a run folder that all of them share")
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        flag = "--out" if not config.run.out else "--resume auto"
        if not config.run.out or config.run.resume == "never":
            raise ValueError(f"torchrun --max-restarts needs {flag}: a restart resumes the run")
    *smaller_worlds, largest_world = config.run.worlds
    if distributed.is_worker():
        smaller_worlds, (_, largest_world) = [], distributed.assigned_rank_and_world()
    preflight(config, world=largest_world)
    for world in smaller_worlds:
        check_shares(config, world)
    return largest_world


def check_shares(config: TrainConfig, world: int) -> None:
    """Check that the batch can be divided among the ranks.

    Raises:
        ValueError: it cannot; says why.
    """
    batch, parts = config.optim.batch, world * config.optim.accumulate
    micro_batch = config.optim.micro_batch(world)
    if batch % parts:
        raise ValueError(
            f"batch {batch} is not divisible by {format_count(world, 'rank')} x accumulate "
            f"{config.optim.accumulate}; choose a multiple of {parts}"
        )
    if micro_batch < 2:
        raise ValueError(
            f"batch {batch} on {format_count(world, 'rank')} is {micro_batch} image at a time for "
            "each; BN needs at least 2"
        )
    if (images := config.numerics.bn_images) and micro_batch % images:
        raise ValueError(
            f"the {micro_batch} images that a rank processes at a time (batch {batch}, "
            f"{format_count(world, 'rank')} x accumulate {config.optim.accumulate}) cannot be "
            f"divided into groups of {images}: choose a --bn-images value that divides them, or "
            "another --batch"
        )
    ranks = config.numerics.sync_bn_ranks if config.numerics.sync_bn else 0
    if ranks and world % ranks:
        raise ValueError(
            f"{format_count(world, 'rank')} cannot be divided into groups of {ranks} "
            "(--sync-bn-ranks)"
        )


def _folder_of(config: TrainConfig, recipe: str) -> Path:
    return Path(config.run.out or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{recipe}")


def train_on_ranks(config: TrainConfig, recipe: str, arguments: Sequence[str]) -> int:
    """Start this machine's ranks of a run with the given command line; return the exit code.

    Raises:
        FastSiamError: the run's folder is in use or cannot be created.
        CheckpointError: ``--resume never``, but the folder has a run; or the run cannot resume from
            the named checkpoint.
    """
    from fastsiam.distributed.launch import launch

    with contextlib.ExitStack() as stack:
        folder, extra_arguments = _folder_of(config, recipe), list[str]()
        if config.run.max_nodes == 1:
            stack.enter_context(create_folder(folder))
            with RunFolder(folder).lock():
                pass  # fails here if it is in use, before ranks start
            extra_arguments = ["--out", str(folder)]
        if config.run.resume != "auto":
            # Checked only here, because a restarted rank must resume from the run's checkpoint.
            find_start(config, folder)
        if config.run.resume == "never":
            extra_arguments += ["--resume", "auto"]
        return launch(
            [*arguments, *extra_arguments], config.run, max_restarts=config.run.max_restarts
        )


def train_here(config: TrainConfig, recipe: str) -> Path:
    """Train in this process, as one rank; return the run's folder."""
    place = distributed.start(config.run, numa_binding=config.run.numa_binding)
    console = Console(quiet=not place.is_leader)
    if (restarts := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) != "0":
        max_restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS")
        console.say(f"restart {restarts} of {max_restarts}, from the last checkpoint")
    if config.run.max_restarts and not distributed.is_worker():
        console.warn(
            "--max-restarts has no effect on a run of one process; if it fails, start the same "
            "command again"
        )
    with contextlib.ExitStack() as stack:
        path = _folder_of(config, recipe)
        if place.is_leader:
            stack.enter_context(create_folder(path))
        run = Path(distributed.from_leader(str(path)))
        folder = RunFolder(run, console=console)
        if place.is_leader:
            patience = PATIENCE if distributed.is_worker() else 0.0
            stack.enter_context(folder.lock(patience=patience))
        _train(config, recipe, folder, place)
    distributed.finish()
    return run


def _train(config: TrainConfig, recipe: str, folder: RunFolder, place: Place) -> None:
    _check_same_settings_on_ranks(config)
    resolved = resolve(config, folder.path, place)
    store = resolved.images.store
    names = () if store is None else map(store.name, range(len(store)))
    check_same_images(names, resolved.config.data.root)
    for note in resolved.notes:
        folder.console.say(note)
    from_all("")  # a barrier: all ranks read the list of images before rank 0 rewrites it
    bad = _bad_images(resolved, folder)
    loader = build_loader(
        resolved.config.data,
        resolved.config.augment,
        batch=resolved.config.optim.batch,
        seed=resolved.config.numerics.seed,
        rank=place.rank,
        world=place.world,
        device=place.device,
        dtype=resolved.dtype,
        store=store,
        bad=bad if bad.matters else None,
        shuffle=resolved.images.shuffle,
    )
    trainer = None
    try:
        with distributed.closing_unless_lost(loader):
            trainer = _trainer(resolved, loader, bad, recipe, folder)
            del names, store, resolved  # the names of millions of images take gigabytes
            with contextlib.closing(trainer):
                trainer.run()
    except KeyboardInterrupt:  # while loader and trackers were closed
        if trainer is None or trainer.done == trainer.first:
            raise
        raise trainer.interrupted_error(signal.SIGINT) from None


def _trainer(
    resolved: ResolvedConfig, loader: Loader, bad: BadImages, recipe: str, folder: RunFolder
) -> Trainer:
    """Build the model, the training step and the trainer; write the first files of the folder."""
    place, console = resolved.place, folder.console
    if place.is_leader:
        _print_summary(resolved, loader, folder)
        if resolved.beginning.damaged:
            checkpoints.rename_corrupt(folder.path)
    config = resolved.config
    torch.manual_seed(config.numerics.seed)
    try:
        method = build_method(config.model, images=len(resolved.images))
        if resolved.start is None and config.run.init:
            console.say(load_initial_weights(method, config))
        # The loader must be idle while the step compiles: see TrainingStep.prepare.
        resolved, step = prepare_step(resolved, method, console)
    except (RuntimeError, MemoryError) as error:
        done = 0 if resolved.start is None else resolved.start.step
        check_memory(error, resolved.config, at=done + 1, saved="no step was taken")
        raise
    if place.is_leader:  # write only after data, settings and model are known to work
        bad.write()  # first, because a branch that has a checkpoint reads its own list
        _begin_folder(resolved, recipe, folder)
    return Trainer(
        step,
        loader,
        folder=folder,
        start=resolved.start,
        knn=knn_monitor(
            resolved.config,
            place,
            console,
            resolved.dtype,
            training=resolved.images.training,
            resumed=folder.path if resolved.start else None,
        ),
        before_saving=bad.share,
    )


def _print_summary(resolved: ResolvedConfig, loader: Loader, folder: RunFolder) -> None:
    """Print a summary of the run, with the settings that results depend on."""
    console = folder.console
    config, place, start = resolved.config, resolved.place, resolved.start
    if place.device.type == "cpu" and config.run.device == "auto":
        console.say("no GPU found: training on the CPU")
    kind = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else "CPU"
    local = config.optim.micro_batch(place.world)
    bn_ranks = (config.numerics.sync_bn_ranks or place.world) if config.numerics.sync_bn else 1
    bn_images = config.numerics.bn_images or local * bn_ranks
    console.say(
        f"{config.model.method.title} {config.model.backbone} on {place.world} x {kind}, "
        f"{str(resolved.dtype).removeprefix('torch.')}, pipeline {config.data.pipeline}: "
        f"{loader.images:,} images, {format_count(loader.steps, 'step')} per epoch, "
        f"{format_count(config.optim.epochs, 'epoch')}"
    )
    console.say(f"images from {loader.source}")
    console.say(
        f"global batch {config.optim.batch} ({local} images per rank and micro-batch; "
        f"BN sees {bn_images}), learning rate {peak_lr(config.optim):g} "
        f"({config.optim.lr:g} x {config.optim.batch} / 256), run folder {folder.path}"
    )
    micro_batch = config.optim.micro_batch(ranks=1)
    has_bn = any(isinstance(x, _BatchNorm) for x in method_skeleton(config.model).modules())
    groups = micro_batch // bn_images if has_bn else 0
    warnings = config.model.method.batch_warnings(
        images=loader.images, batch=micro_batch, groups=groups
    )
    for warning in warnings:
        console.warn(warning)
    if start is not None:
        console.say(f"resuming after step {start.step:,} (epoch {start.epoch:.2f})")
    if resolved.beginning.damaged:
        console.warn(resolved.beginning.damaged)
    store = resolved.images.store
    for note in [] if store is None else survey(store, store.rules):
        console.say(note)


def _bad_images(resolved: ResolvedConfig, folder: RunFolder) -> BadImages:
    """Return the known bad images of a run; rank 0 writes the list to its folder.

    Raises:
        CheckpointError: the list in the resumed run's folder is corrupt.
    """
    store, start_folder = resolved.images.store, resolved.beginning.folder

    def keep(content: bytes) -> None:
        if not (content or (folder.path / FILE).exists()):
            return
        try:
            folder.keep(FILE, content)
        except FastSiamError as error:  # a resumed run would find them again
            folder.console.warn(f"{error}; training continues")

    return BadImages(
        0 if store is None else len(store),
        [] if start_folder is None else read_bad_images(start_folder),
        takes_more=resolved.config.data.bad_images == "replace" and store is not None,
        exchange=from_all,
        keep=keep if resolved.place.is_leader else None,
    )


def prepare_step(
    resolved: ResolvedConfig, method: Method, console: Console
) -> tuple[ResolvedConfig, TrainingStep]:
    """Build the training step, and prepare it unless the run is done.

    If compiling fails, the step is built again without compilation.

    Returns:
        The settings, without compilation if it failed, and the step.
    """
    config, steps = resolved.config, resolved.steps_per_epoch
    step = TrainingStep(config, method, resolved.place, steps_per_epoch=steps)
    if resolved.is_done:
        return resolved, step
    if config.step.compile == "on":
        console.say("compiling, which takes about a minute; pass --compile off to skip it")
    try:
        if message := step.prepare():
            console.say(message)
        return resolved, step
    except CompilationError as error:
        console.warn(str(error))
    resolved = replace(resolved, config=without_compilation(config))
    return prepare_step(resolved, method, console)


def _begin_folder(resolved: ResolvedConfig, recipe: str, folder: RunFolder) -> None:
    """Write settings and the list of images; save the resumed checkpoint if last.pt is missing.

    Raises:
        FastSiamError: a file cannot be written or removed.
    """
    last_checkpoint, start = checkpoints.last(folder.path), resolved.start
    if (listing := resolved.images.image_list) is not None:
        folder.keep(image_list.FILE, listing.to_bytes())
    if start is None or resolved.beginning.is_branch(folder.path):
        # A start that failed before its first checkpoint may have left log lines and tracker ids.
        with os_errors_as(FastSiamError, f"cannot remove old files in {folder.path}"):
            step, epoch = (start.step, start.epoch) if start else (0, 0)
            remove_log(folder, step=step, epoch=epoch, save_every=resolved.config.run.save_every)
            for ids in (folder.path / "trackers").glob("*.txt"):
                ids.unlink()
    if start is not None and not last_checkpoint.is_file():
        checkpoints.save(last_checkpoint, start)
    machine = environment()
    if resolved.is_done:  # the run may have been trained elsewhere
        with contextlib.suppress(DataError):  # a branch, or its file was lost
            machine = RunSettings.read(folder.path).environment
    settings = {"recipe": recipe, **resolved.record(), "environment": machine}
    text = json.dumps(settings, indent=2, allow_nan=False) + "\n"
    folder.keep("config.json", text.encode())


def _check_same_settings_on_ranks(config: TrainConfig) -> None:
    """Check that all ranks were started with the same settings.

    Raises:
        DeviceError: settings differ from those of rank 0; names them.
    """
    leader = TrainConfig.from_dict(
        json.loads(distributed.from_leader(json.dumps(config.to_dict())))
    )
    changed = differences(leader, config)
    old, new = leader.to_flags(), config.to_flags()
    for name in (*config.monitor.to_flags(), *config.step.to_flags(), *_SHARED_FLAGS):
        if old[name] != new[name]:
            changed[name] = old[name], new[name]
    if changed:
        raise DeviceError(
            f"settings differ between ranks (rank 0 -> this rank): {changes_text(changed)}; start "
            "the same command on each machine"
        )
