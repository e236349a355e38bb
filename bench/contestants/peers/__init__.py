"""Other libraries at work on SimSiam's two views of the same images as ours, a file for each.

Each is written as its own documentation has it, with the paper's settings where it lets one choose;
what it does otherwise is in the table, ``fastsiam.bench.peers``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch

from fastsiam.bench.contest import Work
from fastsiam.bench.contestants.peers.job import Job, Opened
from fastsiam.bench.peers import PEERS
from fastsiam.config import AugmentConfig
from fastsiam.errors import FastSiamError


def starter(name: str) -> Callable[[Job], Opened]:
    """Return what begins a peer's work; it imports the peer's packages when it is called."""
    start: Callable[[Job], Opened] = import_module(f"{__name__}.{PEERS[name].module}").start
    return start


def build_peer(
    *,
    peer: str,
    folder: str,
    beton: str | None,
    augment: AugmentConfig,
    batch: int,
    workers: int,
    images: int,
    device: str,
) -> dict[str, Work]:
    """Return a peer's work for a contest: an epoch each time.

    Args:
        peer: its name in ``PEERS``.
        folder: class folders of JPEGs: ``images`` or more.
        beton: the same images in a .beton file, for ffcv-plain.
        augment: ranges and probabilities.
        batch: images of a batch.
        workers: processes or threads that load, at least 1.
        images: of an epoch; a multiple of ``batch``.
        device: where the views shall lie.

    Raises:
        FastSiamError: its packages are missing.
    """
    about = PEERS[peer]
    if reason := about.missing:
        raise FastSiamError(f"{about.title} is not installed: {reason}")
    job = Job(
        folder=folder,
        beton=beton,
        augment=augment,
        batch=batch,
        workers=workers,
        images=images,
        device=torch.device(device),
    )
    opened = starter(peer)(job)

    def run() -> None:
        for _ in opened.epoch():
            pass

    facts = {"differs": about.differs, "version": opened.version}
    return {"views": Work(run, images, lambda: facts)}
