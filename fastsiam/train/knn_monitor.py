"""The kNN monitor: evaluation of a run's backbone while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from fastsiam.config import TrainConfig
from fastsiam.console import Console
from fastsiam.distributed import Place, StopSignals, minimum_across_ranks, share_buffers
from fastsiam.errors import DataError
from fastsiam.evaluate.features import concat_batches, feature_batches
from fastsiam.evaluate.knn import KnnResult, knn_accuracy
from fastsiam.evaluate.subject import EvalImages
from fastsiam.pipelines.subsets import TrainingImages
from fastsiam.run.log import read_metrics
from fastsiam.train.trainer import Evaluate
from fastsiam.views.batch import EvalLoader

_KNN_BATCH = {"cuda": 1024, "cpu": 256}
"""Maximum batch size; larger batches need fewer kernel launches on a GPU."""
_FORWARD_ONLY = 8
"""How many times more images fit into GPU memory if no activations are saved for backward."""


def knn_monitor(
    config: TrainConfig,
    place: Place,
    console: Console,
    dtype: torch.dtype,
    *,
    training: TrainingImages | None = None,
    resumed: Path | None = None,
) -> Evaluate | None:
    """Return the kNN monitor; None if it is off or, with a message, a rank cannot read images.

    ``training`` are the training images, if they are open already.

    Raises:
        DataError: a rank cannot read images, but the ``resumed`` run has logged evaluations.
    """
    if not config.monitor.knn_every or not config.data.loads_images:
        return None
    images = EvalImages(
        data=config.data,
        augment=config.augment,
        resize=config.eval_resize,
        batch=_knn_batch(config, place),
        place=place,
        training=training,
    )
    loaders, reason = None, "another rank cannot read its images"
    try:
        loaders = images.loaders()
    except DataError as error:
        reason = str(error)
    if not _on_all_ranks(loaders is not None):
        lines = read_metrics(resumed) if resumed and place.is_leader else []
        if _on_all_ranks(not any(line["kind"] == "knn" for line in lines)):
            console.say(f"kNN monitor disabled: {reason}")
            return None
        raise DataError(
            f"the kNN monitor cannot continue: {reason}; restore the images, or pass --knn-every 0 "
            "to train without it"
        )
    assert loaders is not None
    console.say(f"kNN monitor: {images}")
    bank, queries = loaders

    def evaluate(backbone: nn.Module, stop: StopSignals) -> KnnResult:
        share_buffers(backbone, place)  # those of rank 0, as in checkpoints
        votes = [(config.monitor.knn_k, config.monitor.knn_temperature)]
        with console.tally("kNN: images", bank.images + queries.images) as progress:

            def features(loader: EvalLoader) -> Iterator[tuple[Tensor, Tensor]]:
                batches = feature_batches(
                    backbone, stop.over(loader), dtype=dtype, device=place.device
                )
                for x, label, _ in batches:
                    progress.add(len(label) * place.world)
                    yield x, label

            results = knn_accuracy(
                features(bank),
                *concat_batches(features(queries)),
                votes=votes,
                classes=len(bank.classes),
            )
        return results[0]

    return evaluate


def _knn_batch(config: TrainConfig, place: Place) -> int:
    """Return the batch size of the kNN monitor, which must fit into the memory of training."""
    max_batch = _KNN_BATCH[place.device.type]
    if place.device.type == "cpu":
        return max_batch
    views = len(config.augment.views) * config.optim.micro_batch(place.world)
    return min(max_batch, _FORWARD_ONLY * views)


def _on_all_ranks(condition: bool) -> bool:
    """Return whether a condition is true on all ranks; every rank must call it."""
    return bool(minimum_across_ranks(torch.tensor(float(condition))))
