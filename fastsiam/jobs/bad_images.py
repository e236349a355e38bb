"""The bad images of a training run: found before and now, told to all ranks, kept in its folder."""

from __future__ import annotations

from pathlib import Path

from fastsiam.bad_images import FILE, read_bad_images
from fastsiam.config import TrainConfig
from fastsiam.distributed import Place, from_all
from fastsiam.errors import FastSiamError
from fastsiam.jobs.images import RunImages
from fastsiam.pipelines import BadImages
from fastsiam.training.folder import RunFolder


def bad_images_of(
    config: TrainConfig, images: RunImages, begun: Path | None, folder: RunFolder, place: Place
) -> BadImages:
    """Return what is known of a run's bad images; the first rank keeps in its folder what is found.

    Args:
        config: the run's, which says whether other bad images stop it.
        images: of the run.
        begun: folder of the run that goes on; None for a new one.
        folder: the run's.
        place: this rank.

    Raises:
        CheckpointError: the list of the run that goes on is damaged.
    """

    def keep(content: bytes) -> None:
        if not (content or (folder.path / FILE).exists()):
            return
        try:
            folder.keep(FILE, content)
        except FastSiamError as error:  # found again by a run that goes on, if need be
            folder.console.warn(f"{error}; training goes on")

    return BadImages(
        0 if images.store is None else len(images.store),
        [] if begun is None else read_bad_images(begun),
        takes_more=config.data.bad_images == "replace" and images.store is not None,
        exchange=from_all,
        keep=keep if place.leads else None,
    )
