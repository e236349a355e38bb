"""Transfer to detection, put together: a run's network, detectors trained on it, their precision.

Every rank calls ``evaluate_detection``, and each gets the same record.
"""

from __future__ import annotations

import json
import resource
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastsiam.config.detect import DetectConfig
from fastsiam.console import Console, pace
from fastsiam.distributed import Place, from_leader
from fastsiam.errors import DataError, FastSiamError
from fastsiam.evaluate.command import Show, destination_of, unseen
from fastsiam.evaluate.detection import (
    Detections,
    DetectionSet,
    Task,
    coco_scores,
    open_detection,
    voc_scores,
)
from fastsiam.evaluate.detection.augment import TrainingImages, opened
from fastsiam.evaluate.detection.masks import coco_tools
from fastsiam.evaluate.detection.model import NAMES, build_detector
from fastsiam.evaluate.detection.picture import draw, sheet
from fastsiam.evaluate.detection.protocol import (
    FIGURES,
    PAPER,
    Schedule,
    differences,
    papers_rows,
    schedule_of,
)
from fastsiam.evaluate.detection.training import DetectorTraining, Rates
from fastsiam.evaluate.epochs import Partial
from fastsiam.evaluate.features import fingerprint
from fastsiam.evaluate.subject import autocast_of, open_network, short_name
from fastsiam.interchange import Pretrained
from fastsiam.interchange.loading import normalisation
from fastsiam.report.pictures import save_picture
from fastsiam.run.records import (
    DataFacts,
    Destination,
    Evaluation,
    ImageFacts,
    NetworkFacts,
    Record,
    check_targets,
)

_LOOKED_AT = 20
"""Steps between looks at the loss, which wait for the GPU, and chances to save."""
_DRAWN = 8
"""Images of the picture."""


def preflight(path: Path, config: DetectConfig) -> None:
    """Refuse what cannot work before ranks are started.

    Raises:
        FastSiamError: says what is wrong.
    """
    open_network(path, config)
    _Data.open(config)
    if config.json:
        check_targets(Path(config.json))


@dataclass(frozen=True, slots=True)
class _Data:
    """What is trained on, and what is measured on."""

    train: DetectionSet
    val: DetectionSet
    masks: bool

    @classmethod
    def open(cls, config: DetectConfig) -> _Data:
        """Open both splits.

        Raises:
            FastSiamError: they cannot be read, or a package is missing.
        """
        if not config.data:
            raise FastSiamError(
                f"eval detect needs --data: the folder of {config.task}'s folders or archives"
            )
        task: Task = config.task
        train, val = (open_detection(task, Path(config.data), split) for split in ("train", "val"))
        if train.classes != val.classes:
            raise DataError(f"{train.name} and {val.name} name different classes")
        masks = task == "coco"
        if masks:
            coco_tools("mask")
            for part in (train, val):
                if any(len(one) and one.masks is None for one in part.pictures()):
                    raise DataError(f"{part.name} has no masks, which COCO's task is about")
        return cls(train, val, masks)

    def facts(self, root: str) -> DataFacts:
        """Return for a record which images and annotations these are."""
        stamps = f"{self.train.stamp()} {self.val.stamp()}"
        return DataFacts(
            root=root,
            train=len(self.train),
            val=len(self.val),
            classes=len(self.train.classes),
            labels_crc32=f"{zlib.crc32(stamps.encode()):08x}",
        )


def evaluate_detection(
    path: Path, config: DetectConfig, place: Place, *, show: Show = unseen
) -> Record:
    """Train a detector on a network for each trial, and measure it; return the record.

    Args:
        path: a run's folder, a checkpoint, or a file of another program; it stays as it is.
        config: the protocol.
        place: this rank.
        show: is given the record on rank 0, before it is written.

    Raises:
        FastSiamError: network, data or settings cannot be, or the loss is not finite.
    """
    trials = _Trials(path, config, place)
    trials.introduce()
    began = time.monotonic()
    lines = trials.all()
    record = trials.evaluation.record(
        results=lines,
        summary=[],
        per_class={},
        speed={"seconds": time.monotonic() - began},
        images_validated=len(trials.data.val),
    )
    record.summary.extend(_summary(record, config))
    if place.is_leader:
        show(record)
        if trials.destination.keep(record):
            trials.partial.remove()
    return record


