"""A run held against its own log: the digests of what it was trained on, computed again.

The order of the images and what is drawn for each are functions of seed, settings and the images'
sizes, so whoever has these can tell what every step was trained on: without the pipeline, the
ranks or the machine that took it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fastsiam.bad_image_list import read_bad_images
from fastsiam.config import ColumnNames, DataConfig, PipelineSetting, TrainConfig
from fastsiam.config.run_settings import RunSettings
from fastsiam.config.verify import VerifyConfig
from fastsiam.console import tally
from fastsiam.errors import CheckpointError, FastSiamError
from fastsiam.pipelines import BadImages, Order, Store, build_loader
from fastsiam.pipelines.mixture import shuffle_of
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from fastsiam.train.images import RunImages, run_images
from fastsiam.views.batch import Batch, Loader
from fastsiam.views.digest import added, seen_in, written
from fastsiam.views.draws import draw_views


@dataclass(frozen=True, slots=True)
class Line:
    """A log line of training: the stretch of steps that it tells of, from 1 on."""

    first: int
    last: int
    seen: str
    """Digest of what was trained on, 16 hexadecimal digits."""
    loss: float

    def tells_of(self, step: int) -> bool:
        """Tell whether a step is among them."""
        return self.first <= step <= self.last

    def __len__(self) -> int:
        """Count the steps."""
        return self.last - self.first + 1

    def __str__(self) -> str:
        """Name the steps."""
        steps = f"{self.first:,} to {self.last:,}"
        return f"step {self.last:,}" if self.first == self.last else f"steps {steps}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a run says of itself."""

    folder: Path
    config: TrainConfig
    lines: Sequence[Line]
    """Those that have a digest, in their order."""
    images: RunImages
    """The images that it was trained on, as they are here."""

    @property
    def bad(self) -> BadImages:
        """The images in whose place it was shown others."""
        return BadImages(len(self.images), read_bad_images(self.folder), takes_more=False)

    @property
    def order(self) -> Order:
        """The order of the whole run's images, as one rank would see it."""
        config = self.config
        return Order(
            images=len(self.images),
            batch=config.optim.batch,
            seed=config.numerics.seed,
            bad=self.bad,
            shuffle=self.images.shuffle or shuffle_of(config.data, None, images=len(self.images)),
        )


def verify(run: Path, config: VerifyConfig) -> Iterator[str]:
    """Compute a run's digests again and compare; yield what was found, line by line.

    Raises:
        CheckpointError: the data changed since; or the weights are not those that were saved.
        FastSiamError: a line differs; or there is nothing to compare.
    """
    recorded = read(run, config)
    yield from recorded.images.notes
    lines = [line for line in recorded.lines if not config.step or line.tells_of(config.step)]
    if not lines:
        told = f"{recorded.lines[0].first:,} to {recorded.lines[-1].last:,}"
        raise FastSiamError(f"no log line tells of step {config.step:,} of {run}; they tell {told}")
    numbers = [number for line in lines for number in range(line.first, line.last + 1)]
    with ExitStack() as ends:
        if config.pipeline:
            loader = ends.enter_context(closing(_loader(recorded, config)))
            digests = _shown(loader, numbers)
        else:
            digests = map(_Steps(recorded).digest, numbers)
        for line, digest in _compared(lines, digests):
            require_same(line, digest, recorded)
    how = f"made again by {config.pipeline}" if config.pipeline else "computed again"
    yield (
        f"{'1 log line agrees' if len(lines) == 1 else f'{len(lines):,} log lines agree'}: "
        f"images and draws of {_steps(lines)}, {how} from seed {recorded.order.seed}"
    )
    if config.step:
        yield from _images(recorded, config.step)
        return
    yield from _missing(lines)
    yield from _weights(run)


def read(run: Path, config: VerifyConfig) -> Recorded:
    """Read what a run says of itself, and open its images.

    Raises:
        FastSiamError: it is no run, it keeps no digests, or its data cannot be read.
    """
    trained = RunSettings.read(run).config
    data = trained.data.at(config.data, ColumnNames(config.image_column, config.label_column))
    lines = [_line(line, run) for line in read_metrics(run) if "seen" in line]
    if not lines:
        raise FastSiamError(
            f"no line of {run / 'metrics.jsonl'} has a digest: the run took no step, or was made "
            "by a version of fastsiam that kept none, so that nothing can be verified"
        )
    # What the pipeline of the run needs to be installed is not needed here.
    opened = replace(data, pipeline="auto") if data.loads_images else data
    images = run_images(replace(trained, data=opened), run)
    here = replace(trained, data=replace(data, workers=config.workers))
    return Recorded(folder=run, config=here, lines=lines, images=images)


