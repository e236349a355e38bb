"""How fast other libraries make two finished views, beside our pipelines, on the same images."""

from __future__ import annotations

import torch

from fastsiam.bench.cases.loader import build_loading
from fastsiam.bench.contest import Work
from fastsiam.bench.peers import PEERS, starter
from fastsiam.bench.peers.job import Job
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session
from fastsiam.errors import FastSiamError
from fastsiam.pipelines.backends import BASELINE


def measure(session: Session) -> list[Record]:
    """Measure them in the same run, in turns."""
    batch = session.loaded_batch
    images = session.images(batch)
    pipelines = {f"fastsiam --pipeline {one}": one for one in session.config.pipeline_names}
    with session.contest() as contest:
        for name, pipeline in pipelines.items():
            contest.enter(
                name,
                build_loading,
                data=session.data(images, pipeline),
                augment=session.config.augment,
                batch=batch,
                images=images.count,
                device=session.device,
            )
        job = Job(
            folder=str(images.folder),
            beton=str(images.stored("original") / "train.beton"),
            augment=session.config.augment,
            batch=batch,
            workers=session.workers,
            images=images.count,
            device=torch.device(session.device),
        )
        for peer in session.config.peer_names:
            reason = PEERS[peer].missing
            if session.device not in PEERS[peer].devices:
                reason = reason or f"it does not work on {session.device}"
            if reason:
                session.console.say(f"{peer}: not measured: {reason}")
            else:
                contest.enter(PEERS[peer].title, build_peer, peer=peer, job=job)
        timings = contest.run(session.config.repeats)
    baseline = timings.get((f"fastsiam --pipeline {BASELINE}", "views"))
    return [
        record(
            "peers",
            name,
            timing,
            torchvision=baseline,
            pipeline=pipelines.get(name, ""),
            in_the_clock="one epoch to finished views, normalised, on the device",
            config=session.settings(batch=batch, workers=session.workers, data=images.about),
        )
        for (name, work), timing in timings.items()
        if work == "views"
    ]


def build_peer(*, peer: str, job: Job) -> dict[str, Work]:
    """Start another library; its work is an epoch.

    Args:
        peer: its name in ``PEERS``.
        job: what it is to do.

    Raises:
        FastSiamError: its packages are missing.
    """
    about = PEERS[peer]
    if reason := about.missing:
        raise FastSiamError(f"{about.title} is not installed: {reason}")
    opened = starter(peer)(job)

    def run() -> None:
        for _ in opened.epoch():
            pass

    facts = {"differs": about.differs, "version": opened.version}
    return {"views": Work(run, job.images, lambda: facts)}
