"""How fast other libraries make two finished views, beside our pipelines, on the same images."""

from __future__ import annotations

from fastsiam.bench.contest import Contest
from fastsiam.bench.contestants.loader import build_loading
from fastsiam.bench.contestants.peers import build_peer
from fastsiam.bench.images import Images
from fastsiam.bench.peers import PEERS
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session
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
        for peer in session.config.peer_names:
            _enter(contest, session, images, peer)
        timings = contest.run(session.config.repeats)
        contenders = contest.contenders
        facts = {turn: contest.facts(*turn) for turn in timings}
    baseline = timings.get((f"fastsiam --pipeline {BASELINE}", "views"))
    return [
        record(
            "peers",
            name,
            timing,
            torchvision=baseline,
            pipeline=pipelines.get(name, ""),
            gpu_bytes=contenders[name].gpu,
            facts=facts[name, work],
            in_the_clock="one epoch to finished views, normalised, on the device",
            config=session.settings(batch=batch, workers=session.workers, data=images.about),
        )
        for (name, work), timing in timings.items()
        if work == "views"
    ]


def _enter(contest: Contest, session: Session, images: Images, name: str) -> None:
    """Have another library take part, if it is installed and works here."""
    peer = PEERS[name]
    reason = peer.missing
    if session.device not in peer.devices:
        reason = reason or f"it does not work on {session.device}"
    if reason:
        session.console.say(f"{name}: not measured: {reason}")
        return
    contest.enter(
        peer.title,
        build_peer,
        peer=name,
        folder=str(images.folder),
        beton=str(images.stored("original") / "train.beton"),
        augment=session.config.augment,
        batch=session.loaded_batch,
        workers=session.workers,
        images=images.count,
        device=session.device,
    )
