"""Table 5 of the paper: detectors fine-tuned from the networks of a study's runs.

For each network, one detector is trained at every learning rate. All trials then use the rate with
the highest AP on the test set. The paper also searches the rate, but does not say on which images.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fastsiam.child_process import FASTSIAM, Child
from fastsiam.config import TrainConfig
from fastsiam.config.detect import DetectConfig
from fastsiam.config.setting import as_text, settings_of
from fastsiam.config.study import StudyDetectConfig
from fastsiam.console import Console, format_count
from fastsiam.environment import environment
from fastsiam.errors import FastSiamError
from fastsiam.evaluate.detection.command import preflight
from fastsiam.evaluate.detection.detectors import require_resnet
from fastsiam.evaluate.detection.protocol import FIGURES, PAPER, protocol_of
from fastsiam.evaluate.subject import open_network
from fastsiam.files import atomic_write_for_user, quote, write_json
from fastsiam.interchange import Input, Pretrained, weight_files
from fastsiam.interchange.export import plain_content
from fastsiam.markdown import format_mean, markdown
from fastsiam.methods import build_method
from fastsiam.run.checkpoint import weights_hash
from fastsiam.run.records import Record, read_record
from fastsiam.study.catalogue import STUDIES
from fastsiam.study.runs import run_command, runs_of
from fastsiam.study.scales import Scale

_SCRATCH, _SUPERVISED = "scratch", "ImageNet supervised"
_VARIANTS = {
    _SCRATCH: "epochs-2x",
    "SimCLR": "simclr-2x",
    "MoCo v2": "mocov2-2x",
    "BYOL": "byol-2x",
    "SwAV": "swav-2x",
    "SimSiam, base": "epochs-2x",
    "SimSiam, optimal": "transfer",
}
"""Variant of each row of Table 5, if it has one: 2 x the base epochs, 200 on ImageNet."""


@dataclass(frozen=True, slots=True)
class DetectionRow:
    """A row of Table 5: a network, and the results of the detectors fine-tuned from it."""

    title: str
    network: str
    """Run folder or weights file; "" if it is missing."""
    missing: str = ""
    """What is missing, and how to provide it."""
    searched: dict[float, float] = field(default_factory=dict)
    """AP of the first trial at each learning rate, without rates at which the loss diverged."""
    lr: float = 0.0
    """The learning rate with the highest AP."""
    trials: tuple[dict[str, Any], ...] = ()
    """Results of each trial at ``lr``, in percent, without trials that diverged."""
    diverged: int = 0
    """Number of trials at ``lr`` that diverged."""
    differences: tuple[str, ...] = ()
    """Settings that differ from the paper's protocol."""

    @property
    def untrained(self) -> bool:
        """Whether the detectors start from a randomly initialised network."""
        return self.title == _SCRATCH


def detection_rows(scale: Scale, folder: Path, config: StudyDetectConfig) -> list[DetectionRow]:
    """Return the rows of Table 5 with their networks: each variant's run with seed 0.

    Without a run, "scratch" gets a file in ``folder``.
    """
    runs = {
        run.variant: (run, study)
        for study in ("related-2x", "transfer")
        for run in runs_of([STUDIES[study]], scale, folder, seeds=[0])
    }
    rows = []
    for title in PAPER["voc07"]:
        if title == _SUPERVISED:
            rows.append(DetectionRow(title, config.supervised, "pass weights with --supervised"))
            continue
        run, study = runs[_VARIANTS[title]]
        run.check_settings()
        if run.is_trained:
            rows.append(DetectionRow(title, str(run.folder)))
        elif title == _SCRATCH:
            rows.append(DetectionRow(title, str(_write_untrained(run.config, folder))))
        elif run.is_diverged:
            rows.append(DetectionRow(title, "", f"the training of {run.folder} diverged"))
        else:
            command = f"{run_command(study, config)} --out {quote(config.out)}"
            rows.append(DetectionRow(title, "", f"{run.folder} is not trained: {command}"))
    return rows


def _write_untrained(config: TrainConfig, folder: Path) -> Path:
    """Write the network of a run as a plain file, whose weights ``--untrained`` draws again."""
    path = folder / "detection/untrained.safetensors"
    network = Pretrained(
        path=path,
        layout="fastsiam",
        model=config.model,
        state=build_method(config.model).state_dict(),
        epoch=0.0,
        input=Input.of(config),
    )
    weight_files.write(path, plain_content(network, path.name))
    return path


def run_detection(
    rows: Sequence[DetectionRow], config: StudyDetectConfig, detector: DetectConfig, folder: Path
) -> list[DetectionRow]:
    """Train the detectors that are missing; return the rows with their results.

    Rows without a network are returned unchanged. ``folder`` gets a record file for each network,
    rate and seed.

    Raises:
        FastSiamError: a network or the data cannot be read, or an evaluation failed.
    """
    console, inputs, labels = Console(), dict[str, tuple[str, str]](), ""
    for row in rows:  # read all networks before training, to fail early
        if row.network:
            labels = labels or preflight(Path(row.network), detector)
            network = open_network(Path(row.network), replace(detector, untrained=row.untrained))
            backbone = require_resnet(network.network())
            inputs[row.title] = weights_hash(backbone.state_dict()), labels
        else:
            console.say(f"skipped row {row.title!r}: {row.missing}")
    return [
        _with_results(row, config.lrs, detector, folder / detector.task, inputs[row.title])
        if row.network
        else row
        for row in rows
    ]


