"""A training run, put together.

The data come from ``fastsiam.pipelines``, the loop from ``train``.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn

from fastsiam import distributed
from fastsiam.bad_image_list import FILE, read_bad_images
from fastsiam.config import TrainConfig
from fastsiam.config.flags import changes_text, differences
from fastsiam.console import Console
from fastsiam.distributed import Place, from_all, minimum_across_ranks
from fastsiam.environment import environment
from fastsiam.errors import DataError, DeviceError, FastSiamError
from fastsiam.evaluate.features import collected, feature_batches
from fastsiam.evaluate.knn import KnnResult, knn_accuracy
from fastsiam.evaluate.subject import as_evaluated, labelled_loaders
from fastsiam.methods import Method, build_method
from fastsiam.model.backbones import check_backbone
from fastsiam.pipelines import BadImages, build_loader, open_training_images
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.folder import PATIENCE, RunFolder, created
from fastsiam.run.trackers import check_trackers
from fastsiam.train.compile import CompilationError
from fastsiam.train.introduction import introduce
from fastsiam.train.loop import train
from fastsiam.train.monitor import Evaluate, Watched
from fastsiam.train.resolve import ResolvedConfig, resolve
from fastsiam.train.start import goes_on, initial_weights, refuse_existing_run, take_weights
from fastsiam.train.step import TrainingStep
from fastsiam.views.batch import EvalLoader, Loader

_KNN_BATCH = {"cuda": 1024, "cpu": 256}
"""Images that the kNN monitor takes through the backbone at a time: forward only, a GPU has room
for more than in training, and one batch after the other costs it launches."""


def preflight(config: TrainConfig, *, world: int) -> None:
    """Refuse what cannot work, before a process or a worker starts.

    Raises:
        ValueError: settings that contradict each other.
        FastSiamError: devices, data or initial weights that are not there, or do not fit.
    """
    distributed.check_devices(config.run)
    if os.environ.get("RANK", "0") == "0":
        check_trackers(config.run.trackers)
    check_shares(config, world)
    if config.numerics.precision == "fp16" and (
        config.run.device == "cpu" or not torch.cuda.is_available()
    ):
        raise DeviceError("--precision fp16 needs a GPU; use bf16 or fp32 on the CPU")
    if config.step.cuda_graphs and (
        world > 1 or config.run.device == "cpu" or not torch.cuda.is_available()
    ):
        raise DeviceError("--cuda-graphs works on one GPU; leave it out here")
    if (
        config.step.activation_memory < 1
        and not config.model.is_own
        and config.step.compile != "on"
    ):
        raise ValueError(
            f"activation-memory below 1 with {config.model.backbone} needs --compile on: "
            "what is not compiled is computed again in our own ResNets only"
        )
    for side in config.augment.by_side:
        check_backbone(config.model, crop=side)
    if config.run.init and not distributed.is_worker() and not goes_on(config):
        initial_weights(config)
    if world > 1 and config.data.loads_images:
        # A run that continues keeps its number of images, whatever became of them.
        open_training_images(config.data, batch=1 if goes_on(config) else config.optim.batch)


def check_shares(config: TrainConfig, world: int) -> None:
    """Refuse a number of ranks that the batch cannot be shared among.

    Raises:
        ValueError: says why.
    """
    batch, parts = config.optim.batch, world * config.optim.accumulate
    if batch % parts:
        raise ValueError(
            f"batch {batch} cannot be shared equally by "
            f"{world} ranks x {config.optim.accumulate} parts"
        )
    if batch < 2 * parts:
        raise ValueError(
            f"batch {batch} leaves {batch // parts} image for each BN on {world} ranks; BN needs 2"
        )
    if (images := config.numerics.bn_images) and batch // parts % images:
        raise ValueError(
            f"{batch // parts} images of a rank at a time (batch {batch}, {world} ranks x "
            f"{config.optim.accumulate} parts) cannot be cut into groups of {images}: choose "
            "--bn-images that divides them, or another --batch"
        )
    if (ranks := config.numerics.sync_bn_ranks) and world % ranks:
        raise ValueError(f"{world} ranks cannot be cut into groups of {ranks} (sync-bn-ranks)")


@contextlib.contextmanager
def run_folder(config: TrainConfig, recipe: str) -> Iterator[Path]:
    """Create the run's folder if it is not there; if nothing is written into it, remove it again.

    Raises:
        FastSiamError: it cannot be created.
    """
    folder = Path(config.run.out or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{recipe}")
    with created(folder):
        yield folder


def train_on_ranks(config: TrainConfig, recipe: str, arguments: Sequence[str]) -> int:
    """Start the ranks of a run on this machine; return the exit code.

    Args:
        config: the settings.
        recipe: their name.
        arguments: the command line, which the ranks get too.

    Raises:
        FastSiamError: the run's folder is in use, or cannot be made.
        CheckpointError: ``--resume never``, and the folder holds a run.
    """
    from fastsiam.distributed.launch import launch

    with contextlib.ExitStack() as stack:
        folder, more = Path(config.run.out), list[str]()
        if config.run.max_nodes == 1:
            folder = stack.enter_context(run_folder(config, recipe))
            with RunFolder(folder).taken():
                pass  # refused here, before ranks start
            more = ["--out", str(folder)]
        if config.run.resume == "never":  # at the first start; a restart has to find a checkpoint
            refuse_existing_run(folder)
            more += ["--resume", "auto"]
        return launch(
            [*arguments, *more],
            config.run,
            gpus=config.run.gpus,
            max_restarts=config.run.max_restarts,
        )


def train_here(config: TrainConfig, recipe: str) -> Path:
    """Train in this process, as one rank of however many there are; return the run's folder."""
    place = distributed.start(config.run)
    console = Console(quiet=not place.leads)
    if (restarts := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) != "0":
        of = os.environ.get("TORCHELASTIC_MAX_RESTARTS")
        console.say(f"restart {restarts} of {of}, from the last checkpoint")
    with contextlib.ExitStack() as stack:
        own = str(stack.enter_context(run_folder(config, recipe))) if place.leads else ""
        run = Path(distributed.from_leader(own))
        folder = RunFolder(run, console=console)
        if place.leads:
            patience = PATIENCE if distributed.is_worker() else 0.0
            stack.enter_context(folder.taken(patience=patience))
        _train(config, recipe, folder, place, console)
    distributed.finish()
    return run


