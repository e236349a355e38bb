"""The evaluations, put together: a network, its images, a measure, and the record that is kept.

Every rank calls these functions, and each gets the same record (see ``evaluate.records``).
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from fastsiam.config import MonitorConfig
from fastsiam.config.evaluate import (
    EvalConfig,
    FinetuneConfig,
    KnnConfig,
    LabelConfig,
    LinearConfig,
)
from fastsiam.console import counted, duration
from fastsiam.distributed import Place
from fastsiam.errors import DataError
from fastsiam.evaluate.features import collected, fingerprint, pixel_batches
from fastsiam.evaluate.knn import KnnResult, knn_accuracy
from fastsiam.evaluate.labelled import (
    AugmentedFeatures,
    Batches,
    CachedFeatures,
    LabelledImages,
    check_shared,
)
from fastsiam.evaluate.record_files import RecordFiles, Show
from fastsiam.evaluate.subject import Subject, data_facts, open_subject
from fastsiam.evaluate.supervised import Trained, fine_tuning, linear_training, train_epochs
from fastsiam.run.records import Evaluation, Record, check_targets
from fastsiam.views.batch import EvalLoader

_PIXELS_GB = 8
"""Raw pixels above this are not offered as a baseline."""
_FEW_PERCENT = 2
"""A list of up to so many images is one of about 1%, which is fine-tuned for longer."""
Features = Literal["pixels", "untrained", "trained"]
"""What kNN compares."""
_NAMES = {"pixels": "raw pixels", "untrained": "untrained network", "trained": "trained"}

_STORAGE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def preflight(path: Path, config: EvalConfig) -> None:
    """Refuse what cannot work before ranks are started: a file, data, a batch, a record's place.

    Raises:
        FastSiamError: says what is wrong.
    """
    ranks = config.gpus * config.max_nodes
    place = Place(0, ranks, torch.device("cpu"))
    open_subject(path, config, place).loaders()
    if config.json:
        check_targets(Path(config.json))
    if isinstance(config, LabelConfig):
        check_shared(config.global_batch, ranks)


def evaluate_knn(
    path: Path, config: KnnConfig, place: Place, *, show: Show | None = None
) -> Record:
    """Classify the validation images by their nearest training images; return the record.

    Args:
        path: a run's folder, a checkpoint, or a file of another program.
        config: the protocol.
        place: this rank.
        show: is given the record on rank 0, before it is written.
    """
    subject = open_subject(path, config, place)
    votes = _votes(config, subject)
    bank, queries = subject.loaders()
    if config.baselines:
        _check_pixels(subject, queries)
    evaluation = subject.evaluation(
        "knn",
        data_facts(subject.data, bank, queries),
        {"features": "pool5", "similarity": "cosine", "votes": [list(vote) for vote in votes]},
    )
    files = _files(subject, config, evaluation)
    subject.introduce()
    own: Features = "untrained" if subject.untrained else "trained"
    kinds: tuple[Features, ...] = (own,)
    if config.baselines:
        kinds = ("pixels", "untrained") if subject.untrained else ("pixels", "untrained", own)
    lines: list[dict[str, Any]] = []
    summary: list[str] = []
    for kind in kinds:
        epoch = subject.pretrained.epoch if kind == "trained" else None
        name = f"after {counted(epoch, 'epoch')}" if epoch is not None else _NAMES[kind]
        began = time.monotonic()
        results = _classified(subject, kind, bank, queries, votes)
        seconds, images = time.monotonic() - began, bank.images + queries.images
        speed = {"seconds": seconds, "images_per_second": images / seconds}
        subject.console.say(
            f"{name}: {images:,} images in {duration(seconds)}, {images / seconds:,.0f} images/s, "
            "search included"
        )
        of_epoch = {} if epoch is None else {"epoch": epoch}
        lines += [{"features": kind, **r.record(), "top5": r.top5, **of_epoch} for r in results]
        summary += [f"{name}: {result}" for result in results]
    record = evaluation.record(
        results=lines,
        summary=summary,
        per_class=dict(zip(bank.classes, results[0].per_class, strict=True)),
        speed=speed,
    )
    files.keep(record, show)
    return record


def _files(
    subject: Subject, config: EvalConfig, evaluation: Evaluation, *details: str
) -> RecordFiles:
    """Return where a subject's record will go."""
    return RecordFiles(
        subject.pretrained.run, evaluation, *details,
        asked=config.json, place=subject.place, console=subject.console,
    )  # fmt: skip


