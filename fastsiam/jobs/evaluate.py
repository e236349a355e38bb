"""The evaluations, put together: a network, its images, a measure, and the record that is kept.

Every rank calls these functions, and each gets the same record (see ``evaluate.records``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastsiam.config import MonitorConfig, OptimConfig
from fastsiam.config.evaluate import EvalConfig, FinetuneConfig, KnnConfig, LinearConfig
from fastsiam.console import duration
from fastsiam.distributed import Place
from fastsiam.errors import DataError, FastSiamError
from fastsiam.evaluate.features import collected, fingerprint, pixel_batches
from fastsiam.evaluate.finetune import FineTuning
from fastsiam.evaluate.knn import KnnResult, knn_accuracy
from fastsiam.evaluate.linear import LinearTraining
from fastsiam.evaluate.records import check_targets, keep_record
from fastsiam.jobs.labelled import Task
from fastsiam.jobs.subject import Subject, described_data, open_subject
from fastsiam.views.batch import EvalLoader

_PIXELS_GB = 8
"""Raw pixels above this are not offered as a baseline."""
_FEW_STEPS = 2000
"""Below so many steps of LARS, the rates of the paper's protocol hardly leave the start."""
_FEW_PERCENT = 2
"""A list of up to so many images is one of about 1%, which is fine-tuned for longer."""
_STORAGE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def preflight(path: Path, config: EvalConfig) -> None:
    """Refuse what cannot work before ranks are started: a file, data, a batch, a record's place.

    Raises:
        FastSiamError: says what is wrong.
    """
    place = Place(0, 1, torch.device("cpu"))
    subject = open_subject(path, config, place)
    train, _ = subject.loaders()
    if config.json:
        check_targets(Path(config.json))
    batch = getattr(config, "batch", 0)
    if batch % config.gpus or train.images < config.gpus:
        raise FastSiamError(f"--batch {batch} cannot be shared equally by {config.gpus} ranks")


def evaluate_knn(path: Path, config: KnnConfig, place: Place) -> dict[str, Any]:
    """Classify the validation images by their nearest training images; return the record.

    Args:
        path: a run's folder, a checkpoint, or a file of another program.
        config: the protocol.
        place: this rank.
    """
    subject = open_subject(path, config, place)
    own = subject.pretrained.config
    monitor = own.monitor if own else MonitorConfig()
    votes = [
        (k, temperature)
        for k in config.ks or [monitor.knn_k]
        for temperature in config.temperatures or [monitor.knn_temperature]
    ]
    bank, queries = subject.loaders()
    gigabytes = queries.images * 3 * subject.augment.crop**2 * 4 / 1e9
    if config.baselines and gigabytes > _PIXELS_GB:
        raise DataError(
            f"the raw pixels of {queries.images:,} images would take {gigabytes:,.0f} GB; "
            "leave --baselines out"
        )
    record = subject.record("knn")
    record["data"] |= described_data(bank, queries)
    record["protocol"] = {"features": "pool5", "similarity": "cosine", "votes": votes}
    targets = _targets(subject, config, record)
    subject.introduce()
    epoch = record["network"]["epoch"]
    own_kind = "untrained" if subject.untrained else "trained"
    kinds = dict.fromkeys(("pixels", "untrained", own_kind) if config.baselines else (own_kind,))
    record["results"], record["summary"] = [], []
    for kind in kinds:
        name = {"pixels": "raw pixels", "untrained": "untrained network"}.get(kind, "trained")
        if kind == "trained" and epoch is not None:
            name = f"after {epoch:g} epochs"
        began = time.monotonic()
        if kind == "pixels":
            features = pixel_batches(bank), pixel_batches(queries)
        else:
            shown = subject
            if kind != own_kind:
                shown = open_subject(path, replace(config, untrained=True), place)
            features = shown.extract(bank, "bank: image"), shown.extract(queries, "query")
        results = knn(*features, bank, votes)
        seconds, images = time.monotonic() - began, bank.images + queries.images
        subject.console.say(
            f"{name}: {images:,} images in {duration(seconds)}, {images / seconds:,.0f} images/s, "
            "search included"
        )
        record["speed"] = {"seconds": seconds, "images_per_second": images / seconds}
        found = [{"features": kind, **result.record(), "top5": result.top5} for result in results]
        if kind == "trained" and epoch is not None:
            found = [{**line, "epoch": epoch} for line in found]
        record[kind] = found[0]
        record["results"] += found
        record["summary"] += [f"{name}: {result}" for result in results]
    record["per_class"] = dict(zip(bank.classes, results[0].per_class, strict=True))
    if place.leads:
        keep_record(record, *targets)
    return record


def knn(
    bank_features: Iterable[tuple[Tensor, Tensor]],
    query_features: Iterable[tuple[Tensor, Tensor]],
    bank: EvalLoader,
    votes: list[tuple[int, float]],
) -> list[KnnResult]:
    """Classify queries by a bank whose features stream by; all ranks' together."""
    return knn_accuracy(
        bank_features, *collected(query_features), votes=votes, classes=len(bank.classes)
    )


