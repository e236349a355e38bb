"""Transfer to detection, put together: a run's network, detectors trained on it, their precision.

Every rank calls ``evaluate_detection``, and each gets the same record.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from fastsiam.config.detect import DetectConfig
from fastsiam.console import Console, counted, pace
from fastsiam.distributed import Place, from_leader
from fastsiam.errors import DataError, FastSiamError
from fastsiam.evaluate.record_files import RecordFiles, Show
from fastsiam.evaluate.subject import autocast_of, network_facts, open_network, short_name
from fastsiam.run.records import DataFacts, Evaluation, ImageFacts, Record, check_targets

from .datasets import DetectionSet, open_detection
from .images import TrainingImages
from .model import build_detector
from .protocol import FIGURES, NAMES, differences, papers_rows, protocol_of, schedule_of
from .scores import coco_scores, voc_scores
from .training import DetectorTraining

_LOOKED_AT = 20
"""Steps between looks at the loss, which wait for the GPU, and chances to save."""


def preflight(path: Path, config: DetectConfig) -> None:
    """Refuse what cannot work before ranks are started.

    Raises:
        FastSiamError: says what is wrong.
    """
    open_network(path, config)
    _open_data(config)
    if config.json:
        check_targets(Path(config.json))


def evaluate_detection(
    path: Path, config: DetectConfig, place: Place, *, show: Show | None = None
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
        images_validated=len(trials.val),
    )
    record.summary.extend(_summary(record, config))
    trials.files.keep(record, show)
    return record


def _open_data(config: DetectConfig) -> tuple[DetectionSet, DetectionSet]:
    """Open what is trained on and what is measured on.

    Raises:
        FastSiamError: they cannot be read, or a package is missing.
    """
    if not config.data:
        raise FastSiamError(
            f"eval detect needs --data: the folder of {config.task}'s unpacked folders"
        )
    train = open_detection(config.task, Path(config.data), "train")
    val = open_detection(config.task, Path(config.data), "val")
    if train.classes != val.classes:
        raise DataError(f"{train.name} and {val.name} name different classes")
    return train, val


class _Trials:
    """The trials of one evaluation: the same network and data, other seeds."""

    def __init__(self, path: Path, config: DetectConfig, place: Place) -> None:
        self.config, self.place = config, place
        self.console = Console(quiet=not place.is_leader)
        self.pretrained = open_network(path, config)
        self.train, self.val = _open_data(config)
        self.masks = config.task == "coco"
        self.schedule = schedule_of(config)
        self.dtype = autocast_of(config, self.pretrained.config, place)
        own = self.pretrained.normalisation
        self.mean, self.std = config.mean or own[0], config.std or own[1]
        self.evaluation = self._evaluation()
        self.files = RecordFiles(
            self.pretrained.run,
            self.evaluation,
            config.task,
            config.detector,
            "untrained" if config.untrained else "",
            asked=config.json,
            place=place,
            console=self.console,
        )
        torch.backends.cudnn.benchmark = False  # every batch has another shape

    def _evaluation(self) -> Evaluation:
        config, pretrained = self.config, self.pretrained
        precision = short_name(self.dtype)
        alone = self.place.world > 1 and self.place.device.type == "cpu"
        return Evaluation(
            kind="detect",
            network=network_facts(pretrained, pretrained.network(), untrained=config.untrained),
            data=DataFacts(
                root=config.data,
                train=len(self.train),
                val=len(self.val),
                classes=len(self.train.classes),
                labels_crc32=f"{self.train.checksum ^ self.val.checksum:08x}",
            ),
            images=ImageFacts(
                crop=0,
                resize=self.schedule.sides[-1],
                mean=tuple(self.mean),
                std=tuple(self.std),
                pipeline="detection",
                precision=precision,
                ranks=self.place.world,
            ),
            protocol=protocol_of(config)
            | {
                "differences": differences(
                    config,
                    pretrained.model.backbone,
                    precision,
                    "of a rank" if alone else "of all ranks",
                ),
            },
        )

    def introduce(self) -> None:
        """Print what is evaluated, how, and what is not as the protocol has it."""
        config, schedule, say = self.config, self.schedule, self.console.say
        gpu = self.place.device.type == "cuda"
        kind = torch.cuda.get_device_name(self.place.device) if gpu else "CPU"
        say(f"{'UNTRAINED: ' * config.untrained}{self.pretrained}")
        say(
            f"{self.train.name}: {len(self.train):,} images; "
            f"{self.val.name}: {len(self.val):,}; {len(self.train.classes)} classes"
        )
        say(
            f"{NAMES[config.detector]}, {'Mask' if self.masks else 'Faster'} R-CNN: "
            f"{schedule.steps:,} steps of {config.batch_size}, rate {config.lr:g}, drops at "
            f"{', '.join(f'{drop:,}' for drop in schedule.drops)}; {short_name(self.dtype)} on "
            f"{self.place.world} x {kind}; {counted(config.trials, 'trial')}"
        )
        if found := self.evaluation.protocol["differences"]:
            say(f"not the protocol's: {'; '.join(found)}")

    def all(self) -> list[dict[str, Any]]:
        """Train and measure every trial; continue where an earlier try was interrupted."""
        steps = self.schedule.steps
        lines: list[dict[str, Any]] = []
        first, step, state = 0, 0, None
        if self.config.resume == "auto" and (saved := self.files.load_state()):
            first, step = divmod(saved["epoch"], steps + 1)
            lines, state = json.loads(saved["state"]["lines"]), saved["state"]["training"]
            where = f"trial {first + 1}, step {step:,} of {steps:,}"
            self.console.say(f"continuing in {where}, where it was interrupted")
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
        images = TrainingImages(self.train, config, seed=seed, place=self.place)

        def current() -> dict[str, Any]:
            return {"lines": json.dumps(lines), "training": training.state()}

        with self.console.progress(steps, first, f"trial {trial + 1} of {config.trials}, step"):
            for step, batch in enumerate(images.from_step(first, steps), start=first):
                loss = training.step(step, batch)
                done = step + 1
                if done % _LOOKED_AT and done != steps:
                    continue
                value = training.mean_loss(loss, done)
                speed = (done - first) * config.batch_size / max(time.monotonic() - began, 1e-9)
                left = pace(speed, (steps - done) * config.batch_size)
                self.console.advance(done, f"loss {value:.3f}, {left}", place=f" of {steps:,}")
                self.files.save_state(trial * (steps + 1) + done, current, last=done == steps)
        training.settle_batch_norm(images.from_step(steps, steps + config.precise_bn))
        scores = self._scores(training)
        self.console.say(
            f"trial {trial + 1} (seed {seed}): "
            + ", ".join(f"{name} {value:.1f}" for name, value in scores.items())
        )
        return {"trial": trial + 1, "seed": seed, **scores}

    def _training(self, seed: int) -> DetectorTraining:
        config = self.config
        torch.manual_seed(seed)  # of the heads' first weights
        model = build_detector(
            self.pretrained.network(),
            config,
            classes=len(self.train.classes),
            mean=self.mean,
            std=self.std,
            dtype=self.dtype,
        )
        return DetectorTraining(model, config, seed=seed, place=self.place)

    def _scores(self, training: DetectorTraining) -> dict[str, float]:
        """Detect objects on all ranks and measure on rank 0; every rank gets the figures."""
        with self.console.tally("detecting: images", len(self.val)) as done:
            found = training.detections(self.val, lambda: done.add(self.place.world))
        scores: dict[str, float] = {}
        if self.place.is_leader and not self.masks:
            scores = voc_scores(self.val, found)
        elif self.place.is_leader:
            masks = coco_scores(self.val, found, "segm")
            scores = coco_scores(self.val, found) | {f"mask {x}": y for x, y in masks.items()}
        plain: dict[str, float] = json.loads(from_leader(json.dumps(scores)))
        return plain


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
        trials = counted(config.trials, "trial")
        lines.append(f"{start}{task}, {record.protocol['detector']}: {figures} ({trials})")
        lines.append(papers_rows(task))
    if record.protocol["differences"]:
        lines.append(f"not the protocol's: {'; '.join(record.protocol['differences'])}")
    return lines
