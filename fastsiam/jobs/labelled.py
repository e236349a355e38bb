"""Training with labels, to evaluate: which images, in which batches, and how it goes on.

Linear evaluation and fine-tuning differ in what is trained (``evaluate.linear``,
``evaluate.finetune``); this is what they share.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.config.evaluate import LabelConfig
from fastsiam.console import Console, duration
from fastsiam.distributed import Place, complete, minimum_across_ranks
from fastsiam.errors import BackendError, FastSiamError
from fastsiam.evaluate.features import collected, frozen
from fastsiam.evaluate.linear import HeadResult
from fastsiam.files import why, written_whole
from fastsiam.jobs.subject import Subject, described_data, sameness
from fastsiam.pipelines import Order, build_loader, choose, open_store, read_list
from fastsiam.views.batch import Loader, to_device

_SECONDS_BETWEEN_SAVES = 30.0

Batches = Iterator[tuple[Tensor, Tensor]]


class Training(Protocol):
    """What is trained with labels."""

    def epoch(self, number: int, batches: Batches) -> Tensor:
        """Train for an epoch; return the heads' losses."""

    def evaluate(self, batches: Any) -> list[HeadResult]:
        """Validate every head."""

    def state(self) -> dict[str, Any]:
        """Return what ``load`` goes on from."""

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""


@dataclass
class Source:
    """Batches of an epoch, this rank's share of each."""

    epoch: Callable[[int], Batches]
    close: Callable[[], None] = lambda: None


