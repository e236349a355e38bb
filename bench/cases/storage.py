"""How fast epochs are from the local disk and from object storage, near and far, kept and not."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from fastsiam.bench import object_storage
from fastsiam.bench.contest import Contest
from fastsiam.bench.contestants.storage import build_reading, build_streaming
from fastsiam.bench.contestants.streaming import Job
from fastsiam.bench.images import Images
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session
from fastsiam.bench.streaming import STREAMING
from fastsiam.config import DataConfig, Pipeline
from fastsiam.pipelines.backends import BASELINE

_SHARDS = 16
_WINDOW = 1024
"""Images that are shuffled among each other, by all."""
_GIGABYTES = 50.0
_LOCAL = "local disk"


@dataclass(frozen=True)
class _Place:
    """Where a contender's data are, and in what state what it keeps is."""

    title: str = _LOCAL
    port: int = 0
    """Of the server, or of the proxy before it; 0 is the local disk."""
    cold: bool = False
    """Whether its cache is empty when an epoch begins."""


@dataclass(frozen=True)
class _Entry:
    """A contender that is ready."""

    library: str
    place: _Place
    pipeline: Pipeline | str = ""


def measure(session: Session) -> list[Record]:
    """Measure our pipelines and other libraries, one after the other, at each place."""
    images = session.images(session.loaded_batch)
    folder = session.folder / "storage"
    files = sorted(path for path in images.folder.rglob("*") if path.is_file())
    _pack(files, folder / "shards" / "tars")
    peers = [name for name in STREAMING if _is_ready(session, name)]
    if "litdata" in peers:
        form = import_module("fastsiam.bench.contestants.streaming.litdata")
        form.convert(files, folder / "shards" / "litdata")
    with ExitStack() as held:
        port = held.enter_context(object_storage.served(folder / "server"))
        object_storage.upload(port, folder / "shards", "shards")
        places = [_Place(), *_remote(held, session, port)]
        contest = held.enter_context(session.contest(apart=True))
        entered = dict(_enter(contest, session, images, folder, places))
        for peer in peers:
            entered |= dict(_enter_other(contest, session, images, folder, places, peer))
        timings = contest.run(session.config.repeats)
        facts = {turn: contest.facts(*turn) for turn in timings}
    local = {
        entered[name].library: timing
        for (name, _), timing in timings.items()
        if not entered[name].place.port
    }
    return [
        record(
            "storage",
            name,
            timing,
            ceiling=("its own from the local disk", local[entered[name].library])
            if entered[name].library in local
            else None,
            pipeline=entered[name].pipeline,
            facts=facts[name, work],
            in_the_clock="one epoch to finished views, of a loader that was opened just before; "
            "cold: its cache is empty then",
            config=session.settings(
                batch=session.loaded_batch,
                workers=session.workers,
                window=_WINDOW,
                data=images.about,
            ),
        )
        for (name, work), timing in timings.items()
    ]


def _remote(held: ExitStack, session: Session, port: int) -> Iterator[_Place]:
    for milliseconds in map(int, session.config.latencies.split(",")):
        own = held.enter_context(object_storage.delayed(port, milliseconds / 1000))
        for state in ("cold", "warm"):
            title = f"S3, {milliseconds} ms, {state} cache"
            yield _Place(title, own, cold=state == "cold")


def _enter(
    contest: Contest, session: Session, images: Images, folder: Path, places: list[_Place]
) -> Iterator[tuple[str, _Entry]]:
    names = session.config.pipeline_names if session.config.pipelines else (BASELINE,)
    for pipeline in names:
        library = f"fastsiam --pipeline {pipeline}"
        for number, place in enumerate(places):
            name = f"{library}, {place.title}"
            data = DataConfig(
                data=_address(folder, place, "tars"),
                pipeline=pipeline,
                workers=session.workers,
                shuffle=f"window:{_WINDOW}",
                cache=_cache(folder, place, f"{pipeline}-{number}"),
                cache_gb=_GIGABYTES,
            )
            settings: dict[str, Any] = {
                "data": data,
                "augment": session.config.augment,
                "batch": session.loaded_batch,
                "images": images.count,
                "environment": _environment(folder, place),
                "cold": place.cold,
            }
            if contest.enter(name, build_reading, **settings):
                yield name, _Entry(library, place, pipeline)


def _enter_other(
    contest: Contest,
    session: Session,
    images: Images,
    folder: Path,
    places: list[_Place],
    peer: str,
) -> Iterator[tuple[str, _Entry]]:
    library, module = STREAMING[peer].title, STREAMING[peer].module
    form = import_module(f"fastsiam.bench.contestants.streaming.{module}").SHARDS
    for number, place in enumerate(places):
        name = f"{library}, {place.title}"
        job = Job(
            shards=_address(folder, place, form, http=peer == "webdataset"),
            count=_SHARDS,
            cache=_cache(folder, place, f"{peer}-{number}"),
            augment=session.config.augment,
            batch=session.loaded_batch,
            workers=session.workers,
            window=_WINDOW,
        )
        if contest.enter(
            name,
            build_streaming,
            peer=peer,
            job=job,
            images=images.count,
            environment=_environment(folder, place),
            cold=place.cold,
        ):
            yield name, _Entry(library, place)


def _is_ready(session: Session, peer: str) -> bool:
    if reason := STREAMING[peer].missing:
        session.console.say(f"{peer}: not measured: {reason}")
    return not reason


def _address(folder: Path, place: _Place, form: str, *, http: bool = False) -> str:
    if not place.port:
        return str(folder / "shards" / form)
    base = f"http://127.0.0.1:{place.port}" if http else "s3:/"
    return f"{base}/{object_storage.BUCKET}/shards/{form}"


def _cache(folder: Path, place: _Place, name: str) -> str:
    return str(folder / "caches" / name) if place.port else ""


def _environment(folder: Path, place: _Place) -> dict[str, str]:
    """Return variables of a contender: indexes that loaders keep are each one's own."""
    own = object_storage.environment(place.port) if place.port else {}
    return own | {"XDG_CACHE_HOME": str(folder / "home")}


def _pack(files: list[Path], folder: Path) -> None:
    """Write files as WebDataset shards, in an order that mixes their classes."""
    folder.mkdir(parents=True)
    classes = sorted({path.parent.name for path in files})
    for number in range(_SHARDS):
        with tarfile.open(folder / f"train-{number:04}.tar", "w") as shard:
            for place, path in enumerate(files[number::_SHARDS]):
                label = str(classes.index(path.parent.name)).encode()
                for ending, data in (("jpg", path.read_bytes()), ("cls", label)):
                    member = tarfile.TarInfo(f"{number:04}{place:06}.{ending}")
                    member.size = len(data)
                    shard.addfile(member, BytesIO(data))
