"""What happens before the model: decoding, loading, the photometric stage, getting started."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastsiam.bench.config import Stored
from fastsiam.bench.contest import Contender, ContenderFailed, Contest, Work
from fastsiam.bench.images import Images
from fastsiam.bench.measure import Sample, Timing, children, cpu_seconds, forget
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session
from fastsiam.config import AugmentConfig, DataConfig, Pipeline
from fastsiam.pipelines import build_loader, open_store
from fastsiam.pipelines.store.beton import BetonStore
from fastsiam.views.batch import CropLoader
from fastsiam.views.draws import draw_views
from fastsiam.views.photometric import photometric as run_photometric
from fastsiam.views.photometric import reference

_DECODE = "decode"
_DALI = {"cpu": "DALI", "cuda": "DALI on the GPU"}
_ON_GPU = ("nvJPEG", "DALI on the GPU")


def loader(session: Session) -> list[Record]:
    """Measure each pipeline to uint8 crops and to finished views, and the bare decoding."""
    batch = session.loaded_batch
    images = session.images(batch)
    entered: dict[str, tuple[Pipeline, Stored]] = {}
    with session.contest() as contest:
        _enter_decoders(contest, session, images)
        for pipeline, form in _variants(session):
            settings: dict[str, Any] = {
                "data": data_of(session, images, pipeline, form),
                "augment": session.config.augment,
                "batch": batch,
                "images": images.count,
                "device": session.device,
            }
            name = pipeline if form == "original" else f"{pipeline}, {form}"
            builds = {name: build_loading}
            if pipeline == "torchvision":
                builds[f"{name}, without colours"] = build_plain_crops
            for entry, build in builds.items():
                if contest.enter(entry, build, **settings):
                    entered[entry] = pipeline, form
        timings = contest.run(session.config.repeats)
        contenders = dict(contest.contenders)
        facts = {turn: contest.facts(*turn) for turn in timings}
    torchvision = timings.get(("torchvision", "views"))
    records = _decode_records(session, images, timings)
    for name, (pipeline, form) in entered.items():
        for work in contenders[name].images:
            if (name, work) not in timings:
                continue
            one = record(
                "loader",
                f"{pipeline} {work}" + ("" if form == "original" else f", {form}"),
                timings[name, work],
                torchvision=torchvision,
                ceiling=_ceiling(session, pipeline, form, timings),
                pipeline=pipeline,
                gpu_bytes=contenders[name].gpu,
                facts={"what": work, "stored": form, **facts[name, work]},
                in_the_clock="one epoch, from its first request to its last batch on the device; "
                "not: opening the data, compiling, the first epoch",
                config=_settings(session, images, batch),
            )
            records.append(one)
    return records


def decode(session: Session) -> list[Record]:
    """Measure decoders on the bytes alone: the ceiling of a loader."""
    images = session.images(session.loaded_batch)
    with session.contest() as contest:
        _enter_decoders(contest, session, images)
        timings = contest.run(session.config.repeats)
    return _decode_records(session, images, timings)


def photometric(session: Session) -> list[Record]:
    """Measure the photometric stage beside its reference and beside touching the bytes once."""
    batch = session.loaded_batch
    with session.contest() as contest:
        contest.enter(
            "photometric",
            build_photometric,
            augment=session.config.augment,
            batch=batch,
            batches=20 if session.gpu else 2,
            device=session.device,
        )
        timings = contest.run(session.config.repeats)
    ceiling = timings.get(("photometric", "one pass over the bytes"))
    baseline = timings.get(("photometric", "reference, in torch operations"))
    return [
        record(
            "photometric",
            work,
            timing,
            baseline=("reference", baseline) if baseline else None,
            ceiling=("one pass", ceiling) if ceiling else None,
            in_the_clock="uint8 crops on the device to normalised float32 views (GPU: bfloat16)",
            config=session.settings(batch=batch),
        )
        for (_, work), timing in timings.items()
    ]


def startup(session: Session) -> list[Record]:
    """Measure, in new processes, the time to a first batch, and epochs; files cached or not."""
    batch = session.loaded_batch
    images = session.images(batch)
    records = []
    failed: set[Pipeline] = set()
    found: dict[tuple[Pipeline, str], list[tuple[Sample, dict[str, Any]]]] = {}
    for turn in range(session.config.repeats):
        session.console.say(f"startup: round {turn + 1} of {session.config.repeats}")
        for pipeline in session.config.pipeline_names:
            data = data_of(session, images, pipeline, "original")
            for state in ("warm", "cold"):
                if pipeline in failed:
                    continue
                files = [path for path in Path(data.data).rglob("*") if path.is_file()]
                kept = forget(files) if state == "cold" else 1.0
                began = time.monotonic()
                try:
                    contender = Contender(
                        build_startup,
                        {
                            "data": data,
                            "augment": session.config.augment,
                            "batch": batch,
                            "device": session.device,
                            "began": began,
                        },
                    )
                except ContenderFailed as failure:
                    failed.add(pipeline)
                    session.console.say(f"{pipeline}: not measured: {failure}")
                    continue
                facts = contender.facts("startup") | {"cached": kept}
                sample = replace(
                    contender.first["startup"],
                    wall=facts["first_epoch_over"],
                    cpu=facts.pop("cpu_until_then"),
                )
                contender.close()
                found.setdefault((pipeline, state), []).append((sample, facts))
    for (pipeline, state), runs in found.items():
        numbers = {key: statistics.median(facts[key] for _, facts in runs) for key in runs[0][1]}
        if state == "cold" and numbers["cached"] > 0.05:
            session.console.say(
                f"{pipeline}, cold: not measured: the system keeps {numbers['cached']:.0%} "
                "of the files in its cache"
            )
            continue
        records.append(
            record(
                "startup",
                f"{pipeline}, {state} cache",
                Timing([sample for sample, _ in runs], images.count),
                pipeline=pipeline,
                facts=numbers,
                in_the_clock="from the start of python to the end of the first epoch",
                config=_settings(session, images, batch),
            )
        )
    return records


def build_loading(
    *, data: DataConfig, augment: AugmentConfig, batch: int, images: int, device: str
) -> dict[str, Work]:
    """Build a pipeline; its work is an epoch, to "crops" and to "views"."""
    made = build_loader(data, augment, batch=batch, device=device)
    loader, steps, epochs = made, images // batch, count()
    if loader.steps != steps:
        raise RuntimeError(f"{loader.source} holds {loader.images:,} images, not {images:,}")

    def through(epoch: Callable[[int], Iterable[object]]) -> None:
        for _ in epoch(next(epochs)):
            pass
        started = len(children(os.getpid()))
        if data.pipeline == "torchvision" and started < data.workers:
            raise RuntimeError(f"{started} of {data.workers} workers started")

    def facts() -> dict[str, Any]:
        return {"workers": data.workers, "processes": 1 + len(children(os.getpid()))}

    work = {"views": Work(lambda: through(made.epoch), images, facts)}
    if isinstance(loader, CropLoader):
        crops = loader.crops
        work = {"crops": Work(lambda: through(crops), images, facts)} | work
    return work


def build_plain_crops(*, augment: AugmentConfig, **settings: Any) -> dict[str, Work]:
    """Build a pipeline that makes no uint8 crops; its crops are views without colours and blur."""
    plain = augment.changed(jitter_p=0.0, gray_p=0.0, blur_p=0.0)
    return {"crops": build_loading(augment=plain, **settings)["views"]}


def build_decoding(
    *, path: str, beton: str, workers: int, batch: int, device: str
) -> dict[str, Work]:
    """Decode the images of a folder with each decoder that is there and takes them all."""
    store = open_store(Path(path), "train")
    data = [bytes(store.read(i)) for i in range(len(store))]
    tensors = [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in data]
    pool = ThreadPoolExecutor(workers)
    torch.set_num_threads(1)

    def in_threads(one: Callable[[int, int], object]) -> Callable[[], object]:
        def stretch(worker: int) -> None:
            for index in range(worker, len(data), workers):
                one(worker, index)

        return lambda: list(pool.map(stretch, range(workers)))

    def by_torchvision(_: int, index: int) -> object:
        from torchvision.io import ImageReadMode, decode_image

        return decode_image(tensors[index], ImageReadMode.RGB)

    def by_turbo() -> Callable[[], object]:
        from fastsiam.pipelines.ffcv_decoder import Decompressor

        converted = BetonStore(Path(beton) / "train.beton")
        largest = int((converted.height.astype(int) * converted.width).max())
        own = [Decompressor(largest) for _ in range(workers)]

        def one(worker: int, index: int) -> None:
            if not own[worker].decode(converted, index):
                raise RuntimeError(f"libjpeg-turbo refuses image {index}")

        return in_threads(one)

    makers = {
        "PIL": lambda: in_threads(lambda _, index: store.decode(index)),
        "torchvision.io": lambda: in_threads(by_torchvision),
        "libjpeg-turbo": by_turbo,
    }
    if device == "cuda":
        makers |= {"nvJPEG": lambda: _by_nvjpeg(tensors, batch)}
    makers[_DALI[device]] = lambda: _by_dali(data, workers, device, batch)
    work = {}
    for name, make in makers.items():
        with contextlib.suppress(ImportError, RuntimeError):  # not there, or refuses one of them
            run = make()
            run()
            work[name] = Work(run, len(data))
    return work


def build_photometric(
    *, augment: AugmentConfig, batch: int, batches: int, device: str
) -> dict[str, Work]:
    """Take uint8 crops through the photometric stage, its reference, and a mere conversion."""
    crops = tuple(
        torch.randint(0, 256, (len(views), batch, side, side, 3), dtype=torch.uint8, device=device)
        for side, views in augment.by_side.items()
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes = np.full((batch, 2), 400)
    params = [
        draw_views(augment, seed=0, epoch=i, index=np.arange(batch), size=sizes)
        for i in range(batches)
    ]
    views = [torch.empty(own.shape, dtype=dtype, device=device) for own in crops]

    some = min(batch, 256 if device == "cuda" else 8)  # it is slow
    first, few = params[0].rows(slice(0, some)), tuple(own[:, :some] for own in crops)

    def touch() -> None:
        for target, own in zip(views, crops, strict=True):
            target.copy_(own)

    def times(one: Callable[[Any], object]) -> Work:
        return Work(lambda: [one(p) for p in params], batch * batches)

    return {
        "fastsiam": times(lambda p: run_photometric(crops, p, augment, dtype=dtype)),
        "reference, in torch operations": Work(
            lambda: reference.photometric(few, first, augment, dtype=dtype), some
        ),
        "one pass over the bytes": times(lambda _: touch()),
    }


def build_startup(
    *, data: DataConfig, augment: AugmentConfig, batch: int, device: str, began: float
) -> dict[str, Work]:
    """Load the first batch and two epochs, in a process that is as new as a user's."""
    facts: dict[str, Any] = {}

    def begin() -> None:
        facts["imports"] = time.monotonic() - began
        loader = build_loader(data, augment, batch=batch, device=device)
        for number in range(2):
            start = time.monotonic()
            for step, _ in enumerate(loader.epoch(number)):
                if number == step == 0:
                    _finish(device)
                    facts["first_batch"] = time.monotonic() - began
            _finish(device)
            facts["first_epoch" if number == 0 else "later_epoch"] = time.monotonic() - start
            facts.setdefault("first_epoch_over", time.monotonic() - began)
            facts.setdefault("cpu_until_then", cpu_seconds())
        loader.close()

    return {"startup": Work(begin, batch, lambda: facts)}


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _by_nvjpeg(tensors: list[torch.Tensor], batch: int) -> Callable[[], object]:
    from torchvision.io import decode_jpeg

    def run() -> None:
        for start in range(0, len(tensors), batch):
            decode_jpeg(tensors[start : start + batch], device="cuda")

    return run


