"""How fast epochs are from the local disk and from object storage, near and far, kept and not."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import torch

from fastsiam.bench import object_storage
from fastsiam.bench.cases.peers import Twice, Views, torchvision_view
from fastsiam.bench.contest import Work
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
            build, settings = (
                (build_reading, _reading) if name in pipelines else (build_streaming, _streaming)
            )
            for number, place in enumerate(places):
                cache = str(folder / "caches" / f"{name}-{number}") if place.port else ""
                entered[f"{title[name]}, {place.title}"] = name, place
                contest.enter(
                    f"{title[name]}, {place.title}",
                    build,
                    images=images.count,
                    environment=place.environment(folder),
                    cold=place.cold,
                    **settings(session, name, place, folder, cache),
                )
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


def _reading(
    session: Session, pipeline: Any, place: _Place, folder: Path, cache: str
) -> dict[str, Any]:
    """Return what ``build_reading`` is told of a pipeline, by its name."""
    data = DataConfig(
        data=place.address(folder, "tars"),
        pipeline=pipeline,
        workers=session.workers,
        shuffle=f"window:{_WINDOW}",
        cache=cache,
        cache_gb=_GIGABYTES,
    )
    return {"data": data, "augment": session.config.augment, "batch": session.loaded_batch}


def _streaming(
    session: Session, peer: str, place: _Place, folder: Path, cache: str
) -> dict[str, Any]:
    """Return what ``build_streaming`` is told of another library."""
    job = Job(
        shards=place.address(folder, STREAMING[peer].shards, http=peer == "webdataset"),
        count=_SHARDS,
        cache=cache,
        augment=session.config.augment,
        batch=session.loaded_batch,
        workers=session.workers,
        window=_WINDOW,
    )
    return {"peer": peer, "job": job}


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


def build_reading(
    *,
    data: DataConfig,
    augment: AugmentConfig,
    batch: int,
    images: int,
    environment: Mapping[str, str],
    cold: bool,
) -> dict[str, Work]:
    """Build a pipeline; its work is an epoch of "views".

    Args:
        data: its cache is emptied before each epoch if that is to be ``cold``.
        augment: ranges and probabilities.
        batch: images of a batch.
        images: of an epoch, whole batches.
        environment: variables by which the data are found.
        cold: whether nothing is kept from one epoch to the next.
    """
    os.environ.update(environment)
    opened: list[Loader] = []

    def open_anew() -> None:
        for loader in opened:
            loader.close()
        opened.clear()
        if cold and data.cache:
            shutil.rmtree(data.cache, ignore_errors=True)
        opened.append(build_loader(data, augment, batch=batch))
        if opened[0].steps != images // batch:
            raise RuntimeError(f"{opened[0].source} holds {opened[0].images:,} images")

    def run() -> None:
        if not opened:
            open_anew()
        for _ in opened[0].epoch(0):
            pass

    return {"views": Work(run, images, before=open_anew)}


def build_streaming(
    *, peer: str, job: Job, images: int, environment: Mapping[str, str], cold: bool
) -> dict[str, Work]:
    """Build another library's way to read the same images; its work is an epoch of "views".

    Args:
        peer: its name in ``STREAMING``.
        job: what it is to do; its cache is emptied before each epoch if that is to be ``cold``.
        images: of an epoch.
        environment: variables by which the data are found.
        cold: whether nothing is kept from one epoch to the next.
    """
    os.environ.update(environment)
    about = STREAMING[peer]
    own, turns = job, count()

    def open_anew() -> None:
        nonlocal own
        if cold and job.cache:
            shutil.rmtree(job.cache, ignore_errors=True)
            own = replace(job, cache=f"{job.cache}/{next(turns)}")
        if own.cache:
            Path(own.cache).mkdir(parents=True, exist_ok=True)

    def run() -> None:
        shown = sum(len(batch[0]) for batch in about.epoch(own))
        if shown < images // job.batch * job.batch:
            raise RuntimeError(f"it showed {shown:,} of {images:,} images")

    open_anew()
    facts = {"differs": about.differs, "version": about.version}
    return {"views": Work(run, images, lambda: facts, before=open_anew)}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a library that streams shards is to do."""

    shards: str
    """Folder or address of the shards, in the library's own form."""
    count: int
    """How many shards there are."""
    cache: str
    """Folder in which it keeps what it fetches; "" for none."""
    augment: AugmentConfig
    batch: int
    workers: int
    window: int
    """Images that are shuffled among each other."""


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
        [f"{job.shards}/train-{number:04}.tar" for number in range(job.count)],
        shardshuffle=job.count,
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
