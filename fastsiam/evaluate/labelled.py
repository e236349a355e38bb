"""Labelled images to train on, for evaluation: which ones, and in which batches.

Linear evaluation and fine-tuning share ``LabelledImages`` and take their batches from one of the
sources below it; ``fastsiam.evaluate.epochs`` drives the training.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.bad_image_list import BadImage
from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.config.evaluate import LabelConfig
from fastsiam.distributed import complete, minimum_across_ranks
from fastsiam.errors import BackendError, FastSiamError
from fastsiam.evaluate.features import collected, frozen
from fastsiam.evaluate.subject import Subject, data_facts
from fastsiam.pipelines import BadImages, Order, build_loader, choose, open_split, read_list
from fastsiam.run.records import TrainingDataFacts
from fastsiam.views.batch import Loader, to_device

Batches = Iterator[tuple[Tensor, Tensor]]
"""Images or features of this rank's share of a batch, and labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPart:
    """Which of the training images are trained on: all, a percentage, or those of a list."""

    positions: NDArray[np.int64] | None
    """Of the images in the data set; None is all."""
    percent: float
    """Share of the training images, as counted."""
    name: str
    """For names of files; empty for all."""
    origin: str
    """Where the choice comes from, for people; empty for all."""
    seed: int

    @classmethod
    def of(cls, data: DataConfig, config: LabelConfig) -> TrainingPart:
        """Choose the part that is asked for.

        Args:
            data: where the images lie, and which share of them is held out.
            config: a percentage, or a list of names.

        Raises:
            DataError: the data or the list cannot be read, or a name is unknown.
        """
        if not config.subset and config.percent == 100:
            return cls(positions=None, percent=100.0, name="", origin="", seed=config.seed)
        store = open_split(data, "train")
        if config.subset:
            positions = read_list(store, Path(config.subset))
            name, origin = Path(config.subset).stem, f"by {config.subset}"
        else:
            positions = choose(store.labels, percent=config.percent, seed=config.seed)
            name, origin = f"{config.percent:g}percent", f"seed {config.seed}"
        percent = 100 * len(positions) / len(store)
        return cls(positions=positions, percent=percent, name=name, origin=origin, seed=config.seed)

    def __str__(self) -> str:
        """The end of a line about results: empty for all images."""
        return f", on {self.name}, seed {self.seed}" if self.name else ""


