"""Other libraries beside our pipelines: the same images, in turns, in the same run."""

from __future__ import annotations

from typing import Any

from fastsiam.bench import peers as others
from fastsiam.bench.config import PEERS
from fastsiam.bench.loading import build_loading, data_of
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session


def peers(session: Session) -> list[Record]:
    """Measure how fast other libraries make two finished views, and our pipelines."""
    batch = session.loaded_batch
    images = session.images(batch)
    augment = session.config.augment
    titles: dict[str, str] = {}
    with session.contest() as contest:
        for pipeline in session.config.pipeline_names:
            name = f"fastsiam --pipeline {pipeline}"
            settings: dict[str, Any] = {
                "data": data_of(session, images, pipeline, "original"),
                "augment": augment,
                "batch": batch,
                "images": images.count,
                "device": session.device,
            }
            if contest.enter(name, build_loading, **settings):
                titles[name] = pipeline
        for peer in [name for name in session.config.peers.split(",") if name] or PEERS:
            if (reason := others.missing(peer)) or session.device not in others.PEERS[peer].devices:
                reason = reason or f"it does not work on {session.device}"
                session.console.say(f"{peer}: not measured: {reason}")
                continue
            contest.enter(
                others.PEERS[peer].title,
                others.build,
                peer=peer,
                folder=str(images.folder),
                beton=str(images.stored("original") / "train.beton"),
                crop=augment.crop,
                batch=batch,
                workers=session.workers,
                images=images.count,
                device=session.device,
                blur=augment.views[0].blur_p > 0,
            )
        timings = contest.run(session.config.repeats)
        contenders = contest.contenders
        facts = {turn: contest.facts(*turn) for turn in timings}
    torchvision = timings.get(("fastsiam --pipeline torchvision", "views"))
    return [
        record(
            "peers",
            name,
            timing,
            torchvision=torchvision,
            pipeline=titles.get(name, ""),
            gpu_bytes=contenders[name].gpu,
            facts=facts[name, work],
            in_the_clock="one epoch to finished views, normalised, on the device",
            config=session.settings(batch=batch, workers=session.workers, data=images.about),
        )
        for (name, work), timing in timings.items()
        if work == "views"
    ]
