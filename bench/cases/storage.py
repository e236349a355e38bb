"""How fast epochs are from the local disk and from object storage, near and far, cached and not."""

from __future__ import annotations

import os
import shutil
import tarfile
from contextlib import ExitStack
from pathlib import Path

from fastsiam.bench import object_storage
from fastsiam.bench.images import add_to_tar
from fastsiam.bench.records import Record, record
from fastsiam.bench.runner import Task
from fastsiam.bench.session import Session
from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.pipelines import build_loader
from fastsiam.pipelines.backends import BASELINE
from fastsiam.views.batch import Loader

_SHARDS = 16
_WINDOW = 1024
"""Images that are shuffled among each other."""
LOCAL = "local disk"


def measure(session: Session) -> list[Record]:
    """Measure each pipeline, one runner after the other, from each place and state of the cache."""
    images, batch = session.images(session.loaded_batch), session.loaded_batch
    folder = session.folder / "storage"
    pack(sorted(x for x in images.folder.rglob("*") if x.is_file()), folder / "shards")
    pipelines = session.config.pipeline_names if session.config.pipelines else (BASELINE,)
    added: dict[str, str] = {}
    with ExitStack() as held:
        port = held.enter_context(object_storage.served(folder / "server"))
        object_storage.upload(port, folder / "shards", "shards")
        places: dict[str, tuple[int, bool]] = {LOCAL: (0, False)}  # port, whether the cache is cold
        for latency in map(int, session.config.latencies.split(",")):
            proxy = held.enter_context(object_storage.delayed(port, latency / 1000))
            for state in ("cold", "warm"):
                places[f"S3, {latency} ms, {state} cache"] = proxy, state == "cold"
        comparison = held.enter_context(session.comparison(apart=True))
        for pipeline in pipelines:
            for number, (place, (proxy, cold)) in enumerate(places.items()):
                data = DataConfig(
                    data=f"s3://{object_storage.BUCKET}/shards" if proxy else f"{folder}/shards",
                    pipeline=pipeline,
                    workers=session.workers,
                    shuffle=f"window:{_WINDOW}",
                    cache=f"{folder}/caches/{pipeline}-{number}" if proxy else "",
                    cache_gb=50.0,
                )
                name = f"fastsiam --pipeline {pipeline}, {place}"
                added[name] = pipeline
                comparison.add(
                    name,
                    build_reading,
                    data=data,
                    cold=cold,
                    environment=(object_storage.environment(proxy) if proxy else {})
                    | {"XDG_CACHE_HOME": f"{folder}/home"},  # indexes that stores keep
                    augment=session.config.augment,
                    batch=batch,
                    images=images.count,
                )
        timings = comparison.run(session.config.repeats)
    records = []
    for (name, task), timing in timings.items():
        local = timings.get((f"fastsiam --pipeline {added[name]}, {LOCAL}", task))
        one = record(
            "storage",
            name,
            timing,
            ceiling=("its own from the local disk", local) if local else None,
            pipeline=added[name],
            in_the_clock="one epoch to finished views, of a loader that was opened just before; "
            "cold: its cache is empty then",
            config=session.settings(
                batch=batch, workers=session.workers, window=_WINDOW, data=images.about
            ),
        )
        records.append(one)
    return records


def pack(files: list[Path], folder: Path) -> None:
    """Write files as WebDataset shards, in an order that mixes their classes."""
    folder.mkdir(parents=True)
    classes = sorted({path.parent.name for path in files})
    for number in range(_SHARDS):
        with tarfile.open(folder / f"train-{number:04}.tar", "w") as tar:
            for place, path in enumerate(files[number::_SHARDS]):
                label = str(classes.index(path.parent.name)).encode()
                for ending, data in (("jpg", path.read_bytes()), ("cls", label)):
                    add_to_tar(tar, f"{number:04}{place:06}.{ending}", data)


def build_reading(
    *,
    data: DataConfig,
    cold: bool,
    environment: dict[str, str],
    augment: AugmentConfig,
    batch: int,
    images: int,
) -> dict[str, Task]:
    """Build a pipeline; its task is an epoch of a loader that was just opened.

    If ``cold``, the cache is emptied before each epoch.
    """
    os.environ.update(environment)
    opened: list[Loader] = []

    def reopen() -> None:
        for loader in opened:
            loader.close()
        opened.clear()
        if cold and data.cache:
            shutil.rmtree(data.cache, ignore_errors=True)
        opened.append(build_loader(data, augment, batch=batch))
        if opened[0].steps != images // batch:
            raise RuntimeError(f"{opened[0].source} holds {opened[0].images:,} images")

    def run() -> None:
        for _ in opened[0].epoch(0):
            pass

    return {"views": Task(run, images, before=reopen)}
