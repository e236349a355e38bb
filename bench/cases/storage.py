"""Speed of epochs from the local disk and from object storage, by latency and cache state.

All pipelines and libraries make views on the CPU, also on a machine with a GPU.
"""

from __future__ import annotations

import gc
import os
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from fastsiam.bench import object_storage
from fastsiam.bench.bench_images import add_to_tar, writing_to
from fastsiam.bench.cases.peers import (
    Views,
    check_two_alike_views,
    slipstream_views,
    torchvision_views,
)
from fastsiam.bench.libraries import PEERS, Peer
from fastsiam.bench.measurements import Record, Row
from fastsiam.bench.runner import Loading, Task, compare
from fastsiam.bench.session import Session
from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.pipelines import ViewLoader
from fastsiam.pipelines.backends import BASELINE, ENGINE

_SHARDS = 16
"""Minimum number of tar files."""
_WINDOW = 1024
"""Size of the shuffle window in images."""
LOCAL = "local disk"


def measure(session: Session) -> list[Record]:
    """Measure pipelines and libraries from each place and in each cache state."""
    check_two_alike_views(session)
    session = replace(session, device="cpu")
    batch, folder = session.loaded_batch, session.folder / "storage"
    with ExitStack() as stack:
        images, readers = session.images(batch), _readers(session)
        files = sorted(path for path in images.folder.rglob("*") if path.is_file())
        with writing_to(folder):
            pack(files, folder / "shards" / "tars", shard_count(session.workers))
        for name in readers.keys() & _SAMPLES.keys():
            convert_for_litdata(files, folder / "shards" / name, _SAMPLES[name])
        places: dict[str, tuple[int, bool]] = {LOCAL: (0, False)}  # port, whether the cache is cold
        for latency in session.config.latencies:
            port = stack.enter_context(object_storage.serve(folder / "shards", latency / 1000))
            for state in ("cold", "warm"):
                places[f"S3, {latency} ms, {state} cache"] = port, state == "cold"

        def row(reader: str, place: str) -> Row:
            port, cold = places[place]
            form = reader if reader in _SAMPLES else "tars"
            bucket = f"{object_storage.BUCKET}/{form}"
            remote = f"http://127.0.0.1:{port}/" if reader == "webdataset" else "s3://"
            pipeline: Any = BASELINE if reader in STREAMING else reader
            cached = port or reader == "slipstream"  # slipstream always reads from its cache
            data = DataConfig(
                data=remote + bucket if port else f"{folder}/shards/{form}",
                pipeline=pipeline,
                workers=session.workers,
                shuffle=f"window:{_WINDOW}",
                cache=f"{folder}/caches/{reader}-{[*places].index(place)}" if cached else "",
                cache_gb=50.0,
            )
            variables = object_storage.environment(port) if port else {}
            variables |= {"XDG_CACHE_HOME": f"{folder}/home"}  # for the indexes of stores
            loading = replace(session.loading(images, BASELINE), data=data)
            return Row(
                case="storage",
                name=f"{readers[reader]}, {place}",
                build=partial(build_reading, reader, loading, cold=cold, environment=variables),
                ceiling=("the local disk", [f"{readers[reader]}, {LOCAL}"]),
                pipeline="" if reader in STREAMING else reader,
                in_the_clock="one epoch to finished views, of a loader that was opened just "
                "before; cold: its cache is empty then",
                config=session.settings(images, batch=batch, window=_WINDOW),
            )

        rows = [row(reader, place) for reader in readers for place in places]
        # The runners of several latencies would not fit into memory together.
        return compare(session, rows, apart=len(session.config.latencies) > 1)


def _readers(session: Session) -> dict[str, str]:
    """Return the titles of the pipelines and libraries to measure, by name."""
    pipelines = session.config.pipeline_names if session.config.pipelines else (BASELINE, ENGINE)
    readers: dict[str, str] = {name: f"fastsiam --pipeline {name}" for name in pipelines}
    return readers | {name: STREAMING[name].title for name in session.installed(STREAMING)}


def shard_count(workers: int) -> int:
    """Return the number of tar files, a multiple of the number of webdataset's workers."""
    return ceil(_SHARDS / workers) * workers


def pack(files: list[Path], folder: Path, shards: int = _SHARDS) -> None:
    """Pack files into WebDataset shards that mix their classes."""
    folder.mkdir(parents=True)
    classes = sorted({path.parent.name for path in files})
    for number in range(shards):
        with tarfile.open(folder / f"train-{number:04}.tar", "w") as tar:
            for index, path in enumerate(files[number::shards]):
                label = str(classes.index(path.parent.name)).encode()
                for suffix, data in (("jpg", path.read_bytes()), ("cls", label)):
                    add_to_tar(tar, f"{number:04}{index:06}.{suffix}", data)


def build_reading(
    reader: str, loading: Loading, *, cold: bool, environment: Mapping[str, str]
) -> Task:
    """Set up a pipeline or a library of ``STREAMING``; the task is an epoch of a new loader.

    If ``cold``, each epoch starts with an empty cache.
    """
    os.environ.update(environment)
    library, turns, cache = STREAMING.get(reader), count(), loading.data.cache
    batches: Any = ()

    def reopen() -> None:
        nonlocal batches
        if isinstance(batches, ViewLoader):
            batches.close()
        batches = ()
        gc.collect()  # litdata's loader, which refers to itself, ends its processes now
        folder = cache
        if cold:
            shutil.rmtree(cache, ignore_errors=True)
            folder = f"{cache}/{next(turns)}"
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
        data = replace(loading.data, cache=folder)
        batches = OPENERS.get(reader, _open_pipeline)(replace(loading, data=data))

    def run() -> None:
        images = sum(len(views[0]) for views in batches)
        if images < loading.images // loading.batch * loading.batch:
            raise RuntimeError(f"it yields {images:,} of {loading.images:,} images")

    facts = {"differs": library.differs, "version": library.version} if library else {}
    return Task(run, loading.images, lambda: facts, before=reopen)


