"""Transfer to detection: train detectors on a network and measure their average precision.

Every rank calls ``evaluate_detection``, and each gets the same record.
"""

from __future__ import annotations

import time
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastsiam.config import TrainConfig
from fastsiam.config.detect import DetectConfig
from fastsiam.config.setting import as_text
from fastsiam.console import Console, format_count
from fastsiam.distributed import Place, check_same_images
from fastsiam.errors import DataError, FastSiamError
from fastsiam.evaluate.record_files import RecordFiles, Show
from fastsiam.evaluate.subject import (
    autocast_of,
    devices,
    network_facts,
    open_network,
    short_name,
)
from fastsiam.interchange import Pretrained
from fastsiam.markdown import format_mean
from fastsiam.run.records import DataFacts, Evaluation, ImageFacts, Record

from .datasets import DetectionSet, open_detection
from .detectors import build_detector, require_resnet
from .protocol import FIGURES, NAMES, differences, papers_rows, protocol_of, schedule_of
from .scores import coco_scores, voc_scores
from .training import DetectorTraining


def preflight(path: Path, config: DetectConfig) -> str:
    """Check network and data before ranks are started; return the checksum of the annotations.

    Raises:
        FastSiamError: one of them cannot be used.
    """
    require_resnet(open_network(path, config).network())
    return _open_data(config)[2].labels_crc32


def evaluate_detection(
    path: Path, config: DetectConfig, place: Place, *, show: Show | None = None
) -> Record:
    """Train and measure a detector for each trial; the network's file is not changed.

    An interrupted evaluation is resumed. Arguments and return value are those of ``evaluate_knn``.

    Raises:
        FastSiamError: network, data or settings cannot be used, or the loss is not finite.
    """
    console = Console(quiet=not place.is_leader)
    pretrained = open_network(path, config)
    backbone = require_resnet(pretrained.network())
    own = pretrained.config or TrainConfig()
    train, val, data = _open_data(config)
    dtype = autocast_of(config, own, place)
    evaluation = _evaluation(pretrained, backbone, config, place, data, dtype)
    pictures = (*train.pictures, *val.pictures)
    check_same_images((f"{one.file.name} {data.labels_crc32}" for one in pictures), config.data)
    details = config.task, config.detector, "untrained" if config.untrained else ""
    files = RecordFiles(
        pretrained.run, evaluation, *details, config=config, place=place, console=console
    )
    changes = evaluation.protocol["differences"]
    notes = [f"not the protocol's: {'; '.join(changes)}"] if changes else []
    machine = f"{evaluation.images.precision} on {devices(place)}"
    console.say(f"{'UNTRAINED: ' * config.untrained}{pretrained}")
    for line in (*_plan(train, val, config, machine), *notes):
        console.say(line)
    began, steps = time.monotonic(), schedule_of(config).steps
    first_step = len(files.results) * steps + (files.saved["step"] if files.saved else 0)
    torch.backends.cudnn.benchmark = False  # each batch has a different shape
    torch.backends.cudnn.allow_tf32 = own.numerics.tf32
    for trial in range(len(files.results) + 1, config.trials + 1):
        seed = config.seed + trial - 1
        torch.manual_seed(seed)  # for the initial weights of the heads
        model = build_detector(
            pretrained.network(),
            config,
            classes=len(train.classes),
            mean=evaluation.images.mean,
            std=evaluation.images.std,
            dtype=dtype,
        )
        training = DetectorTraining(model, config, seed=seed, place=place)
        training.fit(train, files, f"trial {trial} of {config.trials}, step")
        scores = _scores(training, val, place, console)
        text = ", ".join(f"{name} {value:.1f}" for name, value in scores.items())
        console.say(f"trial {trial} (seed {seed}): {text}")
        files.results.append({"trial": trial, "seed": seed, **scores})
    return files.keep(
        show,
        results=files.results,
        summary=_summary(files.results, config) + notes,
        per_class={},
        speed={"seconds": time.monotonic() - began, "steps": config.trials * steps - first_step},
        images_validated=len(val.pictures),
    )