def _by_dali(data: Sequence[bytes], workers: int, device: str, batch: int) -> Callable[[], object]:
    from nvidia.dali import Pipeline, fn, types

    images = [np.frombuffer(one, np.uint8) for one in data]
    batches = [images[i : i + batch] for i in range(0, len(images), batch)]
    turns = cycle(batches)
    # No batch is to be made ahead: that would happen outside of the clock.
    dali = Pipeline(
        batch, workers, 0 if device == "cuda" else None, exec_dynamic=True, prefetch_queue_depth=1
    )
    with dali:
        encoded = fn.external_source(lambda: next(turns), dtype=types.UINT8, ndim=1)
        decoder = "mixed" if device == "cuda" else "cpu"
        dali.set_outputs(fn.decoders.image(encoded, device=decoder))
    dali.build()

    def run() -> None:
        for _ in batches:
            dali.run()

    return run


def _variants(session: Session) -> list[tuple[Pipeline, Stored]]:
    """Return which pipelines are measured on which form of the images."""
    return [
        (pipeline, form)
        for pipeline in session.config.pipeline_names
        for form in (("original",) if pipeline == "torchvision" else session.config.forms)
    ]


def data_of(session: Session, images: Images, pipeline: Pipeline, form: Stored) -> DataConfig:
    """Return where a pipeline finds the images in some form."""
    path = images.folder
    if pipeline == "ffcv" or form != "original":
        path = images.stored(form)
    return DataConfig(data=str(path), pipeline=pipeline, workers=session.workers)


