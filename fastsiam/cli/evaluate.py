"""``fastsiam eval``, and the features of a network: in a file, or as nearest neighbours."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastsiam.cli.options import Commands, usage_errors
from fastsiam.config import RunConfig
from fastsiam.config.detect import NOT_OF_DETECTION, DetectConfig
from fastsiam.config.evaluate import (
    EvalConfig,
    FeaturesConfig,
    FinetuneConfig,
    KnnConfig,
    LinearConfig,
    NeighboursConfig,
)
from fastsiam.config.nodes import NodesConfig
from fastsiam.config.setting import settings_of

if TYPE_CHECKING:
    from fastsiam.distributed import Place
    from fastsiam.run.records import Record

app = Commands()
measures = Commands(no_args_is_help=True, help="Measure the quality of a trained encoder.")

Network = Annotated[
    Path, typer.Argument(help="Run folder, a checkpoint, or a weights file of another program.")
]
_UNRECORDED = {"json"}
"""Settings of what leaves a record."""
_OF_SEVERAL = {"gpus", *settings_of(NodesConfig)}
"""Settings of what several processes do."""


@measures.command()
def knn(run: Network, config: KnnConfig) -> None:
    """Classify the validation images by their nearest training images (pool5 features, cosine)."""
    from fastsiam.evaluate.command import evaluate_knn

    def show(record: Record) -> None:
        _show(record)
        if config.per_class:
            print("\n".join(record.class_lines()), flush=True)

    _evaluated(evaluate_knn, run, config, show)


@measures.command()
def linear(run: Network, config: LinearConfig) -> None:
    """Train a linear classifier on the frozen features (pool5), and validate it."""
    from fastsiam.evaluate.command import evaluate_linear

    _evaluated(evaluate_linear, run, config)


@measures.command()
def finetune(run: Network, config: FinetuneConfig) -> None:
    """Train the whole network with labels, of 1% or 10% of the images for instance; validate it."""
    from fastsiam.evaluate.command import evaluate_finetuned

    _evaluated(evaluate_finetuned, run, config)


@measures.command(options=settings_of(DetectConfig).keys() - NOT_OF_DETECTION)
def detect(run: Network, config: DetectConfig) -> None:
    """Train detectors on the network (Faster R-CNN; Mask R-CNN on COCO); measure their AP."""
    from fastsiam.evaluate.detection.command import evaluate_detection, preflight

    _evaluated(evaluate_detection, run, config, check=preflight)


def _show(record: Record) -> None:
    print("\n".join(record.summary), flush=True)


def _evaluated(
    evaluate: Callable[..., Record],
    run: Path,
    config: EvalConfig,
    show: Callable[[Record], None] = _show,
    check: Callable[[Path, Any], None] | None = None,
) -> None:
    """Evaluate on as many ranks as are asked for; rank 0 shows the record, then it is written."""
    from fastsiam.evaluate.command import preflight

    _on_ranks(partial(evaluate, show=show), run, config, check=check or preflight)


def _on_ranks(
    work: Callable[[Path, Any, Place], object],
    run: Path,
    config: EvalConfig,
    *,
    check: Callable[[Path, Any], None],
) -> None:
    """Do something with a network on as many ranks as are asked for, once it was checked."""
    from fastsiam import distributed
    from fastsiam.distributed.launch import launch

    where = RunConfig(gpus=config.gpus, device=config.device)
    if config.gpus * config.max_nodes > 1 and not distributed.is_worker():
        distributed.check_devices(where)
        check(run, config)
        sys.exit(launch(sys.argv[1:], config, gpus=config.gpus))
    place = distributed.start(where)
    work(run, config, place)
    distributed.finish()


@app.command(options=settings_of(FeaturesConfig).keys() - _UNRECORDED)
def features(run: Network, config: FeaturesConfig) -> None:
    """Write the features of every image to a file, for work of your own."""
    from fastsiam.evaluate.feature_files import preflight, write_features

    def write(run: Path, config: FeaturesConfig, place: Place) -> None:
        paths = write_features(run, config, place)
        if place.is_leader:
            print("\n".join(f"wrote {path}" for path in paths), flush=True)

    _on_ranks(write, run, config, check=preflight)


@app.command(options=settings_of(NeighboursConfig).keys() - _UNRECORDED - _OF_SEVERAL)
def neighbours(run: Network, config: NeighboursConfig) -> None:
    """Draw some images and those whose features are nearest to theirs."""
    from fastsiam import distributed
    from fastsiam.evaluate.feature_files import write_neighbours
    from fastsiam.report.pictures import check_picture

    out = Path(config.out)
    with usage_errors():
        check_picture(out)
    write_neighbours(run, config, distributed.start(RunConfig(device=config.device)), out=out)
    print(f"wrote {config.out}: each row an image, and the training images nearest to it")
