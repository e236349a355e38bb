"""How fast epochs are from the local disk and from object storage, near and far, kept and not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from fastsiam.bench import object_storage
from fastsiam.bench.cases.peers import Twice, Views, torchvision_view
from fastsiam.bench.contest import Work
from fastsiam.bench.images import write_tar
from fastsiam.bench.peers import Peer
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session
from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.pipelines import build_loader
from fastsiam.pipelines.backends import BASELINE
from fastsiam.views.batch import Loader

_SHARDS = 16
_WINDOW = 1024
"""Images that are shuffled among each other, by all."""
_GIGABYTES = 50.0


@dataclass(frozen=True)
class _Place:
    """Where a contender's data are, and in what state its cache is."""

    title: str = "local disk"
    port: int = 0
    """Of the server, or of the proxy before it; 0 is the local disk."""
    cold: bool = False
    """Whether the cache is empty when an epoch begins."""

    def address(self, folder: Path, form: str, *, http: bool = False) -> str:
        """Return where shards of some form are found."""
        if not self.port:
            return str(folder / "shards" / form)
        base = f"http://127.0.0.1:{self.port}" if http else "s3:/"
        return f"{base}/{object_storage.BUCKET}/shards/{form}"

    def environment(self, folder: Path) -> dict[str, str]:
        """Return variables of a contender: indexes that loaders keep are each one's own."""
        own = object_storage.environment(self.port) if self.port else {}
        return own | {"XDG_CACHE_HOME": str(folder / "home")}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Data and access of a contender."""

    shards: str
    """Folder or address of the shards, in the form that the contender reads."""
    cache: str
    """Folder in which it keeps what it fetches; "" for none."""
    cold: bool
    """Whether the cache is emptied before each epoch."""
    environment: dict[str, str]
    """Variables by which the shards are found."""
    augment: AugmentConfig
    batch: int
    workers: int
    images: int
    """Images of an epoch: whole batches of them."""
    window: int = _WINDOW
    """Images that are shuffled among each other."""


def measure(session: Session) -> list[Record]:
    """Measure our pipelines and other libraries, one after the other, at each place."""
    images = session.images(session.loaded_batch)
    folder = session.folder / "storage"
    files = sorted(path for path in images.folder.rglob("*") if path.is_file())
    _pack(files, folder / "shards" / "tars")
    peers = []
    for name, peer in STREAMING.items():
        if peer.missing:
            session.console.say(f"{name}: not measured: {peer.missing}")
        else:
            peers.append(name)
    if "litdata" in peers:
        convert_for_litdata(files, folder / "shards" / "litdata")
    pipelines = session.config.pipeline_names if session.config.pipelines else (BASELINE,)
    title: dict[str, str] = {name: f"fastsiam --pipeline {name}" for name in pipelines}
    title |= {name: STREAMING[name].title for name in peers}
    with ExitStack() as held:
        port = held.enter_context(object_storage.served(folder / "server"))
        object_storage.upload(port, folder / "shards", "shards")
        places = [_Place(), *_remote(held, session, port)]
        contest = held.enter_context(session.contest(apart=True))
        entered: dict[str, tuple[str, _Place]] = {}
        for name in title:
            form = STREAMING[name].shards if name in peers else "tars"
            for number, place in enumerate(places):
                job = Job(
                    shards=place.address(folder, form, http=name == "webdataset"),
                    cache=str(folder / "caches" / f"{name}-{number}") if place.port else "",
                    cold=place.cold,
                    environment=place.environment(folder),
                    augment=session.config.augment,
                    batch=session.loaded_batch,
                    workers=session.workers,
                    images=images.count,
                )
                build = build_streaming if name in peers else build_reading
                entered[f"{title[name]}, {place.title}"] = name, place
                contest.enter(f"{title[name]}, {place.title}", build, reader=name, job=job)
        timings = contest.run(session.config.repeats)
    local = {
        entered[who][0]: timing for (who, _), timing in timings.items() if not entered[who][1].port
    }
    return [
        record(
            "storage",
            who,
            timing,
            ceiling=("its own from the local disk", local[name]) if name in local else None,
            pipeline="" if name in peers else name,
            in_the_clock="one epoch to finished views, of a loader that was opened just before; "
            "cold: its cache is empty then",
            config=session.settings(
                batch=session.loaded_batch,
                workers=session.workers,
                window=_WINDOW,
                data=images.about,
            ),
        )
        for (who, _), timing in timings.items()
        for name in [entered[who][0]]
    ]


def _remote(held: ExitStack, session: Session, port: int) -> Iterator[_Place]:
    for milliseconds in map(int, session.config.latencies.split(",")):
        own = held.enter_context(object_storage.delayed(port, milliseconds / 1000))
        for state in ("cold", "warm"):
            title = f"S3, {milliseconds} ms, {state} cache"
            yield _Place(title, own, cold=state == "cold")


def _pack(files: list[Path], folder: Path) -> None:
    """Write files as WebDataset shards, in an order that mixes their classes."""
    folder.mkdir(parents=True)
    classes = sorted({path.parent.name for path in files})
    for number in range(_SHARDS):
        members = [
            (f"{number:04}{place:06}.{ending}", data)
            for place, path in enumerate(files[number::_SHARDS])
            for ending, data in (
                ("jpg", path.read_bytes()),
                ("cls", str(classes.index(path.parent.name)).encode()),
            )
        ]
        write_tar(folder / f"train-{number:04}.tar", members)


def build_reading(*, reader: Any, job: Job) -> dict[str, Work]:
    """Build a pipeline, by its name; its work is an epoch of "views"."""
    os.environ.update(job.environment)
    opened: list[Loader] = []
    data = DataConfig(
        data=job.shards,
        pipeline=reader,
        workers=job.workers,
        shuffle=f"window:{job.window}",
        cache=job.cache,
        cache_gb=_GIGABYTES,
    )

    def open_anew() -> None:
        for loader in opened:
            loader.close()
        opened.clear()
        if job.cold and job.cache:
            shutil.rmtree(job.cache, ignore_errors=True)
        opened.append(build_loader(data, job.augment, batch=job.batch))
        if opened[0].steps != job.images // job.batch:
            raise RuntimeError(f"{opened[0].source} holds {opened[0].images:,} images")

    def run() -> None:
        if not opened:
            open_anew()
        for _ in opened[0].epoch(0):
            pass

    return {"views": Work(run, job.images, before=open_anew)}


def build_streaming(*, reader: str, job: Job) -> dict[str, Work]:
    """Build another library, by its name in ``STREAMING``; its work is an epoch of "views"."""
    os.environ.update(job.environment)
    about = STREAMING[reader]
    own, turns = job, count()

    def open_anew() -> None:
        nonlocal own
        if job.cold and job.cache:
            shutil.rmtree(job.cache, ignore_errors=True)
            own = replace(job, cache=f"{job.cache}/{next(turns)}")
        if own.cache:
            Path(own.cache).mkdir(parents=True, exist_ok=True)

    def run() -> None:
        shown = sum(len(batch[0]) for batch in about.epoch(own))
        if shown < job.images // job.batch * job.batch:
            raise RuntimeError(f"it showed {shown:,} of {job.images:,} images")

    open_anew()
    facts = {"differs": about.differs, "version": about.version}
    return {"views": Work(run, job.images, lambda: facts, before=open_anew)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming(Peer):
    """A library that streams shards; it decodes and makes views as ``transforms.v2`` does."""

    shards: str
    """What it reads, among the folders that the case makes."""
    epoch: Callable[[Job], Iterator[Views]]
    """Yields the batches of an epoch."""


def convert_for_litdata(files: list[Path], out: Path) -> None:
    """Write images in litdata's form."""
    from litdata import optimize

    optimize(
        fn=_sample,
        inputs=[str(path) for path in files],
        output_dir=str(out),
        chunk_bytes=1 << 25,
        num_workers=1,
        start_method="fork",
        verbose=False,
    )