def _open_pipeline(loading: Loading) -> ViewLoader:
    loader = ViewLoader(
        loading.data, loading.augment, batch=loading.batch, transform=lambda batch: batch.views
    )
    len(loader)  # opens it
    return loader


def convert_for_litdata(files: list[Path], out: Path, sample: Callable[[str], Any]) -> None:
    """Write images in litdata's format; ``sample`` returns what to store of a file."""
    from litdata import optimize

    optimize(
        fn=sample,
        inputs=[str(path) for path in files],
        output_dir=str(out),
        chunk_bytes=1 << 25,
        num_workers=1,
        start_method="fork",
        verbose=False,
    )


def _sample(path: str) -> dict[str, Any]:
    return {"image": Path(path).read_bytes()}


def _unnamed_sample(path: str) -> list[Any]:
    """litdata writes dicts of bytes as Arrow tables, which slipstream 0.4.0 cannot read."""
    return [Path(path).read_bytes()]


_SAMPLES: dict[str, Callable[[str], Any]] = {"litdata": _sample, "slipstream": _unnamed_sample}
"""Libraries that read litdata's format, and what they store of each file."""


def _litdata_options(loading: Loading) -> dict[str, Any] | None:
    """Return the options with which litdata reads from the local server; None for a folder."""
    if "://" not in loading.data.data:
        return None
    from botocore import UNSIGNED
    from botocore.config import Config
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # only https by default
    return {  # the server needs no credentials
        "endpoint_url": os.environ.get("AWS_ENDPOINT_URL"),
        "region_name": os.environ.get("AWS_REGION"),
        "config": Config(signature_version=UNSIGNED),
    }


def _open_litdata(loading: Loading) -> Iterable[Views]:
    """Return the batches of an epoch, shuffled by litdata."""
    from litdata import StreamingDataLoader, StreamingDataset

    views = _views_of(loading.augment)

    class Images(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Views:
            return views(super().__getitem__(index)["image"])

    images = Images(
        loading.data.data,
        cache_dir=loading.data.cache or None,
        shuffle=True,
        storage_options=_litdata_options(loading),
    )
    loader: Iterable[Views] = StreamingDataLoader(
        images, batch_size=loading.batch, num_workers=loading.workers, persistent_workers=True
    )
    return loader


def _open_slipstream(loading: Loading) -> Iterator[Views]:
    """Yield the batches of an epoch. An empty cache is filled first, within the clock."""
    views = slipstream_views(loading)
    from slipstream import SlipstreamDataset, SlipstreamLoader

    os.environ["SLIPSTREAM_CACHE_DIR"] = loading.data.cache
    images = SlipstreamDataset(
        remote_dir=loading.data.data,
        cache_dir=f"{loading.data.cache}/chunks",
        storage_options=_litdata_options(loading),
    )
    loader = SlipstreamLoader(
        images,
        batch_size=loading.batch,
        pipelines={"0": views},  # the only field of an unnamed sample
        device=loading.device,
        verbose=False,
    )
    for batch in loader:
        yield batch["view_0"], batch["view_1"]


def _open_webdataset(loading: Loading) -> Iterable[Views]:
    """Return the batches of an epoch, with shards and images shuffled as webdataset documents."""
    import webdataset

    views = _views_of(loading.augment)

    def decode(sample: dict[str, Any]) -> Views:
        return views(sample["jpg"])

    tars = [
        f"{loading.data.data}/train-{number:04}.tar"
        for number in range(shard_count(loading.workers))
    ]
    shards = webdataset.WebDataset(
        tars,
        shardshuffle=len(tars),
        cache_dir=loading.data.cache or None,
    )
    images = shards.shuffle(_WINDOW).map(decode)
    loader: DataLoader[Any] = DataLoader(
        images, batch_size=loading.batch, num_workers=loading.workers, persistent_workers=True
    )
    return loader


def _views_of(augment: AugmentConfig) -> Callable[[bytes], Views]:
    """Return a function that makes both views of an encoded image."""
    from torchvision.io import ImageReadMode, decode_image

    views = torchvision_views(augment)

    def views_of(data: bytes) -> Views:
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return views(decode_image(encoded, mode=ImageReadMode.RGB))

    return views_of


STREAMING = {
    "webdataset": Peer(
        title="webdataset",
        packages=("webdataset",),
        install="webdataset",
        differs="Reads whole shards in order, with curl, and caches whole shards. Decodes and "
        "makes views with torchvision's transforms.v2.",
    ),
    "litdata": Peer(
        title="litdata",
        packages=("litdata", "boto3"),
        install="litdata boto3",
        differs="Reads whole shards of 32 MiB in its own format, with obstore, and always keeps "
        "them on disk. Decodes and makes views with torchvision's transforms.v2.",
    ),
    "slipstream": replace(
        PEERS["slipstream"],
        packages=(*PEERS["slipstream"].packages, "boto3"),
        differs="Downloads all shards, in litdata's format and with litdata, and copies their "
        "images to a second file on disk before the first batch; later epochs only read that "
        f"file, also those from the local disk. {PEERS['slipstream'].differs}",
    ),
}
"""Libraries that stream shards, by name; all but slipstream make views with ``transforms.v2``."""
OPENERS: dict[str, Callable[[Loading], Iterable[Views]]] = {
    "webdataset": _open_webdataset,
    "litdata": _open_litdata,
    "slipstream": _open_slipstream,
}
"""Functions that return the batches of an epoch, for each of ``STREAMING``. Worker processes stay
after the epoch, so that the memory of a repeat includes theirs."""