def with_pipeline(data: DataConfig, name: str) -> DataConfig:
    """Return a run's data by another pipeline, if one is named.

    Raises:
        FastSiamError: the run was on noise, which other pipelines do not make.
    """
    if name in ("", "run"):
        return data
    other = replace(data, pipeline=cast("PipelineSetting", name))
    if other.loads_images != data.loads_images:
        raise FastSiamError(
            f"the run was trained by the {data.pipeline} pipeline, which {name} cannot stand for: "
            "one has images, the other noise"
        )
    return other


def require_same(line: Line, digest: int, recorded: Recorded) -> None:
    """Refuse a line whose digest is another than what it should be.

    Raises:
        FastSiamError: says which, and what that means.
    """
    if written(digest) != line.seen:
        raise FastSiamError(
            f"{line} of {recorded.folder}: the log has digest {line.seen}, and seed, settings and "
            f"data give {written(digest)}: other images or draws were trained on, or config.json, "
            "metrics.jsonl or the data are not the run's own any more"
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
            f"{run / 'metrics.jsonl'} holds a line that is no log line of a run: since "
            f"{values.get('since')}, step {values.get('step')}; restore the file"
        )
    return line


def _steps(lines: Sequence[Line]) -> str:
    return str(Line(lines[0].first, lines[-1].last, "", math.nan))


def _missing(lines: Sequence[Line]) -> Iterator[str]:
    """Say which steps no line tells of: those of a run's part that an older version trained."""
    begin = Line(0, 0, "", math.nan)
    for before, after in pairwise([begin, *lines]):
        if after.first != before.last + 1:
            yield f"no line tells of {Line(before.last + 1, after.first - 1, '', math.nan)}"


def _compared(lines: Sequence[Line], digests: Iterator[int]) -> Iterator[tuple[Line, int]]:
    """Yield each line with the digest of its steps.

    Args:
        lines: of the log.
        digests: of all their steps, in order.
    """
    with tally("steps", sum(map(len, lines))) as done:
        for line in lines:
            yield line, added(*islice(digests, len(line)))
            done.add(len(line))


def _shown(loader: Loader, numbers: Sequence[int]) -> Iterator[int]:
    """Yield the digests of some steps, ascending, of what a loader shows."""
    batches: Iterator[Batch] = iter(())
    following = 0
    for number in numbers:
        epoch, step = divmod(number - 1, loader.steps)
        if number != following or not step:
            batches = loader.epoch(epoch, skip=step)
        following = number + 1
        yield next(batches).seen


def _loader(recorded: Recorded, config: VerifyConfig) -> Loader:
    """Open the pipeline that shall make the batches again."""
    trained = recorded.config
    return build_loader(
        with_pipeline(trained.data, config.pipeline),
        trained.augment,
        batch=trained.optim.batch,
        seed=trained.numerics.seed,
        store=recorded.images.store,
        bad=recorded.bad,
        shuffle=recorded.images.shuffle,
    )


class _Steps:
    """What each step of a run should have been trained on.

    Args:
        recorded: the run.
    """

    def __init__(self, recorded: Recorded) -> None:
        self._config, self._store, self._order = (
            recorded.config, recorded.images.store, recorded.order,
        )  # fmt: skip
        self._sizes = None if self._store is None else _Sizes(self._store)

    def indices(self, number: int) -> NDArray[np.int64]:
        """Return the places of a step's images, in order; steps begin at 1."""
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
        return seen_in(params, index, epoch=epoch, place=self._order.place(step))


class _Sizes:
    """Heights and widths of a store's images; each header is read once, where no table has them."""

    def __init__(self, store: Store) -> None:
        self._store, known = store, store.dimensions()
        self._known = np.zeros((len(store), 2), np.int64) if known is None else known

    def of(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return (N, 2) height and width of some images."""
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
    """Hold the weights of a run's checkpoint against their digest, if there is one."""
    file = checkpoints.last(run)
    if not file.is_file():
        return
    kept = checkpoints.load(file)
    if not kept.weights:
        return
    found = checkpoints.digest_of(kept.model)
    if found != kept.weights:
        raise CheckpointError(
            f"{file}: the weights have digest {found[:16]}, and were saved with "
            f"{kept.weights[:16]}: the file is damaged or was changed; restore a copy of it"
        )
    yield f"the weights after step {kept.step:,} agree: SHA-256 {found}"