def _sample(path: str) -> dict[str, Any]:
    return {"image": Path(path).read_bytes()}


def _by_litdata(job: Job) -> Iterator[Views]:
    """Yield the batches of an epoch, shuffled by litdata itself."""
    from botocore import UNSIGNED
    from botocore.config import Config
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # as it is, it would have https alone
    views, remote = _views_of(job.augment), "://" in job.shards

    class Images(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Views:
            return views(super().__getitem__(index)["image"])

    options = {  # the server asks nobody's name
        "endpoint_url": os.environ.get("AWS_ENDPOINT_URL"),
        "region_name": os.environ.get("AWS_REGION"),
        "config": Config(signature_version=UNSIGNED),
    }
    images = Images(
        job.shards,
        cache_dir=job.cache or None,
        shuffle=True,
        storage_options=options if remote else None,
    )
    yield from StreamingDataLoader(images, batch_size=job.batch, num_workers=job.workers)


def _by_webdataset(job: Job) -> Iterator[Views]:
    """Yield the batches of an epoch: shards and images shuffled, as its documentation has it."""
    import webdataset
    from torch.utils.data import DataLoader

    views = _views_of(job.augment)

    def decode(sample: dict[str, Any]) -> Views:
        return views(sample["jpg"])

    shards = webdataset.WebDataset(
        [f"{job.shards}/train-{number:04}.tar" for number in range(_SHARDS)],
        shardshuffle=_SHARDS,
        cache_dir=job.cache or None,
    )
    images = shards.shuffle(job.window).map(decode)
    yield from DataLoader(images, batch_size=job.batch, num_workers=job.workers)


def _views_of(augment: AugmentConfig) -> Callable[[bytes], Views]:
    """Return what makes both views of an encoded image."""
    from torchvision.io import ImageReadMode, decode_image

    twice = Twice(torchvision_view(augment))

    def views(data: bytes) -> Views:
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return twice(decode_image(encoded, mode=ImageReadMode.RGB))

    return views


STREAMING = {
    "webdataset": Streaming(
        title="webdataset",
        packages=("webdataset",),
        install="webdataset",
        differs="Reads whole shards one after the other, by curl; keeps whole shards; decodes and "
        "makes views by torchvision's transforms.v2.",
        shards="tars",
        epoch=_by_webdataset,
    ),
    "litdata": Streaming(
        title="litdata",
        packages=("litdata", "boto3"),
        install="litdata boto3",
        differs="Reads shards of its own form, of 32 MiB, whole, by boto3, and keeps them on disk "
        "in any case; decodes and makes views by torchvision's transforms.v2.",
        shards="litdata",
        epoch=_by_litdata,
    ),
}
"""The libraries, by name."""