def _train(
    config: TrainConfig, recipe: str, folder: RunFolder, place: Place, console: Console
) -> None:
    """Train in a folder that is this run's alone."""
    _refuse_other_settings(config)
    resolved = resolve(config, folder.path, place)
    for note in resolved.notes:
        console.say(note)
    _on_all_ranks(True, place)  # have read the run's list, which the leader writes below
    bad = _bad_images(resolved, folder)
    began = time.monotonic()
    loader = _loader(resolved, bad)
    opening = time.monotonic() - began
    with contextlib.closing(loader):
        if place.leads:
            introduce(console, resolved, loader, folder.path)
            if resolved.damaged:
                checkpoints.put_aside(folder.path)
        method = _fresh_method(resolved, console)
        # No loader works until the step is there.
        resolved, step = prepared_step(resolved, method, console)
        if place.leads:  # nothing is written before the data, the settings and the model fit
            _begin_folder(resolved, recipe, folder)
            bad.write()
        train(
            step,
            loader,
            folder=folder,
            start=resolved.start,
            knn=_monitor(resolved.config, place, console, resolved.dtype),
            console=console,
            before_saving=bad.share,
            opening=opening,
        )


def _bad_images(resolved: ResolvedConfig, folder: RunFolder) -> BadImages:
    """Return the known bad images of a run; rank 0 keeps a list in its folder.

    Raises:
        CheckpointError: the list of the run that continues is damaged.
    """
    store, began_in = resolved.images.store, resolved.began_in

    def keep(content: bytes) -> None:
        if not (content or (folder.path / FILE).exists()):
            return
        try:
            folder.keep(FILE, content)
        except FastSiamError as error:  # a run that continues finds them again, if need be
            folder.console.warn(f"{error}; training continues")

    return BadImages(
        0 if store is None else len(store),
        [] if began_in is None else read_bad_images(began_in),
        takes_more=resolved.config.data.bad_images == "replace" and store is not None,
        exchange=from_all,
        keep=keep if resolved.place.leads else None,
    )


def _loader(resolved: ResolvedConfig, bad: BadImages) -> Loader:
    """Open this rank's part of the training images."""
    config, images = resolved.config, resolved.images
    return build_loader(
        config.data,
        config.augment,
        batch=config.optim.batch,
        seed=config.numerics.seed,
        rank=resolved.place.rank,
        world=resolved.place.world,
        device=resolved.place.device,
        dtype=resolved.dtype,
        store=images.store,
        bad=bad if bad.matter else None,
        window=images.window,
    )


