"""Verification of a run: recompute the digests in its log and compare them.

The order of the images and their augmentations are functions of the seed, the settings and the
image sizes. From these the digests can be recomputed on any machine, with any number of ranks and
without the run's pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.bad_image_list import read_bad_images
from fastsiam.config import ColumnNames, TrainConfig
from fastsiam.config.run_settings import RunSettings
from fastsiam.config.verify import VerifyConfig
from fastsiam.console import tally
from fastsiam.errors import CheckpointError, FastSiamError
from fastsiam.pipelines import BadImages, Order, Store
from fastsiam.pipelines.mixture import shuffle_of
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from fastsiam.train.images import RunImages, run_images
from fastsiam.views.digest import batch_digest, hex_digest, sum_digests
from fastsiam.views.draws import draw_views


@dataclass(frozen=True, slots=True)
class Line:
    """The digest and loss of a log line, and the range of steps that it covers, counted from 1."""

    first: int
    last: int
    seen: str
    """Digest of the images and augmentations, 16 hexadecimal digits."""
    loss: float

    def covers(self, step: int) -> bool:
        """Return whether the line covers a step."""
        return self.first <= step <= self.last

    def __len__(self) -> int:
        """Return the number of steps."""
        return self.last - self.first + 1

    def __str__(self) -> str:
        """Return the range of steps as text."""
        steps = f"{self.first:,} to {self.last:,}"
        return f"step {self.last:,}" if self.first == self.last else f"steps {steps}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The settings, log lines and images of a run."""

    folder: Path
    config: TrainConfig
    lines: Sequence[Line]
    """Log lines that have a digest, in order."""
    images: RunImages
    """The training images, opened on this machine."""

    @property
    def bad(self) -> BadImages:
        """The bad images that were replaced by others."""
        return BadImages(len(self.images), read_bad_images(self.folder), takes_more=False)

    @property
    def order(self) -> Order:
        """The order of the global batches, as a single rank would see it."""
        config = self.config
        return Order(
            images=len(self.images),
            batch=config.optim.batch,
            seed=config.numerics.seed,
            bad=self.bad,
            shuffle=self.images.shuffle or shuffle_of(config.data, None, images=len(self.images)),
        )


def verify(run: Path, config: VerifyConfig) -> Iterator[str]:
    """Recompute a run's digests and compare them with its log; yield messages on the result.

    Raises:
        CheckpointError: the data changed, or the weights are not those that were saved.
        FastSiamError: a digest differs, or the run has none.
    """
    recorded = read(run, config)
    yield from recorded.images.notes
    lines = [line for line in recorded.lines if not config.step or line.covers(config.step)]
    if not lines:
        steps = f"{recorded.lines[0].first:,} to {recorded.lines[-1].last:,}"
        raise FastSiamError(
            f"the log of {run} does not cover step {config.step:,}, only steps {steps}"
        )
    numbers = [number for line in lines for number in range(line.first, line.last + 1)]
    for line, digest in _compared(lines, map(_Steps(recorded).digest, numbers)):
        require_same(line, digest, recorded)
    yield (
        f"{'1 log line agrees' if len(lines) == 1 else f'{len(lines):,} log lines agree'}: "
        f"images and augmentations of {_steps(lines)}, recomputed from seed {recorded.order.seed}"
    )
    if config.step:
        yield from _images(recorded, config.step)
        return
    yield from _missing(lines)
    yield from _weights(run)


def read(run: Path, config: VerifyConfig) -> Recorded:
    """Read the settings and log lines of a run, and open its images.

    Raises:
        FastSiamError: the folder is not a run, its log has no digests, or its data cannot be read.
    """
    trained = RunSettings.read(run).config
    data = trained.data.at(config.data, ColumnNames(config.image_column, config.label_column))
    lines = [_line(line, run) for line in read_metrics(run) if "seen" in line]
    if not lines:
        raise FastSiamError(
            f"cannot verify {run}: metrics.jsonl has no digests, because the run took no step or "
            "an older version of fastsiam wrote it"
        )
    # "auto", because the package of the run's pipeline may not be installed here.
    opened = replace(data, pipeline="auto") if data.loads_images else data
    images = run_images(replace(trained, data=opened), run)
    return Recorded(folder=run, config=replace(trained, data=data), lines=lines, images=images)