def _with_results(
    row: DetectionRow,
    lrs: Sequence[float],
    detector: DetectConfig,
    folder: Path,
    inputs: tuple[str, str],
) -> DetectionRow:
    """Search the learning rate with the first seed, then train with every seed at the best rate."""

    def trial(lr: float, seed: int) -> Record | None:
        config = replace(detector, lr=lr, seed=seed, trials=1, untrained=row.untrained, json="")
        return _read_or_evaluate(row, config, folder, inputs)

    seeds = range(detector.seed, detector.seed + detector.trials)
    searched = {lr: record for lr in lrs if (record := trial(lr, seeds[0]))}
    if not searched:
        raise FastSiamError(f"{row.title}: the loss diverged at every rate; pass lower --lrs")
    best = max(searched, key=lambda lr: searched[lr].results[0]["AP"])
    records = [record for seed in seeds if (record := trial(best, seed))]
    return replace(
        row,
        searched={lr: record.results[0]["AP"] for lr, record in searched.items()},
        lr=best,
        trials=tuple(
            {key: value for key, value in record.results[0].items() if key != "trial"}
            for record in records
        ),
        diverged=len(seeds) - len(records),
        differences=tuple(
            x for x in records[0].protocol["differences"] if not x.startswith(("trials", "lr"))
        ),
    )


def _read_or_evaluate(
    row: DetectionRow, detector: DetectConfig, folder: Path, inputs: tuple[str, str]
) -> Record | None:
    """Return the record of one trial, training the detector if it is missing; None if it diverged.

    The file name contains a hash of ``inputs`` (the hash of the weights and the checksum of the
    annotations) and the protocol, so other trials use other files. Paths do not matter.
    """
    identity = json.dumps([*inputs, detector.precision, protocol_of(detector)])
    name = row.title.lower().replace(",", "").replace(" ", "-")
    mark = f"{zlib.crc32(identity.encode()):08x}"
    path = folder / f"{name}-lr-{detector.lr:g}-seed-{detector.seed}-{mark}.json"
    diverged = path.with_suffix(".diverged")
    if not path.exists() and not diverged.exists():
        _evaluate(row, detector, path, diverged)
    if diverged.exists():
        return None
    return read_record(path)


def _evaluate(row: DetectionRow, detector: DetectConfig, path: Path, diverged: Path) -> None:
    """Run ``fastsiam eval detect`` in a subprocess that logs to a file."""
    log = path.with_suffix(".log")
    title = f"{row.title}, rate {detector.lr:g}, seed {detector.seed}"
    Console().say(f"{title}: the output is in {log}")
    words = ["eval", "detect", row.network, "--json", str(path), *_options(detector)]
    child = Child([*FASTSIAM, *words], log)
    if child.process.wait() and not child.divergence():
        raise child.failure(title, "record")
    if child.process.returncode:
        Console().say(f"{title}: diverged")
        with atomic_write_for_user(diverged) as temporary:
            temporary.touch()


def _options(detector: DetectConfig) -> list[str]:
    """Return the non-default settings as command-line arguments."""
    words = []
    for one in settings_of(DetectConfig).values():
        value = getattr(detector, one.name)
        if one.option and value != one.default:
            words += [f"--{one.flag}"] if value is True else [f"--{one.flag}", as_text(value)]
    return words


def table(rows: Sequence[DetectionRow], detector: DetectConfig) -> str:
    """Format the paper's results and ours as Markdown; COCO masks have a separate table."""
    tables = [_table(rows, detector.task, "")]
    if detector.task == "coco":
        tables.append(_table(rows, "coco masks", "mask "))
    differences = dict.fromkeys(text for row in rows for text in row.differences)
    notes = [f"Differences from the protocol: {'; '.join(differences)}."] if differences else []
    notes += [
        f"{row.title}: {format_count(row.diverged, 'further trial')} diverged."
        for row in rows
        if row.diverged
    ]
    return "\n\n".join([*tables, *notes])


def write_detection(
    path: Path, rows: Sequence[DetectionRow], config: StudyDetectConfig, detector: DetectConfig
) -> None:
    """Write the rows as JSON: results of every trial, rates, settings and machine.

    Raises:
        FastSiamError: the file cannot be written.
    """
    write_json(
        path,
        {
            "study": "detection",
            "source": "Table 5",
            "scale": config.scale,
            "protocol": protocol_of(detector) | {"lr": list(config.lrs)},
            "rows": [asdict(row) | {"searched": sorted(row.searched.items())} for row in rows],
            "environment": environment(),
            "date": time.strftime("%Y-%m-%d"),
        },
    )


def _table(rows: Sequence[DetectionRow], task: str, prefix: str) -> str:
    heads = [task, *(f"paper: {x}" for x in FIGURES), *(f"ours: {x}" for x in FIGURES)]
    lines = []
    for row in rows:
        columns = [[trial[f"{prefix}{figure}"] for trial in row.trials] for figure in FIGURES]
        lines.append(
            [
                row.title,
                *(f"{figure:.1f}" for figure in PAPER[task][row.title]),
                *(format_mean(column, 1) for column in columns),
                f"{row.lr:g}" if row.trials else "-",
                str(len(row.trials)),
            ]
        )
    return markdown([*heads, "rate", "trials"], lines)