def _votes(config: KnnConfig, subject: Subject) -> list[tuple[int, float]]:
    """Return all pairs of k and temperature; what is not asked for is as the run had it."""
    own = subject.pretrained.config
    monitor = own.monitor if own else MonitorConfig()
    return [
        (k, temperature)
        for k in config.k or [monitor.knn_k]
        for temperature in config.temperature or [monitor.knn_temperature]
    ]


def _check_pixels(subject: Subject, queries: EvalLoader) -> None:
    """Refuse raw pixels that would take too much memory.

    Raises:
        DataError: says how much.
    """
    gigabytes = queries.images * 3 * subject.augment.crop**2 * 4 / 1e9
    if gigabytes > _PIXELS_GB:
        raise DataError(
            f"the raw pixels of {queries.images:,} images would take {gigabytes:,.0f} GB; "
            "leave --baselines out"
        )


def _classified(
    subject: Subject,
    kind: Features,
    bank: EvalLoader,
    queries: EvalLoader,
    votes: list[tuple[int, float]],
) -> list[KnnResult]:
    """Classify the queries by features of a kind; return a result for each vote."""
    if kind == "pixels":
        known, asked = pixel_batches(bank), pixel_batches(queries)
    else:
        if kind == "untrained" and not subject.untrained:
            subject = subject.as_untrained()
        known, asked = subject.extract(bank, "bank: images"), subject.extract(queries, "queries")
    return knn_accuracy(known, *collected(asked), votes=votes, classes=len(bank.classes))


def evaluate_linear(
    path: Path, config: LinearConfig, place: Place, *, show: Show | None = None
) -> Record:
    """Train a linear classifier for each rate on frozen features, and validate; return the record.

    Args:
        path: a run's folder, a checkpoint, or a file of another program.
        config: the protocol.
        place: this rank.
        show: is given the record on rank 0, before it is written.

    Raises:
        RuntimeError: the backbone is not what it was before.
    """
    subject = open_subject(path, config, place)
    images = LabelledImages(subject, config)
    why = config.why_settled(images.train.images)
    config = replace(config.settled(images.train.images), batch=images.batch)
    protocol = _protocol(config, images) | {
        "optimizer": config.optimizer,
        "lars_trust": config.lars_trust if config.optimizer == "lars" else None,
        "rates": config.rates,
        "epochs": config.epochs,
        "cached": config.cached,
        "storage": config.storage if config.cached else None,
        "scale_min": None if config.cached else config.scale_min,
    }
    evaluation = subject.evaluation("linear", images.facts(), protocol)
    subject.introduce(*_linear_conventions(config, images), *filter(None, [why]))
    if config.optimizer == "lars" and config.little_for_lars(images.train.images):
        subject.console.warn(
            f"{images.steps * config.epochs:,} steps in all, where ImageNet gives LARS 28,080: it "
            "may stop short; see what it finds without --optimizer and --lrs"
        )
    details = (
        "" if config.optimizer == "lars" else "sgd",
        "cached" if config.cached else "",
        images.part,
    )
    files = _files(subject, config, evaluation, *details)
    source: CachedFeatures | AugmentedFeatures = (
        CachedFeatures(images, _STORAGE[config.storage])
        if config.cached
        else AugmentedFeatures(images)
    )
    held = list(subject.extract(images.val, "validation: images"))
    training = linear_training(
        config,
        features=subject.features,
        classes=len(images.train.classes),
        steps_per_epoch=images.steps,
        place=place,
    )
    with closing(source):
        trained = train_epochs(
            training, source.epoch, lambda: held, images=images, epochs=config.epochs, files=files
        )
    if fingerprint(subject.network) != evaluation.network.fingerprint:
        raise RuntimeError("linear evaluation changed the backbone, which is an error of fastsiam")
    subject.console.say("the backbone is what it was before, by its hash")
    record = _record(evaluation, images, trained, _linear_summary(config, images, trained))
    files.keep(record, show)
    return record