class Task:
    """Training with labels: which images, in which batches, and how it goes on.

    Args:
        subject: network and images.
        config: which of the images, validations, seed.
        batch: global batch that was asked for; it is at most the training images.
    """

    def __init__(self, subject: Subject, config: LabelConfig, batch: int) -> None:
        self._subject, self._config, self._place = subject, config, subject.place
        world, self._chosen, share = self._place.world, None, 1.0
        if config.subset or config.percent < 100:
            store = open_store(subject.data.root, "train")
            self._chosen = (
                read_list(store, Path(config.subset))
                if config.subset
                else choose(store.labels, percent=config.percent, seed=config.seed)
            )
            share = len(self._chosen) / len(store)
        self.train, self.val = subject.loaders(self._chosen)
        self.percent = 100 * share
        """Share of the training images that are used."""
        if batch % world:
            raise FastSiamError(f"--batch {batch} cannot be shared equally by {world} ranks")
        self.batch = min(batch, self.train.images // world * world)
        """Images of a step, over all ranks."""
        if self.batch < 2 * world:
            raise FastSiamError(
                f"{self.train.images:,} training images and --batch {batch} leave fewer than two "
                f"for each of {world} ranks"
            )
        if self.batch < batch:
            subject.console.say(f"batch {self.batch}, not {batch:,}: there are no more images")
        self.steps = self.train.images // self.batch
        """Whole batches in an epoch; the tail of the shuffled images is dropped."""
        self.share = Path(config.subset).stem
        """Which part of the training images, for names of files."""
        if config.percent < 100:
            self.share = f"{config.percent:g}percent"
        self.of = f", on {self.share}, seed {config.seed}" if self.share else ""

    def described(self) -> str:
        """Say for people what is trained on."""
        part = ""
        if self._chosen is not None:
            part = f" ({self.percent:.3g}% of them, " + (
                f"by {self._config.subset})"
                if self._config.subset
                else f"seed {self._config.seed})"
            )
        return f"{self.train.images:,} training images{part}"

    def record(self, kind: str, **protocol: Any) -> dict[str, Any]:
        """Begin a record."""
        config, record = self._config, self._subject.record(kind)
        chosen = None if self._chosen is None else f"{zlib.crc32(self._chosen.tobytes()):08x}"
        record["data"] |= described_data(self.train, self.val) | {
            "percent": config.percent,
            "subset": config.subset or None,
            "chosen_crc32": chosen,
        }
        record["protocol"] = {
            "batch": self.batch,
            "momentum": config.momentum,
            "weight_decay": config.weight_decay,
            "schedule": "cosine per step",
            "seed": config.seed,
            **protocol,
        }
        return record

    def images(self) -> Source:
        """Return batches of augmented images."""
        loader = self._views(self.batch)
        return Source(lambda epoch: ((b.view1, b.label) for b in loader.epoch(epoch)), loader.close)

    def features(self) -> Source:
        """Return batches of the frozen features of augmented images, computed a part at a time."""
        subject, world = self._subject, self._place.world
        share = self.batch // world
        # A number without good divisors, of a subset for instance, is loaded in one piece.
        most = min(share, subject.batch)
        part = next((n for n in range(most, most // 2, -1) if share % n == 0), share)
        loader = self._views(part * world)

        def epoch(number: int) -> Batches:
            views = loader.epoch(number)
            for _ in range(self.steps):
                made = [
                    (frozen(subject.network, image, dtype=subject.dtype), label)
                    for batch in islice(views, share // part)
                    for image, label in zip(
                        batch.view1.split(subject.batch),
                        batch.label.split(subject.batch),
                        strict=True,
                    )
                ]
                yield collected(made)

        return Source(epoch, loader.close)

    def cached(self, storage: torch.dtype) -> Source:
        """Return batches of features that are computed once; every rank holds those of all."""
        subject, device, images = self._subject, self._place.device, self.train.images
        features = torch.empty(images, subject.features, dtype=storage, device=device)
        labels = to_device(self.train.labels, device)
        shares = [len(share) for share in np.array_split(np.arange(images), self._place.world)]
        row = sum(shares[: self._place.rank])
        for part, _ in subject.extract(self.train, "training: image"):
            features[row : row + len(part)] = part
            row += len(part)
        complete(features, shares)
        order = Order(
            images=images,
            batch=self.batch,
            seed=self._config.seed,
            rank=self._place.rank,
            world=self._place.world,
        )

        def epoch(number: int) -> Batches:
            for step in range(order.steps):
                index = to_device(order.indices(number, step), labels.device)
                yield features[index].float(), labels[index]

        return Source(epoch)

    def _views(self, batch: int) -> Loader:
        """Open the training images with random crops and flips, and nothing else."""
        try:
            return self._open_views(batch)
        except BackendError as error:
            raise BackendError(f"{error}; or evaluate with --pipeline torchvision") from error

    def _open_views(self, batch: int) -> Loader:
        subject, config = self._subject, self._config
        return build_loader(
            subject.data,
            AugmentConfig.alike(
                crop=subject.augment.crop,
                mean=subject.augment.mean,
                std=subject.augment.std,
                scale_min=config.scale_min,
                jitter_p=0,
                gray_p=0,
                blur_p=0,
            ),
            batch=batch,
            seed=config.seed,
            rank=self._place.rank,
            world=self._place.world,
            device=self._place.device,
            chosen=self._chosen,
        )

    def run(
        self,
        training: Training,
        source: Source,
        held: Any,
        epochs: int,
        record: dict[str, Any],
        targets: list[Path],
    ) -> tuple[list[HeadResult], Partial]:
        """Train epoch by epoch, validate on the way and at the end, and fill in the record.

        The state is saved now and then beside where the record will go, and found again.

        Args:
            training: what is trained.
            source: its batches; closed at the end.
            held: the validation images or features, as ``training.evaluate`` takes them.
            epochs: how many.
            record: of what is done; it tells whether a state that is found is of the same.
            targets: where the record will go.

        Returns:
            Results, and the saved state, to be removed when the record is kept.
        """
        console, every = self._subject.console, self._config.eval_every
        partial = Partial(targets, record, self._place, console)
        first = 0
        if self._config.resume == "auto" and (found := partial.load()):
            first = found["epoch"]
            training.load(found["state"])
            console.say(f"going on after epoch {first} of {epochs}, where it was interrupted")
        results: list[HeadResult] = []
        began = time.monotonic()
        with closing(source), console.progress(epochs * self.steps, first * self.steps):
            for epoch in range(first, epochs):
                batches = self._shown(source.epoch(epoch), epoch, epochs)
                losses = training.epoch(epoch, batches)
                done = epoch + 1
                if done == epochs or (every and done % every == 0):
                    results = training.evaluate(held)
                    best = max(results, key=lambda result: result.top1)
                    loss = losses[results.index(best)].item()
                    console.say(f"epoch {done} of {epochs}: loss {loss:.3f}, {best}")
                partial.save(done, training.state, last=done == epochs)
        if not results:
            results = training.evaluate(held)
        seconds, best = time.monotonic() - began, max(results, key=lambda result: result.top1)
        console.say(
            f"trained in {duration(seconds)}; {best.images:,} validation images, each counted once"
        )
        record["results"] = [result.record() for result in results]
        record["best"] = best.record()
        record["images_validated"] = best.images
        record["per_class"] = dict(zip(self.train.classes, best.per_class, strict=True))
        record["speed"] = {"seconds": seconds, "epochs": epochs - first}
        return results, partial

    def _shown(self, batches: Batches, epoch: int, epochs: int) -> Batches:
        """Pass on the batches of an epoch, and show how it goes on."""
        console, began, before = self._subject.console, time.monotonic(), epoch * self.steps
        for step, batch in enumerate(batches, start=1):
            yield batch
            speed = step * self.batch / max(time.monotonic() - began, 1e-9)
            left = (epochs * self.steps - before - step) * self.batch / speed
            console.advance(before + step, f"{speed:,.0f} images/s, {duration(left)} left")


class Partial:
    """The state of an evaluation under way, beside where its record will be; of rank 0."""

    def __init__(
        self, targets: list[Path], record: dict[str, Any], place: Place, console: Console
    ) -> None:
        self._path = targets[0].with_suffix(".partial") if targets else None
        self._same = f"{record['network']['fingerprint']} {sameness(record)}"
        self._place, self._console, self._saved = place, console, time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """Return what was saved, if it was the same evaluation of the same network.

        The same on every rank: none, where only some find it.
        """
        found: dict[str, Any] = {}
        if self._path is not None and self._path.is_file():
            try:
                found = torch.load(self._path, map_location=self._place.device, weights_only=True)
            except Exception:  # a damaged file makes the unpickler raise anything
                self._console.warn(f"{self._path} is damaged: beginning anew")
        epoch = torch.tensor([found.get("epoch", 0) if found.get("same") == self._same else 0])
        return found if int(minimum_across_ranks(epoch.to(self._place.device))) else None

    def save(self, epoch: int, state: Callable[[], dict[str, Any]], *, last: bool) -> None:
        """Save the state after so many epochs, but not all the time."""
        soon = time.monotonic() - self._saved < _SECONDS_BETWEEN_SAVES
        if self._path is None or not self._place.leads or (soon and not last):
            return
        try:
            with written_whole(self._path) as temporary:
                torch.save({"same": self._same, "epoch": epoch, "state": state()}, temporary)
        except (OSError, RuntimeError) as error:
            self._console.warn(f"cannot save {self._path} ({why(error)}); going on without")
        self._saved = time.monotonic()

    def remove(self) -> None:
        """Forget it: the record says it all."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
