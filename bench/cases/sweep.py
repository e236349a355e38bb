"""Speed while one setting varies: workers, ranks, batch size, side of a view, JPEG quality,
prefetched batches, or the share of the GPU's JPEG engine."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from fastsiam.bench.bench_images import Images
from fastsiam.bench.cases.loader import build_views
from fastsiam.bench.cases.train import build_training
from fastsiam.bench.config import Over
from fastsiam.bench.measurements import Record, Row
from fastsiam.bench.runner import Loading, compare
from fastsiam.bench.session import Session
from fastsiam.config import DataConfig, Pipeline
from fastsiam.errors import DeviceError
from fastsiam.pipelines.backends import BACKENDS, BASELINE, CEILING


def measure(session: Session) -> list[Record]:
    """Measure the pipelines (for ranks: training on ready tensors) while one setting varies."""
    over, ranks = session.config.over, session.config.over == "ranks"
    values = session.config.values or _values(session, over)
    if ranks and session.gpu and max(values) > session.most_ranks:
        raise DeviceError(f"{max(values)} ranks need as many GPUs; there are {session.most_ranks}")
    batch = session.trained_batch if ranks else session.loaded_batch

    def row(pipeline: Pipeline, value: int) -> Row:
        images = None
        if ranks:
            config = session.train_config(batch, ranks=value)
            build = partial(
                build_training, config=replace(config, data=DataConfig(pipeline=CEILING))
            )
        else:
            images, loading = _images_and_loading(session, over, value, pipeline)
            build = partial(build_views, loading)
        return Row(
            case="sweep",
            name=f"{pipeline}, {over} {value}",
            build=build,
            ranks=value if ranks else 1,
            torchvision=f"{BASELINE}, {over} {value}",
            baseline=(f"{over} {values[0]}", f"{pipeline}, {over} {values[0]}"),
            pipeline=pipeline,
            facts={"over": over, "value": value},
            in_the_clock="training steps on ready tensors: forward, backward, all-reduce, optimizer"
            if ranks
            else "one epoch to finished views, from its first request to its last batch",
            config=session.settings(images, batch=batch, workers=session.workers) | {over: value},
        )

    pipelines = (CEILING,) if ranks else _pipelines(session, over)
    return compare(session, (row(one, value) for value in values for one in pipelines))


def _pipelines(session: Session, over: Over) -> list[Pipeline]:
    """Return the pipelines that the setting affects."""
    pipelines = names = list(session.config.pipeline_names)
    if over == "prefetch":
        pipelines = [name for name in names if BACKENDS[name].prefetches]
    if over == "jpeg-engine":
        pipelines = [name for name in names if session.gpu and BACKENDS[name].decodes_on_gpu]
    if not pipelines:
        device = "GPU" if session.gpu else "CPU"
        session.console.say(f"{over} does not affect {', '.join(names)} on a {device}")
    return pipelines


def _images_and_loading(
    session: Session, over: Over, value: int, pipeline: Pipeline
) -> tuple[Images, Loading]:
    """Return the images and what a pipeline loads for one value of the varied setting."""
    batch = value if over == "batch" else session.loaded_batch
    images = session.images(max(batch, session.loaded_batch))
    count = images.count // batch * batch
    if over == "quality":
        images = images.encode(value)
    loading = session.loading(images, pipeline)
    data_changes: dict[Over, dict[str, Any]] = {
        "workers": {"workers": value},
        "prefetch": {"prefetch": value},
        "jpeg-engine": {"dali_hw_decoder_load": value / 100},
    }
    data = replace(loading.data, **data_changes.get(over, {}))
    if over == "crop":
        loading = replace(loading, augment=loading.augment.changed(crop=value))
    return images, replace(loading, data=data, batch=batch, images=count)


def _values(session: Session, over: Over) -> list[int]:
    """Return default values that make sense on this machine."""
    crop = session.config.augment.crop
    largest = session.workers if over == "workers" else session.most_ranks
    counts = [2**i for i in range(16) if 2**i < largest] + [largest]
    return {
        "workers": counts,
        "ranks": counts,
        "batch": [64, 128, 256, 512] if session.gpu else [16, 64, 256],
        "crop": [crop // 2, crop * 3 // 4, crop],
        "quality": [50, 75, 90, 95],
        "prefetch": [1, 2, 3, 4],
        "jpeg-engine": [0, 65, 90, 100],
    }[over]
