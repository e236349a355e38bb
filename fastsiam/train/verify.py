"""Verification of a run: recompute the digests in its log and compare them.

The order of the images and their augmentations depend only on the seed, the settings and the image
sizes. So the digests can be recomputed on any machine, with any number of ranks and without the
run's pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.bad_image_list import read_bad_images
from fastsiam.config import ColumnNames, TrainConfig
from fastsiam.config.run import VerifyConfig
from fastsiam.config.settings_files import RunSettings
from fastsiam.console import tally
from fastsiam.errors import CheckpointError, FastSiamError
from fastsiam.pipelines import BadImages, Order, Store
from fastsiam.pipelines.headers import Headers
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from fastsiam.train.run_images import run_images
from fastsiam.views.digest import batch_digest, hex_digest, sum_digests
from fastsiam.views.draws import draw_views


@dataclass(frozen=True, slots=True)
class Line:
    """A range of steps, counted from 1, and its digest in the log."""

    first: int
    last: int
    digest: str = ""
    """Digest of the images and augmentations, 16 hexadecimal digits."""

    def __str__(self) -> str:
        """Return the range of steps as text."""
        if self.first == self.last:
            return f"step {self.last:,}"
        return f"steps {self.first:,} to {self.last:,}"


def verify(run: Path, config: VerifyConfig) -> Iterator[str]:
    """Recompute a run's digests and compare them with its log; yield messages on the result.

    Raises:
        CheckpointError: the data changed, or the last checkpoint is corrupt or was edited.
        FastSiamError: a digest differs, the log has no digests, or the data cannot be read.
    """
    run_config = RunSettings.read(run).config
    if config.data and run_config.data.mixed_with:
        raise FastSiamError(
            f"--data cannot replace the data sets of a mixture: leave it out, or link the "
            f"data sets under the paths in {run / 'config.json'}"
        )
    data = run_config.data.at(config.data, ColumnNames(config.image_column, config.label_column))
    all_lines = [_parse_line(line, run) for line in read_metrics(run, numbers={}) if "seen" in line]
    if not all_lines:
        raise FastSiamError(
            f"cannot verify {run}: metrics.jsonl has no digests, because the run took no step or "
            "an older version of fastsiam wrote it"
        )
    # "auto", because the package of the run's pipeline may not be installed here.
    data_config = replace(data, pipeline="auto") if data.loads_images else data
    images = run_images(replace(run_config, data=data_config), run)
    yield from images.notes
    lines = [x for x in all_lines if not config.step or x.first <= config.step <= x.last]
    if not lines:
        raise FastSiamError(
            f"the log of {run} does not cover step {config.step:,}, only "
            f"{Line(all_lines[0].first, all_lines[-1].last)}"
        )
    order = Order(
        images=len(images),
        batch=run_config.optim.batch,
        seed=run_config.numerics.seed,
        bad=BadImages(len(images), read_bad_images(run), takes_more=False),
        shuffle=images.shuffle,
    )
    if not order.steps:
        raise FastSiamError(
            f"{run / 'config.json'} has batches of {order.batch:,} images, but the data have only "
            f"{order.images:,}: restore the file or the data"
        )
    steps = _Steps(run_config, images.store, order)
    with tally("steps", sum(x.last + 1 - x.first for x in lines)) as progress:
        for line in lines:
            numbers = range(line.first, line.last + 1)
            digest = hex_digest(sum_digests(*map(steps.digest, numbers)))
            if digest != line.digest:
                raise FastSiamError(
                    f"{line} of {run}: the log has digest {line.digest}, but seed, settings and "
                    f"data give {digest}: the run used other images or augmentations, or "
                    "config.json, metrics.jsonl or the data have changed since"
                )
            progress.add(len(numbers))
    yield (
        f"{'1 log line agrees' if len(lines) == 1 else f'{len(lines):,} log lines agree'}: images "
        f"and augmentations of {Line(lines[0].first, lines[-1].last)}, recomputed from seed "
        f"{order.seed}"
    )
    if config.step:
        yield from steps.images(config.step)
        return
    for before, after in pairwise([Line(0, 0), *lines]):
        if after.first != before.last + 1:  # an older version of fastsiam took these steps
            yield f"no digest for {Line(before.last + 1, after.first - 1)}"
    yield from _check_weights(run)


def _parse_line(values: dict[str, Any], run: Path) -> Line:
    since, step = values.get("since"), values.get("step")
    if type(since) is not int or type(step) is not int or not 0 <= since < step:
        raise FastSiamError(
            f"{run / 'metrics.jsonl'} has an invalid line: since {since}, step {step}; restore the "
            "file"
        )
    return Line(since + 1, step, values["seen"])


class _Steps:
    """The expected images and digests of a run's steps.

    Args:
        config: the run's settings.
        store: its images; None if it was trained on noise.
        order: the order of the global batches, as for a single rank.
    """

    def __init__(self, config: TrainConfig, store: Store | None, order: Order) -> None:
        self._config, self._store, self._order = config, store, order
        if store is not None:
            self._headers, dimensions = Headers(store), store.dimensions()
            self._size_table = (
                np.zeros((len(store), 2), np.int64) if dimensions is None else dimensions
            )

    def digest(self, number: int) -> int:
        """Compute the expected digest of a step; steps count from 1."""
        epoch, step = divmod(number - 1, self._order.steps)
        if self._store is None:
            from fastsiam.pipelines.synthetic_backend import noise_digest

            return noise_digest(self._order, epoch, step)
        index = self._order.indices(epoch, step)
        params = draw_views(
            self._config.augment,
            seed=self._order.seed,
            epoch=epoch,
            index=self._order.draw_numbers(epoch, step),
            size=self._sizes(index),
        )
        return batch_digest(params, index, epoch=epoch, place=self._order.place(step))

    def images(self, number: int) -> Iterator[str]:
        """List the images of a step: place in the epoch, position among those trained on, name."""
        if self._store is None:
            yield f"step {number:,} was trained on noise"
            return
        epoch, step = divmod(number - 1, self._order.steps)
        yield (
            f"step {number:,}, in epoch {epoch:,}: place in the epoch, position among the images "
            "trained on, name"
        )
        indices = self._order.indices(epoch, step).tolist()
        for place, i in enumerate(indices, self._order.place(step)):
            yield f"{place} {i} {self._store.name(i)}"

    def _sizes(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return height and width of images, (N, 2), from the store's table or their headers."""
        for i in index[self._size_table[index, 0] == 0].tolist():
            self._size_table[i] = self._headers.size(i)
        return self._size_table[index]


def _check_weights(run: Path) -> Iterator[str]:
    """Check the weights of the last checkpoint against their hash, which version 0.2 lacks.

    Raises:
        CheckpointError: they differ.
    """
    file = checkpoints.last(run)
    if not file.is_file():
        yield f"the weights are not verified: {file} is missing"
        return
    checkpoint = checkpoints.load(file)
    if not checkpoint.model_hash:
        return
    if checkpoints.weights_hash(checkpoint.model) != checkpoint.model_hash:
        raise CheckpointError(f"the weights in {file} were changed after it was saved")
    yield f"the weights after step {checkpoint.step:,} agree: {checkpoint.model_hash}"