def _linear_conventions(config: LinearConfig, images: LabelledImages) -> list[str]:
    """Say how the classifiers are trained."""
    name = "SGD"
    if config.optimizer == "lars":
        name = f"LARS (trust {config.lars_trust:g}, no clip, biases too)"
    rates = ", ".join(f"{lr:g} ({lr * images.batch / 256:g})" for lr in config.rates)
    crops = f"trained on random crops ({config.scale_min:g} to 1 of the area) and flips"
    if config.cached:
        crops = (
            "trained on CACHED features of one central crop of each image, kept in "
            f"{config.storage}: no augmentation"
        )
    return [
        f"linear evaluation on {images}: {name}, batch {images.batch:,}, {config.epochs} "
        f"epochs, cosine per step, momentum {config.momentum:g}, weight decay "
        f"{config.weight_decay:g}",
        f"base rates, and times {images.batch:,} / 256: {rates}",
        crops,
    ]


def _linear_summary(config: LinearConfig, images: LabelledImages, trained: Trained) -> list[str]:
    way = "cached features of central crops" if config.cached else "random crops and flips"
    how = (
        f"{config.optimizer}, batch {images.batch:,}, {config.epochs} epochs, {way}{images.on_part}"
    )
    start = "untrained network, linear" if images.subject.untrained else "linear"
    summary = [f"{start} {r} (base rate {r.lr:g}, {how})" for r in trained.results]
    if len(trained.results) > 1:
        summary.append(
            f"best of {len(trained.results)} rates, chosen on these very validation images: "
            f"{trained.best.top1:.2f}% with base rate {trained.best.lr:g}"
        )
    return summary


def evaluate_finetuned(
    path: Path, config: FinetuneConfig, place: Place, *, show: Show | None = None
) -> Record:
    """Train the whole network with labels, and validate; return the record.

    Args:
        path: a run's folder, a checkpoint, or a file of another program; it stays as it is.
        config: the protocol.
        place: this rank.
        show: is given the record on rank 0, before it is written.
    """
    subject = open_subject(path, config, place)
    images = LabelledImages(subject, config)
    few = images.percent <= _FEW_PERCENT if config.subset else config.percent <= 1
    epochs = config.epochs or (60 if few else 30)
    config = replace(config, batch=images.batch, epochs=epochs)
    protocol = _protocol(config, images) | {
        "optimizer": "sgd, Nesterov",
        "lr": config.lr,
        "epochs": epochs,
        "scale_min": config.scale_min,
    }
    evaluation = subject.evaluation("finetune", images.facts(), protocol)
    how = (
        f"rate {config.lr:g} x {images.batch} / 256, batch {images.batch}, "
        f"{epochs} epochs{images.on_part}"
    )
    subject.introduce(
        f"fine-tuning all of it on {images}: SGD (Nesterov), {how}, cosine per step, "
        f"momentum {config.momentum:g}, weight decay {config.weight_decay:g}",
        f"trained on random crops ({config.scale_min:g} to 1 of the area) and flips",
    )
    files = _files(subject, config, evaluation, images.part)
    loader = images.augmented(images.batch)

    def batches(epoch: int) -> Batches:
        return ((batch.view1, batch.label) for batch in loader.epoch(epoch))

    training = fine_tuning(
        config,
        subject.network,
        features=subject.features,
        classes=len(images.train.classes),
        steps_per_epoch=images.steps,
        dtype=subject.dtype,
        place=place,
    )
    with closing(loader):
        trained = train_epochs(
            training, batches, images.validation, images=images, epochs=epochs, files=files
        )
    start = "untrained network, fine-tuned" if subject.untrained else "fine-tuned"
    record = _record(evaluation, images, trained, [f"{start} {trained.best} ({how})"])
    files.keep(record, show)
    return record


def _protocol(config: LabelConfig, images: LabelledImages) -> dict[str, Any]:
    """Return for a record what all evaluations that train with labels share."""
    return {
        "batch": images.batch,
        "momentum": config.momentum,
        "weight_decay": config.weight_decay,
        "schedule": "cosine per step",
        "seed": config.seed,
    }


def _record(
    evaluation: Evaluation, images: LabelledImages, trained: Trained, summary: list[str]
) -> Record:
    """Return the record of what was trained with labels."""
    best = trained.best
    return evaluation.record(
        results=[result.record() for result in trained.results],
        summary=summary,
        per_class=dict(zip(images.train.classes, best.per_class, strict=True)),
        speed={"seconds": trained.seconds, "epochs": trained.epochs},
        images_validated=best.images,
    )