def _open_data(config: DetectConfig) -> tuple[DetectionSet, DetectionSet, DataFacts]:
    """Open the training set and the test set, and describe them for a record."""
    if not config.data:
        raise FastSiamError(f"eval detect needs --data: the folder with {config.task}'s data")
    train = open_detection(config.task, Path(config.data), "train")
    val = open_detection(config.task, Path(config.data), "val")
    if train.classes != val.classes:
        raise DataError(f"{train.name} and {val.name} have different classes, or with other ids")
    val.check_has_objects()
    facts = DataFacts(
        root=config.data,
        train=len(train.pictures),
        val=len(val.pictures),
        classes=len(train.classes),
        labels_crc32=f"{zlib.crc32(f'{train.checksum} {val.checksum}'.encode()):08x}",
    )
    return train, val, facts


def _plan(train: DetectionSet, val: DetectionSet, config: DetectConfig, machine: str) -> list[str]:
    """Describe the data and the training for display."""
    schedule, kind = schedule_of(config), "Mask" if config.task == "coco" else "Faster"
    drops = ", ".join(f"{drop:,}" for drop in schedule.drops)
    return [
        f"{train.name}: {len(train.pictures):,} images; {val.name}: {len(val.pictures):,}; "
        f"{len(train.classes)} classes",
        f"{NAMES[config.detector]}, {kind} R-CNN: {schedule.steps:,} steps of "
        f"{config.batch_size}, rate {config.lr:g}, drops at {drops}; {machine}; "
        f"{format_count(config.trials, 'trial')}",
    ]


def _evaluation(
    pretrained: Pretrained,
    backbone: nn.Module,
    config: DetectConfig,
    place: Place,
    data: DataFacts,
    dtype: torch.dtype,
) -> Evaluation:
    default = pretrained.input_or_default
    images = ImageFacts(
        crop=0,
        resize=schedule_of(config).sides[-1],
        mean=tuple(config.mean or default.mean),
        std=tuple(config.std or default.std),
        pipeline="detection",
        precision=short_name(dtype),
        ranks=place.world,
    )
    is_per_rank = place.world > 1 and place.device.type == "cpu"
    model = pretrained.model
    facts = {
        "backbone": model.backbone,
        "stem": model.stem,
        "width": model.width,
        "BN statistics": "of a rank" if is_per_rank else "of all ranks",
        "precision": images.precision,
        "mean": as_text(images.mean),
        "std": as_text(images.std),
    }
    return Evaluation(
        kind="detect",
        network=network_facts(pretrained, backbone, untrained=config.untrained),
        data=data,
        images=images,
        protocol=protocol_of(config) | {"differences": differences(config, facts)},
    )


def _scores(
    training: DetectorTraining, val: DetectionSet, place: Place, console: Console
) -> dict[str, float]:
    """Detect objects, with the images divided among the ranks; return the scores on every rank."""
    with console.tally("detecting: images", len(val.pictures)) as progress:
        detections = training.detections(val, lambda: progress.add(place.world))
    if val.coco is None:
        return voc_scores(val, detections)
    masks = coco_scores(val, detections, "segm")
    return coco_scores(val, detections) | {f"mask {x}": y for x, y in masks.items()}


def _summary(results: list[dict[str, Any]], config: DetectConfig) -> list[str]:
    """Format the means over trials for display, followed by the paper's results."""
    start = "untrained network, " * config.untrained
    lines = []
    for prefix, task in (("", config.task), ("mask ", f"{config.task} masks")):
        if f"{prefix}AP" in results[0]:
            figures = ", ".join(
                f"{name} {format_mean([line[name] for line in results], 1)}"
                for name in (f"{prefix}{figure}" for figure in FIGURES)
            )
            trials = format_count(config.trials, "trial")
            lines.append(f"{start}{task}, {NAMES[config.detector]}: {figures} ({trials})")
            lines.append(papers_rows(task))
    return lines