def _fresh_method(resolved: ResolvedConfig, console: Console) -> Method:
    """Build the method, with the weights that ``--init`` names if the run begins."""
    config = resolved.config
    torch.manual_seed(config.numerics.seed)
    method = build_method(config.model, images=len(resolved.images))
    if resolved.start is None and config.run.init:
        console.say(take_weights(method, config))
    return method


def prepared_step(
    resolved: ResolvedConfig, method: Method, console: Console
) -> tuple[ResolvedConfig, TrainingStep]:
    """Build the training step, and compile it if that works here.

    Returns:
        What the run does then, and its step.
    """
    while True:
        config = resolved.config
        step = TrainingStep(
            config, method, resolved.place, steps_per_epoch=resolved.steps_per_epoch
        )
        if resolved.is_done:
            return resolved, step
        try:
            with _while_compiling(config, console):
                line = step.prepare()
        except CompilationError as error:
            console.warn(str(error))
            resolved = resolved.without_compiling(graphs_only=error.graphs)
            continue
        if line:
            console.say(line)
        return resolved, step


def _while_compiling(config: TrainConfig, console: Console) -> AbstractContextManager[None]:
    if config.step.compile == "off":
        return contextlib.nullcontext()
    return console.status("compiling, about a minute; --compile off goes without")


def _begin_folder(resolved: ResolvedConfig, recipe: str, folder: RunFolder) -> None:
    """Write what a run's folder holds from the first step on: settings, images, checkpoint."""
    own, start = checkpoints.last(folder.path), resolved.start
    if start is not None and resolved.images.moves_rows(start) and own.is_file():
        checkpoints.save(own, start)  # before the consent, which is given once
    resolved.images.keep(folder)
    if start is not None and not own.is_file():
        checkpoints.save(own, start)  # it is this run's too
    settings = {"recipe": recipe, **resolved.record(), "environment": environment()}
    if resolved.branch:
        settings["branch"] = resolved.branch
    text = json.dumps(settings, indent=2, allow_nan=False) + "\n"
    folder.keep("config.json", text.encode())


def _monitor(
    config: TrainConfig, place: Place, console: Console, dtype: torch.dtype
) -> Evaluate | None:
    """Return the kNN monitor, or say why there is none: on all ranks, or on none."""
    if not config.monitor.knn_every or not config.data.loads_images:
        return None
    loaders, reason = None, "another rank cannot read its images"
    try:
        loaders = labelled_loaders(
            config.data,
            config.augment,
            resize=config.eval_resize,
            place=place,
            batch=_KNN_BATCH[place.device.type],
        )
    except DataError as error:
        reason = str(error)
    if not _on_all_ranks(loaders is not None, place):
        console.say(f"no kNN monitor: {reason}")
        return None
    assert loaders is not None
    cut = as_evaluated(crop=config.augment.crop, resize=config.eval_resize)
    console.say(f"kNN monitor: {cut}")
    bank, queries = loaders

    def evaluate(backbone: nn.Module, /, *, watched: Watched) -> KnnResult:
        votes = [(config.monitor.knn_k, config.monitor.knn_temperature)]
        with console.tally("kNN: images", bank.images + queries.images) as done:

            def features(loader: EvalLoader) -> Iterator[tuple[Tensor, Tensor]]:
                for part in feature_batches(backbone, watched(loader), dtype=dtype):
                    done.add(len(part[1]) * place.world)
                    yield part

            found = knn_accuracy(
                features(bank),
                *collected(features(queries)),
                votes=votes,
                classes=len(bank.classes),
            )
        return found[0]

    return evaluate


def _refuse_other_settings(config: TrainConfig) -> None:
    """Refuse to train on ranks that were started with different settings.

    Raises:
        DeviceError: names the settings that differ from those of rank 0.
    """
    leader = TrainConfig.from_dict(
        json.loads(distributed.from_leader(json.dumps(config.to_dict())))
    )
    if changed := differences(leader, config):
        raise DeviceError(
            f"settings differ between ranks (rank 0 -> this rank): {changes_text(changed)}; start "
            "the same command on each machine"
        )


def _on_all_ranks(true_here: bool, place: Place) -> bool:
    """Tell whether something is true on all ranks; every rank asks."""
    if place.world == 1:
        return true_here
    return bool(minimum_across_ranks(torch.tensor(float(true_here), device=place.device)))
