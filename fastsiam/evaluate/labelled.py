"""Labelled training images of an evaluation: the selection of images, and their batches.

Linear evaluation and fine-tuning share ``LabelledImages``; ``fastsiam.evaluate.supervised`` trains.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.bad_image_list import BadImage
from fastsiam.config.evaluate import FinetuneConfig, LinearConfig
from fastsiam.console import format_count
from fastsiam.distributed import complete, minimum_across_ranks
from fastsiam.errors import FastSiamError
from fastsiam.evaluate.features import concat_batches, frozen_output
from fastsiam.evaluate.subject import Subject
from fastsiam.pipelines import BadImages, Order, build_loader, choose, open_split, read_list
from fastsiam.run.records import TrainingDataFacts
from fastsiam.views.batch import Loader, to_device

Batches = Generator[tuple[Tensor, Tensor]]
"""Yields this rank's share of each batch: images or features, and labels."""


class LabelledImages:
    """Labelled training images in batches of equal size, and validation images.

    Args:
        subject: network and data.
        config: which images to train on (all, a percentage, or a list of names), and the global
            batch size, which is reduced to the number of training images if there are fewer.

    Raises:
        FastSiamError: the data or the list cannot be read, the batch cannot be divided among the
            ranks, or there are too few images.
    """

    def __init__(self, subject: Subject, config: LinearConfig | FinetuneConfig) -> None:
        self.subject = subject
        self.positions: NDArray[np.int64] | None = None
        """Positions of the images to train on in the data set's training split; None for all."""
        self.percent = 100.0
        """Actual percentage of the training split that is used."""
        self.part = ""
        """Name of the subset, for file names; empty if all images are used."""
        self.selection = ""
        """Suffix for messages with the options that select the images; empty if all are used."""
        if config.subset or config.percent != 100:
            store = open_split(subject.data, "train")
            if config.subset:
                self.positions = read_list(store, Path(config.subset))
                self.part, option = Path(config.subset).stem, f"--subset {Path(config.subset).name}"
            else:
                self.positions = choose(store.labels, percent=config.percent, seed=config.seed)
                self.part, option = f"{config.percent:g}percent", f"--percent {config.percent:g}"
            self.selection = f", {option}, seed {config.seed}"
            self.percent = 100 * len(self.positions) / len(store)
        self.train, self.val = subject.loaders(self.positions)
        subject.check_same(self.train, self.val)
        self.config = config.with_defaults(self.train.images)
        world, images, batch = subject.place.world, self.train.images, self.config.batch
        if batch % world:
            raise FastSiamError(
                f"--batch {batch} is not divisible by {world} ranks; pass --batch "
                f"{max(2, batch // world) * world}"
            )
        self.batch = min(batch, images // world * world)
        """Images per step, over all ranks."""
        if self.batch < 2 * world:
            raise FastSiamError(
                f"{format_count(images, 'training image')} and --batch {batch} give each of "
                f"{format_count(world, 'rank')} fewer than two images per step"
            )
        note = f"batch {self.batch}, not {batch:,}: there are too few training images"
        self.note = note if self.batch < batch else ""
        """Message about a reduced batch size; empty if it is the requested one."""
        self.steps = self.train.images // self.batch
        """Complete batches per epoch; the rest of the shuffled images is dropped."""

    def __str__(self) -> str:
        """Describe the training images for display."""
        text = format_count(self.train.images, "training image")
        return f"{text} ({self.percent:.3g}% of all{self.selection})" if self.part else text

    def facts(self) -> TrainingDataFacts:
        """Describe these images for a record."""
        positions = self.positions
        return TrainingDataFacts(
            **asdict(self.subject.data_facts(self.train, self.val)),
            percent=self.config.percent,
            subset=self.config.subset or None,
            chosen_crc32=None if positions is None else f"{zlib.crc32(positions.tobytes()):08x}",
        )

    def open_augmented(self, batch: int) -> Loader:
        """Open the training images in global batches, augmented by random crops and flips only."""
        subject, config, place = self.subject, self.config, self.subject.place
        return build_loader(
            subject.data.parts[0],  # the first data set of a mixture, like the other loaders
            subject.augment.changed(scale_min=config.scale_min, jitter_p=0, gray_p=0, blur_p=0),
            batch=batch,
            seed=config.seed,
            rank=place.rank,
            world=place.world,
            device=place.device,
            chosen=self.positions,
        )


def augmented_images(images: LabelledImages, epochs: range) -> Batches:
    """Yield the batches of a range of epochs as augmented images (n, 3, S, S)."""
    with closing(images.open_augmented(images.batch)) as loader:
        for epoch in epochs:
            yield from ((batch.view1, batch.label) for batch in loader.epoch(epoch))


def augmented_features(images: LabelledImages, epochs: range) -> Batches:
    """Yield the batches of a range of epochs as frozen features (n, d) of augmented images.

    A rank's share of a batch is loaded in parts of equal size, or in one part if no suitable size
    divides its number of images.
    """
    subject = images.subject
    share = images.batch // subject.place.world
    limit = min(share, subject.batch)
    part = next((n for n in range(limit, limit // 2, -1) if share % n == 0), share)
    parts = share // part
    with closing(images.open_augmented(images.batch // parts)) as loader:
        for epoch in epochs:
            views = loader.epoch(epoch)
            for _ in range(images.steps):
                features, labels = concat_batches(
                    (frozen_output(subject.network, image, dtype=subject.dtype), label)
                    for batch in islice(views, parts)
                    for image, label in zip(
                        *(x.split(subject.batch) for x in (batch.view1, batch.label)), strict=True
                    )
                )
                yield features, labels


def cached_features(images: LabelledImages, storage: torch.dtype) -> Callable[[range], Batches]:
    """Compute the features (n, d) of all central crops once, and keep them on every rank.

    Returns:
        A function that yields the batches of a range of epochs, in float32.
    """
    subject, train, place = images.subject, images.train, images.subject.place
    device, total = place.device, train.images
    features = torch.empty(total, subject.network.features, dtype=storage, device=device)
    labels = to_device(train.labels, device)
    positions = torch.arange(total) if images.positions is None else torch.tensor(images.positions)
    positions = positions.to(device)
    absent = torch.ones(total, dtype=torch.uint8, device=device)  # stays 1 for bad images
    for part, _, index in subject.extract(train, "training: images"):
        rows = torch.searchsorted(positions, index)
        absent[rows] = 0
        features[rows] = part.to(storage)
    complete(features, [len(share) for share in np.array_split(np.arange(total), place.world)])
    bad_rows = minimum_across_ranks(absent).nonzero().flatten().tolist()
    order = Order(
        images=total,
        batch=images.batch,
        seed=images.config.seed,
        rank=place.rank,
        world=place.world,
        bad=BadImages(total, [BadImage(0, row, "", "", 0) for row in bad_rows]),
    )

    def batches(epochs: range) -> Batches:
        for epoch in epochs:
            for step in range(order.steps):
                index = to_device(order.indices(epoch, step), device)
                yield features[index].float(), labels[index]

    return batches