class _Trials:
    """The trials of one evaluation: the same network and data, other seeds."""

    def __init__(self, path: Path, config: DetectConfig, place: Place) -> None:
        self.config, self.place = config, place
        self.console = Console(quiet=not place.is_leader)
        self.pretrained: Pretrained = open_network(path, config)
        self.data = _Data.open(config)
        self.schedule: Schedule = schedule_of(config)
        self.dtype = autocast_of(config, self.pretrained.config, place)
        own = normalisation(self.pretrained)
        self.mean, self.std = config.mean or own[0], config.std or own[1]
        self.differences = differences(
            config, self.pretrained.model.backbone, short_name(self.dtype)
        )
        self.evaluation = self._evaluation()
        self.destination: Destination = destination_of(
            self.pretrained.run,
            config,
            self.evaluation,
            config.task,
            config.detector,
            "untrained" if config.untrained else "",
            place=place,
            console=self.console,
        )
        self.partial = Partial(
            self.destination.first, self.evaluation, place=place, console=self.console
        )
        torch.backends.cudnn.benchmark = False  # every batch has another shape

    def introduce(self) -> None:
        """Print what is evaluated, how, and what is not as the protocol has it."""
        config, made, say = self.config, self.schedule, self.console.say
        kind = "CPU"
        if self.place.device.type == "cuda":
            kind = torch.cuda.get_device_name(self.place.device)
        say(f"{'UNTRAINED: ' * config.untrained}{self.pretrained}")
        say(
            f"{self.data.train.name}: {len(self.data.train):,} images; "
            f"{self.data.val.name}: {len(self.data.val):,}; {len(self.data.train.classes)} classes"
        )
        say(
            f"{NAMES[config.detector]}, {'Mask' if self.data.masks else 'Faster'} R-CNN: "
            f"{made.steps:,} steps of {config.batch_size}, rate {config.lr:g}, drops at "
            f"{', '.join(f'{drop:,}' for drop in made.drops)}; {short_name(self.dtype)} on "
            f"{self.place.world} x {kind}; {_trials(config)}"
        )
        if self.differences:
            say(f"not the protocol's: {'; '.join(self.differences)}")

    def all(self) -> list[dict[str, Any]]:
        """Train and measure every trial; continue where an earlier try was interrupted."""
        steps, lines = self.schedule.steps, []
        found = self.partial.load() if self.config.resume == "auto" else None
        first, state = 0, None
        if found:
            first, step = divmod(found["epoch"], steps + 1)
            lines, state = json.loads(found["state"]["lines"]), found["state"]["training"]
            where = f"trial {first + 1}, step {step:,} of {steps:,}"
            self.console.say(f"continuing in {where}, where it was interrupted")
        else:
            step = 0
        for trial in range(first, self.config.trials):
            lines.append(self._trial(trial, step, state, lines))
            step, state = 0, None
        return lines

    def _trial(
        self, trial: int, first: int, state: dict[str, Any] | None, lines: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Train one detector from a step on, and measure it; return its figures."""
        config, steps = self.config, self.schedule.steps
        seed, began = config.seed + trial, time.monotonic()
        training = self._training(seed)
        if state is not None:
            training.load(state)
        images = self._images(seed)
        heading = f"trial {trial + 1} of {config.trials}, step"
        with self.console.progress(steps, first, heading):
            for step, batch in enumerate(images.from_step(first, steps), start=first):
                loss = training.step(step, batch)
                done = step + 1
                if done % _LOOKED_AT and done != steps:
                    continue
                value = training.mean_loss(loss, done)
                seconds = max(time.monotonic() - began, 1e-9)
                speed = (done - first) * config.batch_size / seconds
                left = (steps - done) * config.batch_size
                self.console.advance(
                    done,
                    f"loss {value:.3f}, {pace(speed, left)}, {self._memory()}",
                    place=f" of {steps:,}",
                )
                self.partial.save(
                    trial * (steps + 1) + done,
                    partial(_state, training, json.dumps(lines)),
                    last=done == steps,
                )
        training.settle_batch_norm(images.from_step(steps, steps + config.precise_bn))
        found = self._found(training)
        scores = self._scores(found)
        self.console.say(
            f"trial {trial + 1} (seed {seed}): "
            + ", ".join(f"{name} {value:.1f}" for name, value in scores.items())
        )
        if trial == 0 and self.place.is_leader:
            self._draw(found)
        return {"trial": trial + 1, "seed": seed, **scores}

    def _training(self, seed: int) -> DetectorTraining:
        config = self.config
        torch.manual_seed(seed)  # of the heads' first weights
        model = build_detector(
            self.pretrained.network(),
            kind=config.detector,
            classes=len(self.data.train.classes),
            masks=self.data.masks,
            mean=self.mean,
            std=self.std,
            rois=config.rois,
        )
        rates = Rates(schedule=self.schedule, lr=config.lr, weight_decay=config.weight_decay)
        return DetectorTraining(model, rates, seed=seed, dtype=self.dtype, place=self.place)

    def _images(self, seed: int) -> TrainingImages:
        config = self.config
        workers = config.workers if config.workers >= 0 else torch.get_num_threads()
        return TrainingImages(
            self.data.train,
            seed=seed,
            batch=config.batch_size,
            sides=self.schedule.sides,
            longest=config.long_side,
            masks=self.data.masks,
            rank=self.place.rank,
            world=self.place.world,
            workers=workers,
        )

    def _found(self, training: DetectorTraining) -> list[Detections]:
        """Detect the objects of all images that are measured on."""
        world, total, began = self.place.world, len(self.data.val), time.monotonic()

        def shown(positions: range) -> Iterator[int]:
            for count, position in enumerate(positions):
                yield position
                done = min(total, (count + 1) * world)
                speed = done / max(time.monotonic() - began, 1e-9)
                self.console.advance(done, pace(speed, total - done), place=f" of {total:,}")

        with self.console.progress(total, 0, "detecting: image"):
            return training.detections(
                self.data.val,
                side=self.schedule.sides[-1],
                longest=self.config.long_side,
                shown=shown,
            )

    def _scores(self, found: list[Detections]) -> dict[str, float]:
        """Measure on rank 0; every rank gets the figures."""
        scores: dict[str, float] = {}
        if self.place.is_leader and not self.data.masks:
            scores = {name: voc_scores(self.data.val, found)[name] for name in FIGURES}
        elif self.place.is_leader:
            boxes = coco_scores(self.data.val, found)
            masks = coco_scores(self.data.val, found, "segm")
            scores = {name: boxes[name] for name in FIGURES}
            scores |= {f"mask {name}": masks[name] for name in FIGURES}
        plain: dict[str, float] = json.loads(from_leader(json.dumps(scores)))
        return plain

    def _draw(self, found: list[Detections]) -> None:
        """Draw what was found beside the truth, into the file beside the record's."""
        if self.destination.first is None:
            return
        path = self.destination.first.with_suffix(".png")
        val = self.data.val
        drawn = [
            draw(opened(val, i), val.picture(i), found[i], classes=val.classes)
            for i in range(min(_DRAWN, len(val)))
        ]
        try:
            save_picture(sheet(drawn), path)
        except FastSiamError as error:
            self.console.warn(str(error))
        else:
            self.console.say(f"wrote {path}: the truth, and what the first trial found")

    def _evaluation(self) -> Evaluation:
        config, pretrained, made = self.config, self.pretrained, self.schedule
        network = NetworkFacts(
            backbone=pretrained.model.backbone,
            stem=pretrained.model.stem,
            layout=pretrained.layout,
            file=str(pretrained.path),
            epoch=pretrained.epoch,
            untrained=config.untrained,
            fingerprint=fingerprint(pretrained.network()),
        )
        images = ImageFacts(
            crop=0,
            resize=made.sides[-1],
            mean=tuple(self.mean),
            std=tuple(self.std),
            pipeline="detection",
            precision=short_name(self.dtype),
            ranks=self.place.world,
        )
        protocol = {
            "task": config.task,
            "detector": NAMES[config.detector],
            "steps": made.steps,
            "drops": list(made.drops),
            "warmup": made.warmup,
            "batch": config.batch_size,
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "sides": [made.sides[0], made.sides[-1]],
            "long_side": config.long_side,
            "rois": config.rois,
            "precise_bn": config.precise_bn,
            "seed": config.seed,
            "trials": config.trials,
            "differences": self.differences,
        }
        facts = self.data.facts(config.data)
        return Evaluation(
            kind="detect", network=network, data=facts, images=images, protocol=protocol
        )

    def _memory(self) -> str:
        if self.place.device.type == "cuda":
            return f"{torch.cuda.max_memory_allocated(self.place.device) / 1e9:.1f} GB of GPU"
        return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB"


def _state(training: DetectorTraining, lines: str) -> dict[str, Any]:
    return {"lines": lines, "training": training.state()}


def _trials(config: DetectConfig) -> str:
    return f"{config.trials} trial{'s' if config.trials > 1 else ''}"


def _summary(record: Record, config: DetectConfig) -> list[str]:
    """Return the means for people, each beside the rows of the paper."""
    means, spread = record.over_trials
    start = "untrained network, " if record.network.untrained else ""
    lines = []
    for prefix, task in (("", config.task), ("mask ", f"{config.task} masks")):
        if f"{prefix}AP" not in means:
            continue
        figures = ", ".join(
            f"{name} {means[name]:.1f}" + ("" if (sd := spread[name]) is None else f" ± {sd:.1f}")
            for name in (f"{prefix}{figure}" for figure in FIGURES)
        )
        shown = f"{figures} ({_trials(config)})"
        lines.append(f"{start}{task}, {record.protocol['detector']}: {shown}")
        if task in PAPER:
            lines.append(papers_rows(task))
    if record.protocol["differences"]:
        lines.append(f"not the protocol's: {'; '.join(record.protocol['differences'])}")
    return lines
