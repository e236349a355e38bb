"""The evaluations: a network, its images, a measure, and the record that is kept.

Every rank calls these functions, and each gets the same record (see ``fastsiam.run.records``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

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
from fastsiam.evaluate.accuracy import Accuracy
from fastsiam.evaluate.features import collected
from fastsiam.evaluate.knn import KnnResult, knn_accuracy
from fastsiam.evaluate.labelled import (
    Batches,
    LabelledImages,
    augmented_features,
    augmented_images,
    cached_features,
)
from fastsiam.evaluate.record_files import RecordFiles, Show
from fastsiam.evaluate.subject import Subject, open_subject
from fastsiam.evaluate.supervised import SupervisedTraining
from fastsiam.model.numerics import autocast_type
from fastsiam.run.records import Record
from fastsiam.views.batch import EvalLoader

_FEW_PERCENT = 2
"""A list of up to so many images is one of about 1%, which is fine-tuned for longer."""
Features = Literal["pixels", "untrained", "trained"]
"""What kNN compares."""
_NAMES = {"pixels": "raw pixels", "untrained": "untrained network", "trained": "trained"}


def preflight(path: Path, config: EvalConfig) -> None:
    """Refuse what cannot work before ranks are started: a file, data, a batch.

    Raises:
        FastSiamError: says what is wrong.
    """
    place = Place(0, config.gpus * config.max_nodes, torch.device("cpu"))
    subject = open_subject(path, config, place)
    if isinstance(config, LabelConfig):
        LabelledImages(subject, config)
    else:
        subject.loaders()


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
    own = subject.pretrained.config.monitor if subject.pretrained.config else MonitorConfig()
    votes = [
        (k, temperature)
        for k in config.k or [own.knn_k]
        for temperature in config.temperature or [own.knn_temperature]
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
    subject.introduce()
    kinds: list[Features] = ["untrained" if subject.untrained else "trained"]
    if config.baselines:
        kinds = ["pixels", *dict.fromkeys(("untrained", *kinds))]
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
    record = files.evaluation.record(
        results=lines,
        summary=summary,
        per_class=dict(zip(bank.classes, results[0].per_class, strict=True)),
        speed=speed,
    )
    return files.keep(record, show)


def _classified(
    subject: Subject,
    kind: Features,
    bank: EvalLoader,
    queries: EvalLoader,
    votes: list[tuple[int, float]],
) -> list[KnnResult]:
    """Classify the queries by features of a kind; return a result for each vote."""
    if kind == "pixels":
        subject = replace(subject, network=nn.Flatten(), dtype=torch.float32)
    elif kind == "untrained" and not subject.untrained:
        subject = subject.as_untrained()
    asked, labels, _ = collected(subject.extract(queries, "queries"))
    known = ((part, own) for part, own, _ in subject.extract(bank, "bank: images"))
    return knn_accuracy(known, asked, labels, votes=votes, classes=len(bank.classes))


def evaluate_linear(
    path: Path, config: LinearConfig, place: Place, *, show: Show | None = None
) -> Record:
    """Train a linear classifier for each rate on frozen features, and validate; return the record.

    The arguments are as for ``evaluate_knn``.
    """
    subject = open_subject(path, config, place)
    images = LabelledImages(subject, config)
    why = config.why_settled(images.train.images)
    config = replace(config.settled(images.train.images), batch=images.batch)
    subject.introduce(*_linear_lines(config, images), images.note, why)
    details = "sgd" if config.optimizer == "sgd" else "", "cached" if config.cached else ""
    files = subject.record_files(
        "linear", images.facts(), config.protocol(), config, *details, images.part
    )
    held = [part[:2] for part in subject.extract(images.val, "validation: images")]
    if config.cached:
        batches = cached_features(images, autocast_type(config.storage, place.device))
    else:
        batches = partial(augmented_features, images)
    way = "cached features of central crops" if config.cached else "random crops and flips"
    how = f"{config.optimizer}, batch {config.batch:,}, {config.epochs} epochs, {way}"
    start = "untrained network, linear" if subject.untrained else "linear"

    def summary(results: list[Accuracy]) -> list[str]:
        pairs = list(zip(config.rates, results, strict=True))
        lines = [f"{start} {r} (base rate {lr:g}, {how}{images.on_part})" for lr, r in pairs]
        if len(pairs) > 1:
            lr, best = max(pairs, key=lambda pair: pair[1].top1)
            lines.append(
                f"best of {len(pairs)} rates, chosen on these very validation images: "
                f"{best.top1:.2f}% with base rate {lr:g}"
            )
        return lines

    return _trained(files, images, config, None, batches, lambda: held, summary, show)


def _linear_lines(config: LinearConfig, images: LabelledImages) -> list[str]:
    """Describe how the classifiers are trained."""
    name = "SGD"
    if config.optimizer == "lars":
        name = f"LARS (trust {config.lars_trust:g}, no clip, biases too)"
    rates = ", ".join(f"{lr:g} ({lr * config.batch / 256:g})" for lr in config.rates)
    crops = (
        "trained on CACHED features of one central crop of each image, kept in "
        f"{config.storage}: no augmentation"
    )
    return [
        f"linear evaluation on {images}: {name}, batch {config.batch:,}, {config.epochs} epochs, "
        f"{_shared_settings(config)}",
        f"base rates, and times {config.batch:,} / 256: {rates}",
        crops if config.cached else _augmentation(config),
    ]


def evaluate_finetuned(
    path: Path, config: FinetuneConfig, place: Place, *, show: Show | None = None
) -> Record:
    """Train the whole network with labels, and validate; return the record.

    The arguments are as for ``evaluate_knn``; the file stays as it is.
    """
    subject = open_subject(path, config, place)
    images = LabelledImages(subject, config)
    few = images.percent <= _FEW_PERCENT if config.subset else config.percent <= 1
    config = replace(config, batch=images.batch, epochs=config.epochs or (60 if few else 30))
    how = f"rate {config.lr:g} x {images.batch} / 256, batch {images.batch}, {config.epochs} epochs"
    files = subject.record_files("finetune", images.facts(), config.protocol(), config, images.part)
    subject.introduce(
        f"fine-tuning all of it on {images}: SGD (Nesterov), {how}, {_shared_settings(config)}",
        _augmentation(config),
        images.note,
    )
    start = "untrained network, fine-tuned" if subject.untrained else "fine-tuned"
    return _trained(
        files,
        images,
        config,
        subject.network,
        partial(augmented_images, images),
        lambda: ((batch.image, batch.label) for batch in images.val),
        lambda results: [f"{start} {results[0]} ({how}{images.on_part})"],
        show,
    )


def _shared_settings(config: LabelConfig) -> str:
    return f"cosine per step, momentum {config.momentum:g}, weight decay {config.weight_decay:g}"


def _augmentation(config: LabelConfig) -> str:
    return f"trained on random crops ({config.scale_min:g} to 1 of the area) and flips"


def _trained(
    files: RecordFiles,
    images: LabelledImages,
    config: LinearConfig | FinetuneConfig,
    backbone: nn.Module | None,
    batches: Callable[[range], Batches],
    validation: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    summary: Callable[[list[Accuracy]], list[str]],
    show: Show | None,
) -> Record:
    """Train from where an earlier try was interrupted; validate, and keep the record."""
    console, steps, began = files.console, images.steps, time.monotonic()
    training = SupervisedTraining(
        config,
        backbone,
        features=images.subject.features,
        classes=len(images.train.classes),
        steps_per_epoch=steps,
        dtype=images.subject.dtype if backbone else torch.float32,
        place=images.subject.place,
    )
    results: list[Accuracy] = []

    def best() -> Accuracy:
        return max(results, key=lambda result: result.top1)

    def validate(done: int, losses: Tensor) -> str:
        epoch = done // steps
        if epoch == config.epochs or (config.eval_every and epoch % config.eval_every == 0):
            results[:] = training.evaluate(validation())
            loss = losses[results.index(best())].item()
            console.say(f"epoch {epoch} of {config.epochs}: loss {loss:.3f}, {best()}")
        return ""

    before = training.run(
        lambda step: batches(range(step // steps, config.epochs)),
        steps=training.steps,
        every=steps,
        images=images.batch,
        files=files,
        at_mark=validate,
    )
    results = results or training.evaluate(validation())
    seconds = time.monotonic() - began
    console.say(
        f"trained in {duration(seconds)}; {best().images:,} validation images, each counted once"
    )
    record = files.evaluation.record(
        results=[
            {"lr": lr, "top1": result.top1, "top5": result.top5}
            for lr, result in zip(training.rates, results, strict=True)
        ],
        summary=summary(results),
        per_class=dict(zip(images.train.classes, best().per_class, strict=True)),
        speed={"seconds": seconds, "epochs": config.epochs - before // steps},
        images_validated=best().images,
    )
    return files.keep(record, show)
