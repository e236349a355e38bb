"""``fastsiam eval``, ``features`` and ``neighbours``: commands that evaluate a network."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastsiam.cli.options import Commands, usage_errors
from fastsiam.config.detect import DetectConfig
from fastsiam.config.evaluate import (
    FeaturesConfig,
    FinetuneConfig,
    KnnConfig,
    LinearConfig,
    NeighboursConfig,
    NetworkConfig,
)
from fastsiam.config.run import NodesConfig
from fastsiam.config.setting import settings_of

if TYPE_CHECKING:
    from fastsiam.distributed import Place
    from fastsiam.run.records import Record

app = Commands()
measures = Commands(no_args_is_help=True, help="Evaluate the quality of a trained encoder.")

Network = Annotated[
    Path, typer.Argument(help="Run folder, checkpoint, or weights file of another program.")
]


@measures.command()
def knn(run: Network, config: KnnConfig) -> None:
    """Classify validation images by their nearest training images (pool5, cosine similarity)."""
    from fastsiam.evaluate.command import evaluate_knn, preflight

    def show(record: Record) -> None:
        _show(record)
        if config.per_class:
            print("\n".join(record.class_lines()), flush=True)

    _on_ranks(partial(evaluate_knn, show=show), run, config, check=preflight)


@measures.command()
def linear(run: Network, config: LinearConfig) -> None:
    """Train a linear classifier on the frozen features (pool5) and validate it."""
    from fastsiam.evaluate.command import evaluate_linear, preflight

    _on_ranks(partial(evaluate_linear, show=_show), run, config, check=preflight)


@measures.command()
def finetune(run: Network, config: FinetuneConfig) -> None:
    """Fine-tune the entire network with all labels, or 1% or 10% of them, and validate it."""
    from fastsiam.evaluate.command import evaluate_finetuned, preflight

    _on_ranks(partial(evaluate_finetuned, show=_show), run, config, check=preflight)


@measures.command()
def detect(run: Network, config: DetectConfig) -> None:
    """Train detectors on the network (Faster R-CNN; Mask R-CNN on COCO) and measure their AP."""
    from fastsiam.evaluate.detection.command import evaluate_detection, preflight

    _on_ranks(partial(evaluate_detection, show=_show), run, config, check=preflight)


def _show(record: Record) -> None:
    """Print a record's summary."""
    print("\n".join(record.summary), flush=True)


def _on_ranks(
    work: Callable[[Path, Any, Place], object],
    run: Path,
    config: NetworkConfig,
    *,
    check: Callable[[Path, Any], object],
) -> None:
    """Check the settings, then call ``work`` on the requested number of ranks."""
    from fastsiam import distributed
    from fastsiam.distributed.launch import launch
    from fastsiam.model.numerics import check_precision
    from fastsiam.run.records import check_targets

    check_precision(config.precision, config.device)
    if config.gpus * config.max_nodes > 1 and not distributed.is_worker():
        distributed.check_devices(config)
        check(run, config)
        if config.json:
            check_targets(Path(config.json))
        sys.exit(launch(sys.argv[1:], config))
    work(run, config, distributed.start(config))
    distributed.finish()


@app.command(options=settings_of(FeaturesConfig).keys() - {"json"})
def features(run: Network, config: FeaturesConfig) -> None:
    """Write the features of every image to a file."""
    from fastsiam.evaluate.feature_files import preflight, write_features

    def write(run: Path, config: FeaturesConfig, place: Place) -> None:
        paths = write_features(run, config, place)
        if place.is_leader:
            print("\n".join(f"wrote {path}" for path in paths), flush=True)

    _on_ranks(write, run, config, check=preflight)


@app.command(
    options=settings_of(NeighboursConfig).keys() - {"json", *settings_of(NodesConfig)} | {"device"}
)
def neighbours(run: Network, config: NeighboursConfig) -> None:
    """Draw images next to the training images with the most similar features."""
    from fastsiam import distributed
    from fastsiam.contact_sheets import check_picture
    from fastsiam.evaluate.feature_files import write_neighbours
    from fastsiam.model.numerics import check_precision

    out = Path(config.out)
    with usage_errors():
        check_picture(out)
    check_precision(config.precision, config.device)
    write_neighbours(run, config, distributed.start(config), out=out)
    print(f"wrote {config.out}: in each row an image and the training images nearest to it")