def _enter_decoders(contest: Contest, session: Session, images: Images) -> None:
    forms = [form for form in session.config.forms if not form.startswith("pixels")]
    for form in forms:
        beton = images.stored(form)
        contest.enter(
            f"{_DECODE}, {form}",
            build_decoding,
            path=str(images.folder if form == "original" else beton),
            beton=str(beton),
            workers=session.workers,
            batch=session.loaded_batch,
            device=session.device,
        )


def _decode_records(
    session: Session, images: Images, timings: dict[tuple[str, str], Timing]
) -> list[Record]:
    return [
        record(
            "decode",
            work if form == "original" else f"{work}, {form}",
            timing,
            facts={"stored": form},
            in_the_clock="encoded bytes in memory to pixels, in as many threads as workers",
            config=_settings(session, images, 0),
        )
        for (name, work), timing in timings.items()
        if name.startswith(_DECODE)
        for form in [name.partition(", ")[2]]
    ]


def _ceiling(
    session: Session, pipeline: str, form: str, timings: dict[tuple[str, str], Timing]
) -> tuple[str, Timing] | None:
    """Return the fastest decoder where a pipeline decodes; memory decodes nothing."""
    if pipeline == "memory":
        return None
    on_gpu = session.gpu and pipeline == "dali"
    found = [
        timing
        for (name, work), timing in timings.items()
        if name == f"{_DECODE}, {form}" and (work in _ON_GPU) == on_gpu
    ]
    return ("bare decoding", max(found, key=lambda timing: timing.rate)) if found else None


def _settings(session: Session, images: Images, batch: int) -> dict[str, Any]:
    return session.settings(batch=batch, workers=session.workers, data=images.about)