class LabelledImages:
    """Training images with labels, in steps of one size, and validation images.

    Args:
        subject: network and data.
        config: which of the images; the global batch, which is at most the training images.

    Raises:
        FastSiamError: the batch cannot be shared by the ranks, or there are too few images.
    """

    def __init__(self, subject: Subject, config: LabelConfig) -> None:
        self.subject = subject
        self.part = TrainingPart.of(subject.data, config)
        self.train, self.val = subject.loaders(self.part.positions)
        self.config = config.settled(self.train.images)
        self.batch = self._possible(self.config.global_batch)
        """Images of a step, over all ranks."""
        self.steps = self.train.images // self.batch
        """Whole batches in an epoch; the tail of the shuffled images is dropped."""

    def _possible(self, batch: int) -> int:
        """Return the global batch that there are images for."""
        world, images = self.subject.place.world, self.train.images
        check_shared(batch, world)
        possible = min(batch, images // world * world)
        if possible < 2 * world:
            raise FastSiamError(
                f"{images:,} training images and --batch {batch} leave fewer than two "
                f"for each of {world} ranks"
            )
        if possible < batch:
            self.subject.console.say(f"batch {possible}, not {batch:,}: there are no more images")
        return possible

    def __str__(self) -> str:
        """What is trained on, for people."""
        text = f"{self.train.images:,} training images"
        if self.part.positions is None:
            return text
        return f"{text} ({self.part.percent:.3g}% of them, {self.part.origin})"

    def facts(self) -> TrainingDataFacts:
        """Return for a record which images these are."""
        data = data_facts(self.subject.data, self.train, self.val)
        chosen = self.part.positions
        return TrainingDataFacts(
            root=data.root,
            train=data.train,
            val=data.val,
            classes=data.classes,
            labels_crc32=data.labels_crc32,
            holdout=data.holdout,
            image_column=data.image_column,
            percent=self.config.percent,
            subset=self.config.subset or None,
            chosen_crc32=None if chosen is None else f"{zlib.crc32(chosen.tobytes()):08x}",
        )

    def augmented(self, batch: int) -> Loader:
        """Open the training images with random crops and flips, and nothing else.

        Args:
            batch: global batch that the loader yields.

        Raises:
            BackendError: the pipeline does not work here.
        """
        subject, config, place = self.subject, self.config, self.subject.place
        augment = AugmentConfig.alike(
            crop=subject.augment.crop,
            mean=subject.augment.mean,
            std=subject.augment.std,
            scale_min=config.scale_min,
            jitter_p=0,
            gray_p=0,
            blur_p=0,
        )
        try:
            return build_loader(
                subject.data,
                augment,
                batch=batch,
                seed=config.seed,
                rank=place.rank,
                world=place.world,
                device=place.device,
                chosen=self.part.positions,
            )
        except BackendError as error:
            raise BackendError(f"{error}; or evaluate with --pipeline torchvision") from error


def check_shared(batch: int, world: int) -> None:
    """Refuse a global batch that ranks cannot share equally.

    Raises:
        FastSiamError: says so.
    """
    if batch % world:
        raise FastSiamError(f"--batch {batch} cannot be shared equally by {world} ranks")


class Source(Protocol):
    """Where the batches of an epoch come from."""

    def epoch(self, number: int) -> Batches:
        """Yield the batches of an epoch, ``LabelledImages.steps`` of them."""

    def close(self) -> None:
        """Give back what is held."""


class AugmentedImages:
    """Batches of augmented images (n, 3, S, S)."""

    def __init__(self, images: LabelledImages) -> None:
        self._loader = images.augmented(images.batch)

    def epoch(self, number: int) -> Batches:
        """Yield the batches of an epoch."""
        return ((batch.view1, batch.label) for batch in self._loader.epoch(number))

    def close(self) -> None:
        """Close the loader."""
        self._loader.close()


class AugmentedFeatures:
    """Batches of the frozen features (n, d) of augmented images, computed a part at a time."""

    def __init__(self, images: LabelledImages) -> None:
        self._subject, self._steps = images.subject, images.steps
        world = images.subject.place.world
        share = images.batch // world
        # A number without good divisors, of a subset for instance, is loaded in one piece.
        most = min(share, self._subject.batch)
        part = next((n for n in range(most, most // 2, -1) if share % n == 0), share)
        self._parts = share // part
        self._loader = images.augmented(part * world)

    def epoch(self, number: int) -> Batches:
        """Yield the batches of an epoch."""
        subject = self._subject
        views = self._loader.epoch(number)
        for _ in range(self._steps):
            made = [
                (frozen(subject.network, image, dtype=subject.dtype), label)
                for batch in islice(views, self._parts)
                for image, label in zip(
                    batch.view1.split(subject.batch), batch.label.split(subject.batch), strict=True
                )
            ]
            yield collected(made)

    def close(self) -> None:
        """Close the loader."""
        self._loader.close()


class CachedFeatures:
    """Batches of features (n, d) that are computed once; every rank holds those of all images.

    Args:
        images: central crops of these are taken.
        storage: type in which the features are kept.
    """

    def __init__(self, images: LabelledImages, storage: torch.dtype) -> None:
        subject, train, place = images.subject, images.train, images.subject.place
        device, total = place.device, train.images
        self._features = torch.empty(total, subject.features, dtype=storage, device=device)
        self._labels = to_device(train.labels, device)
        shares = [len(share) for share in np.array_split(np.arange(total), place.world)]
        shown = train.rows()
        absent = torch.ones(total, dtype=torch.uint8, device=device)  # in the end: bad images
        for part, _ in subject.extract(train, "training: image"):
            rows = torch.tensor(list(islice(shown, len(part))), device=device)
            absent[rows] = 0
            self._features[rows] = part.to(storage)
        complete(self._features, shares)
        bad = minimum_across_ranks(absent).nonzero().flatten().tolist()
        self._order = Order(
            images=total,
            batch=images.batch,
            seed=images.config.seed,
            rank=place.rank,
            world=place.world,
            bad=BadImages(total, [BadImage(0, row, "", "", 0) for row in bad]),
        )

    def epoch(self, number: int) -> Batches:
        """Yield the batches of an epoch, in float32."""
        for step in range(self._order.steps):
            index = to_device(self._order.indices(number, step), self._labels.device)
            yield self._features[index].float(), self._labels[index]

    def close(self) -> None:
        """Nothing is open."""