def require_same(line: Line, digest: int, recorded: Recorded) -> None:
    """Check the digest of a log line.

    Raises:
        FastSiamError: the digest differs.
    """
    if hex_digest(digest) != line.seen:
        raise FastSiamError(
            f"{line} of {recorded.folder}: the log has digest {line.seen}, but seed, settings and "
            f"data give {hex_digest(digest)}: the run used other images or augmentations, or "
            "config.json, metrics.jsonl or the data have changed since"
        )


def _line(values: dict[str, Any], run: Path) -> Line:
    line = Line(
        values.get("since", -1) + 1,
        values.get("step", 0),
        values["seen"],
        values.get("loss", math.nan),
    )
    if not 1 <= line.first <= line.last:
        raise FastSiamError(
            f"{run / 'metrics.jsonl'} has an invalid line: since {values.get('since')}, step "
            f"{values.get('step')}; restore the file"
        )
    return line


def _steps(lines: Sequence[Line]) -> str:
    return str(Line(lines[0].first, lines[-1].last, "", math.nan))


def _missing(lines: Sequence[Line]) -> Iterator[str]:
    """Yield messages on steps without a digest: an older version of fastsiam took them."""
    begin = Line(0, 0, "", math.nan)
    for before, after in pairwise([begin, *lines]):
        if after.first != before.last + 1:
            yield f"no digest for {Line(before.last + 1, after.first - 1, '', math.nan)}"


def _compared(lines: Sequence[Line], digests: Iterator[int]) -> Iterator[tuple[Line, int]]:
    """Yield each log line with the recomputed digest of its steps.

    Args:
        lines: the log lines.
        digests: digests of all their steps, in order.
    """
    with tally("steps", sum(map(len, lines))) as done:
        for line in lines:
            yield line, sum_digests(*islice(digests, len(line)))
            done.add(len(line))


class _Steps:
    """Images and digests that the steps of a run should have.

    Args:
        recorded: the run.
    """

    def __init__(self, recorded: Recorded) -> None:
        self._config, self._store, self._order = (
            recorded.config, recorded.images.store, recorded.order,
        )  # fmt: skip
        self._sizes = None if self._store is None else _Sizes(self._store)

    def indices(self, number: int) -> NDArray[np.int64]:
        """Return the places of a step's images, in order, (N,) int64; steps are counted from 1."""
        return self._order.indices(*divmod(number - 1, self._order.steps))

    def digest(self, number: int) -> int:
        """Return the digest of a step."""
        epoch, step = divmod(number - 1, self._order.steps)
        if self._sizes is None:
            from fastsiam.pipelines.synthetic_backend import noise_shown

            return noise_shown(self._order, epoch, step)
        index = self.indices(number)
        params = draw_views(
            self._config.augment,
            seed=self._order.seed,
            epoch=epoch,
            index=self._order.drawn_for(epoch, step),
            size=self._sizes.of(index),
        )
        return batch_digest(params, index, epoch=epoch, place=self._order.place(step))


class _Sizes:
    """Heights and widths of a store's images, from its table or from the images' headers."""

    def __init__(self, store: Store) -> None:
        self._store, known = store, store.dimensions()
        self._known = np.zeros((len(store), 2), np.int64) if known is None else known

    def of(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return height and width of the given images, (N, 2) int64."""
        for i in index[self._known[index, 0] == 0].tolist():
            found = self._store.header(i, self._store.read(i))
            self._known[i] = self._store.rules.size(found)
        return self._known[index]


def _images(recorded: Recorded, number: int) -> Iterator[str]:
    """List the images of a step: place in the epoch, position in the data set, name."""
    store, steps = recorded.images.store, _Steps(recorded)
    epoch, step = divmod(number - 1, recorded.order.steps)
    if store is None:
        yield f"step {number:,} was trained on noise"
        return
    first = recorded.order.place(step)
    yield f"step {number:,}, in epoch {epoch:,}: place in the epoch, position in the data, name"
    for place, i in enumerate(steps.indices(number).tolist(), first):
        yield f"{place} {i} {store.name(i)}"


def _weights(run: Path) -> Iterator[str]:
    """Compare the weights of a run's last checkpoint with their digest, if it has one."""
    file = checkpoints.last(run)
    if not file.is_file():
        return
    kept = checkpoints.load(file)
    if not kept.weights:
        return
    found = checkpoints.digest_of(kept.model)
    if found != kept.weights:
        raise CheckpointError(
            f"{file} is corrupt or was changed: its weights have digest {found[:16]}, but were "
            f"saved with {kept.weights[:16]}; restore the file from a copy"
        )
    yield f"the weights after step {kept.step:,} agree: SHA-256 {found}"