def evaluate_linear(path: Path, config: LinearConfig, place: Place) -> dict[str, Any]:
    """Train a linear classifier for each rate on frozen features, and validate; return the record.

    Args:
        path: a run's folder, a checkpoint, or a file of another program.
        config: the protocol.
        place: this rank.

    Raises:
        RuntimeError: the backbone is not what it was before.
    """
    subject = open_subject(path, config, place)
    task = Task(subject, config, config.batch or (4096 if config.optimizer == "lars" else 256))
    optim = OptimConfig(
        optimizer=config.optimizer,
        batch=task.batch,
        epochs=config.epochs,
        lr=config.rates[0],
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        lars_trust=config.lars_trust,
    )
    lars = config.optimizer == "lars"
    record = task.record(
        "linear",
        optimizer=config.optimizer,
        lars_trust=config.lars_trust if lars else None,
        rates=config.rates,
        epochs=config.epochs,
        cached=config.cached,
        storage=config.storage if config.cached else None,
        scale_min=None if config.cached else config.scale_min,
    )
    subject.introduce(*_conventions(config, task))
    if lars and task.steps * config.epochs < _FEW_STEPS:
        subject.console.warn(
            f"{task.steps * config.epochs:,} steps in all, where ImageNet gives LARS 28,080: it "
            "may stop short; see what --optimizer sgd --lrs 0.1,0.3,1,3,10,30 finds"
        )
    details = "" if lars else "sgd", "cached" if config.cached else "", task.share
    targets = _targets(subject, config, record, *details)
    source = task.cached(_STORAGE[config.storage]) if config.cached else task.features()
    held = list(subject.extract(task.val, "validation: image"))
    training = LinearTraining(
        optim,
        config.rates,
        features=subject.features,
        classes=len(task.train.classes),
        steps_per_epoch=task.steps,
        seed=config.seed,
        place=place,
    )
    results, partial = task.run(training, source, held, config.epochs, record, targets)
    if fingerprint(subject.network) != record["network"]["fingerprint"]:
        raise RuntimeError("linear evaluation changed the backbone, which is an error of fastsiam")
    subject.console.say("the backbone is what it was before, by its hash")
    way = "cached features of central crops" if config.cached else "random crops and flips"
    how = f"{config.optimizer}, batch {task.batch:,}, {config.epochs} epochs, {way}{task.of}"
    record["summary"] = [f"{_kind(record)} {r} (base rate {r.lr:g}, {how})" for r in results]
    if len(results) > 1:
        best = record["best"]
        record["summary"].append(
            f"best of {len(results)} rates, chosen on these very validation images: "
            f"{best['top1']:.2f}% with base rate {best['lr']:g}"
        )
    if place.leads:
        keep_record(record, *targets)
        partial.remove()
    return record


def _conventions(config: LinearConfig, task: Task) -> list[str]:
    """Say how the classifiers are trained."""
    name = "SGD"
    if config.optimizer == "lars":
        name = f"LARS (trust {config.lars_trust:g}, no clip, biases too)"
    rates = ", ".join(f"{lr:g} ({lr * task.batch / 256:g})" for lr in config.rates)
    images = f"trained on random crops ({config.scale_min:g} to 1 of the area) and flips"
    if config.cached:
        images = (
            "trained on CACHED features of one central crop of each image, kept in "
            f"{config.storage}: no augmentation"
        )
    return [
        f"linear evaluation on {task.described()}: {name}, batch {task.batch:,}, {config.epochs} "
        f"epochs, cosine per step, momentum {config.momentum:g}, weight decay "
        f"{config.weight_decay:g}",
        f"base rates, and times {task.batch:,} / 256: {rates}",
        images,
    ]


def evaluate_finetuned(path: Path, config: FinetuneConfig, place: Place) -> dict[str, Any]:
    """Train the whole network with labels, and validate; return the record.

    Args:
        path: a run's folder, a checkpoint, or a file of another program; it stays as it is.
        config: the protocol.
        place: this rank.
    """
    subject = open_subject(path, config, place)
    task = Task(subject, config, config.batch)
    few = task.percent <= _FEW_PERCENT if config.subset else config.percent <= 1
    epochs = config.epochs or (60 if few else 30)
    optim = OptimConfig(
        batch=task.batch,
        epochs=epochs,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )
    record = task.record(
        "finetune",
        optimizer="sgd, Nesterov",
        lr=config.lr,
        epochs=epochs,
        scale_min=config.scale_min,
    )
    how = f"rate {config.lr:g} x {task.batch} / 256, batch {task.batch}, {epochs} epochs{task.of}"
    subject.introduce(
        f"fine-tuning all of it on {task.described()}: SGD (Nesterov), {how}, cosine per step, "
        f"momentum {config.momentum:g}, weight decay {config.weight_decay:g}",
        f"trained on random crops ({config.scale_min:g} to 1 of the area) and flips",
    )
    targets = _targets(subject, config, record, task.share)
    source = task.images()
    training = FineTuning(
        optim,
        subject.network,
        features=subject.features,
        classes=len(task.train.classes),
        steps_per_epoch=task.steps,
        seed=config.seed,
        dtype=subject.dtype,
        place=place,
    )
    (result,), partial = task.run(training, source, task.val, epochs, record, targets)
    record["summary"] = [f"{_kind(record)} {result} ({how})"]
    if place.leads:
        keep_record(record, *targets)
        partial.remove()
    return record


def _kind(record: dict[str, Any]) -> str:
    kind = "fine-tuned" if record["kind"] == "finetune" else "linear"
    return f"untrained network, {kind}" if record["network"]["untrained"] else kind


def _targets(
    subject: Subject, config: EvalConfig, record: dict[str, Any], *details: str
) -> list[Path]:
    """Return where a record will go, which is possible: in its run, and where the user wants it."""
    wanted = Path(config.json) if config.json else None
    targets = [t for t in (subject.record_path(record, *details), wanted) if t is not None]
    if subject.place.leads:
        check_targets(*targets)
    return targets
