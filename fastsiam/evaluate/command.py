"""kNN, linear evaluation and fine-tuning of a network, from its file to the record of results.

Every rank calls these functions, and each gets the same record (see ``fastsiam.run.records``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastsiam.config import TrainConfig
from fastsiam.config.evaluate import (
    EvalConfig,
    FinetuneConfig,
    KnnConfig,
    LabelConfig,
    LinearConfig,
)
from fastsiam.console import duration, format_count, pace
from fastsiam.distributed import Place
from fastsiam.evaluate.accuracy import Accuracy
from fastsiam.evaluate.features import concat_batches
from fastsiam.evaluate.knn import knn_accuracy
from fastsiam.evaluate.labelled import (
    Batches,
    LabelledImages,
    augmented_features,
    augmented_images,
    cached_features,
)
from fastsiam.evaluate.record_files import RecordFiles, Show
from fastsiam.evaluate.subject import open_subject
from fastsiam.evaluate.supervised import SupervisedTraining
from fastsiam.model.backbones import LibraryNetwork
from fastsiam.model.numerics import autocast_type
from fastsiam.run.records import Record

_FEW_PERCENT = 2
"""Largest share of the images, in percent, at which a --subset list counts as a 1% subset, which is
fine-tuned for longer."""
_NAMES = {"pixels": "raw pixels", "untrained": "untrained network", "trained": "trained"}


def preflight(path: Path, config: EvalConfig) -> None:
    """Check the network's file, the data and the batch size, before ranks are started.

    Raises:
        FastSiamError: one of them cannot be used.
    """
    place = Place(0, config.gpus * config.max_nodes, torch.device("cpu"))
    subject = open_subject(path, config, place)
    if isinstance(config, LinearConfig | FinetuneConfig):
        LabelledImages(subject, config)
    else:
        subject.loaders()


def evaluate_knn(
    path: Path, config: KnnConfig, place: Place, *, show: Show | None = None
) -> Record:
    """Classify the validation images by their nearest training images; return the record.

    Args:
        path: a run's folder, a checkpoint, or a weight file of another program.
        show: called with the record on rank 0, before it is written.
    """
    subject = open_subject(path, config, place)
    monitor = (subject.pretrained.config or TrainConfig()).monitor
    votes = [
        (k, temperature)
        for k in config.k or [monitor.knn_k]
        for temperature in config.temperature or [monitor.knn_temperature]
    ]
    bank, queries = subject.loaders()
    subject.check_same(bank, queries)
    protocol: dict[str, Any] = {
        "features": "pool5",
        "similarity": "cosine",
        "votes": [list(x) for x in votes],
    }
    if config.baselines:
        protocol["baselines"] = True
    files = subject.record_files("knn", subject.data_facts(bank, queries), protocol, config)
    subject.print_summary()
    subjects = {"untrained" if subject.untrained else "trained": subject}
    if config.baselines:
        flatten = LibraryNetwork(nn.Flatten(), features=3 * subject.augment.crop**2)
        pixels = replace(subject, network=flatten, dtype=torch.float32)
        untrained = open_subject(path, replace(config, untrained=True), place)
        subjects = {"pixels": pixels, "untrained": untrained} | subjects
    lines: list[dict[str, Any]] = []
    summary: list[str] = []
    for kind, variant in subjects.items():
        epoch = subject.pretrained.epoch if kind == "trained" else None
        name = f"after {format_count(epoch, 'epoch')}" if epoch is not None else _NAMES[kind]
        began = time.monotonic()
        query_features, labels, _ = concat_batches(variant.extract(queries, "queries"))
        bank_parts = ((part, label) for part, label, _ in variant.extract(bank, "bank: images"))
        results = knn_accuracy(
            bank_parts, query_features, labels, votes=votes, classes=len(bank.classes)
        )
        seconds, images = time.monotonic() - began, bank.images + queries.images
        speed = {"seconds": seconds, "images_per_second": images / seconds}
        subject.console.say(
            f"{name}: {images:,} images in {duration(seconds)}, {pace(images / seconds)}, "
            "including the search"
        )
        of_epoch = {} if epoch is None else {"epoch": epoch}
        lines += [{"features": kind, **r.record(), "top5": r.top5, **of_epoch} for r in results]
        summary += [f"{name}: {result}" for result in results]
    return files.keep(
        show,
        results=lines,
        summary=summary,
        per_class=dict(zip(bank.classes, results[0].per_class, strict=True)),
        speed=speed,
    )


def evaluate_linear(
    path: Path, config: LinearConfig, place: Place, *, show: Show | None = None
) -> Record:
    """Train and validate linear classifiers, one per learning rate, on frozen features.

    Arguments and return value are those of ``evaluate_knn``.
    """
    subject = open_subject(path, config, place)
    images = LabelledImages(subject, config)
    reason = config.explain_auto(images.train.images)
    lars_warning = config.lars_warning(images.train.images)
    config = replace(config.with_defaults(images.train.images), batch=images.batch)
    name = "SGD"
    if config.optimizer == "lars":
        name = f"LARS (trust {config.lars_trust:g}, no clipping, biases adapted too)"
    rates = ", ".join(f"{lr:g} ({lr * config.batch / 256:g})" for lr in config.lrs)
    storage_text = f"one central crop of each image, stored as {config.storage}: no augmentation"
    subject.print_summary(
        f"linear evaluation on {images}: {name}, {_shared_settings(config)}",
        f"base rates (and scaled by {config.batch:,} / 256): {rates}",
        f"trained on CACHED features of {storage_text}" if config.cached else _augmentation(config),
        images.note,
        reason,
    )
    if lars_warning:
        subject.console.warn(lars_warning)
    details = "sgd" if config.optimizer == "sgd" else "", "cached" if config.cached else ""
    files = subject.record_files(
        "linear", images.facts(), config.protocol(), config, *details, images.part
    )
    val_batches = [part[:2] for part in subject.extract(images.val, "validation: images")]
    batches: Callable[[range], Batches] = partial(augmented_features, images)
    inputs = "random crops and flips"
    if config.cached:
        batches = cached_features(images, autocast_type(config.storage, place.device))
        inputs = "cached features of central crops"
    description = f"linear, {config.optimizer}, {inputs}"
    return _trained(files, images, config, description, None, batches, lambda: val_batches, show)


def evaluate_finetuned(
    path: Path, config: FinetuneConfig, place: Place, *, show: Show | None = None
) -> Record:
    """Train the entire network with labels and validate it; its file is not changed.

    Arguments and return value are those of ``evaluate_knn``.
    """
    subject = open_subject(path, config, place)
    images = LabelledImages(subject, config)
    is_small_subset = images.percent <= _FEW_PERCENT if config.subset else config.percent <= 1
    config = replace(
        config, batch=images.batch, epochs=config.epochs or (60 if is_small_subset else 30)
    )
    files = subject.record_files("finetune", images.facts(), config.protocol(), config, images.part)
    subject.print_summary(
        f"fine-tuning all layers on {images}: SGD{' (Nesterov)' if config.momentum else ''}, rate "
        f"{config.lr:g} x {config.batch} / 256, {_shared_settings(config)}",
        _augmentation(config),
        images.note,
    )
    return _trained(
        files,
        images,
        config,
        "fine-tuned",
        subject.network,
        partial(augmented_images, images),
        lambda: ((batch.image, batch.label) for batch in images.val),
        show,
    )


def _shared_settings(config: LinearConfig | FinetuneConfig) -> str:
    return (
        f"batch {config.batch:,}, {format_count(config.epochs, 'epoch')}, cosine per step, "
        f"momentum {config.momentum:g}, weight decay {config.weight_decay:g}"
    )


def _augmentation(config: LabelConfig) -> str:
    return f"trained on random crops ({config.scale_min:g} to 1 of the area) and flips"


def _trained(
    files: RecordFiles,
    images: LabelledImages,
    config: LinearConfig | FinetuneConfig,
    description: str,
    backbone: nn.Module | None,
    batches: Callable[[range], Batches],
    validation: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    show: Show | None,
) -> Record:
    """Train, or resume an interrupted training; validate, write the record and return it."""
    console, steps, began = files.console, images.steps, time.monotonic()
    training = SupervisedTraining(
        config,
        backbone,
        features=images.subject.network.features,
        classes=len(images.train.classes),
        steps_per_epoch=steps,
        dtype=images.subject.dtype if backbone else torch.float32,
        place=images.subject.place,
    )
    results: list[Accuracy] = []

    def best() -> int:
        return max(range(len(results)), key=lambda head: results[head].top1)

    def validate(done: int, losses: Tensor) -> str:
        epoch = done // steps
        if epoch == config.epochs or (config.eval_every and epoch % config.eval_every == 0):
            results[:] = training.evaluate(validation())
            head = best()
            rate = f" at rate {training.rates[head]:g}" if len(training.rates) > 1 else ""
            console.say(
                f"epoch {epoch} of {config.epochs}: {results[head]}, loss {losses[head]:.3f}{rate}"
            )
        return ""

    first_step = training.run(
        lambda step: batches(range(step // steps, config.epochs)),
        steps=training.steps,
        every=steps,
        images=images.batch,
        files=files,
        on_checkpoint=validate,
    )
    results = results or training.evaluate(validation())
    seconds, top = time.monotonic() - began, results[best()]
    epochs = config.epochs - first_step // steps
    console.say(
        f"trained {format_count(epochs, 'epoch')} in {duration(seconds)}; "
        f"{top.images:,} validation images, each counted once"
    )
    pairs = list(zip(training.rates, results, strict=True))
    return files.keep(
        show,
        results=[{"lr": lr, "top1": x.top1, "top5": x.top5} for lr, x in pairs],
        summary=_summary(pairs, images, config, description),
        per_class=dict(zip(images.train.classes, top.per_class, strict=True)),
        speed={"seconds": seconds, "epochs": epochs},
        images_validated=top.images,
    )


def _summary(
    pairs: list[tuple[float, Accuracy]],
    images: LabelledImages,
    config: LinearConfig | FinetuneConfig,
    description: str,
) -> list[str]:
    """Format the accuracy for each base rate, and the best one, for display."""
    start = f"{'untrained network, ' * images.subject.untrained}{description}"
    lengths = f"batch {config.batch:,}, {format_count(config.epochs, 'epoch')}{images.selection}"
    summary = [f"{start}: {result} (base rate {lr:g}, {lengths})" for lr, result in pairs]
    if len(pairs) > 1:
        lr, top = max(pairs, key=lambda pair: pair[1].top1)
        summary.append(
            f"best of {len(pairs)} rates, selected on the same validation images: "
            f"{top.top1:.2f}% with base rate {lr:g}"
        )
    return summary
