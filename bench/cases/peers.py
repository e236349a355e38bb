"""Speed at which other libraries and fastsiam's pipelines make two views of the same images.

Each library is set up as in its documentation, with the paper's settings where it supports them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, default_collate, get_worker_info
from torch.utils.dlpack import from_dlpack

from fastsiam.bench.cases.loader import build_views
from fastsiam.bench.libraries import PEERS
from fastsiam.bench.measurements import Record, Row
from fastsiam.bench.runner import Build, Loading, Task, compare
from fastsiam.bench.session import Session
from fastsiam.config import AugmentConfig, ViewConfig
from fastsiam.errors import BackendError, FastSiamError
from fastsiam.pipelines.backends import BASELINE
from fastsiam.pipelines.store.beton import BetonStore

Views = tuple[Tensor, Tensor]
"""Both views of a batch: (N, 3, S, S) float32, normalised. The next batch may overwrite them."""
Epoch = Callable[[], Iterator[Views]]
"""Yields the batches of the next epoch."""

_SOLO_LEARN_SCALE = (0.08, 1.0)
_SOLO_LEARN_TAPS = 23
_SLIPSTREAM_BLUR_P = 0.5
_DALI_AHEAD = 2
"""Batches that DALI prefetches by default."""


def check_two_alike_views(session: Session) -> None:
    """Check that the recipe makes two views with the same settings, like the other libraries here.

    Raises:
        FastSiamError: the recipe makes other views.
    """
    views = session.config.augment.views
    if len(views) != 2 or views[0] != views[1]:
        raise FastSiamError(
            f"--recipe {session.config.recipe} does not make two views with the same settings, "
            "as the other libraries here do: choose another, such as imagenet or cifar10"
        )


def measure(session: Session) -> list[Record]:
    """Measure the libraries and fastsiam's pipelines in one run, interleaved."""
    check_two_alike_views(session)
    batch = session.loaded_batch
    images = session.images(batch)
    baseline = f"fastsiam --pipeline {BASELINE}"

    def row(name: str, build: Build, pipeline: str = "") -> Row:
        return Row(
            case="peers",
            name=name,
            build=build,
            torchvision=baseline,
            pipeline=pipeline,
            in_the_clock="one epoch to finished views, normalised, on the device",
            config=session.settings(images, batch=batch),
        )

    rows = [
        row(f"fastsiam --pipeline {one}", partial(build_views, session.loading(images, one)), one)
        for one in session.config.pipeline_names
    ]
    for peer in session.installed({name: PEERS[name] for name in session.config.names("peers")}):
        loading = session.loading(images, "ffcv" if peer == "ffcv-plain" else BASELINE)
        rows.append(row(PEERS[peer].title, partial(build_peer, peer, loading)))
    return compare(session, rows)


def build_peer(peer: str, loading: Loading) -> Task:
    """Set up another library, by its name in ``PEERS``; the task is an epoch.

    It reads class folders of JPEGs; FFCV reads a folder with train.beton.
    """
    epoch = STARTERS[peer](loading)

    def run() -> None:
        for _ in epoch():
            pass

    facts = {"differs": PEERS[peer].differs, "version": PEERS[peer].version}
    return Task(run, loading.images, lambda: facts)


def torchvision_views(augment: AugmentConfig) -> Callable[[Any], Views]:
    """Return a function that makes both views of a uint8 image tensor with ``transforms.v2``."""
    from torchvision.transforms import v2

    a = augment.views[0]
    taps = 2 * ceil(3 * a.blur_sigma_max) + 1  # kernel size: three sigma to each side
    jitter = v2.ColorJitter(a.brightness, a.contrast, a.saturation, a.hue)
    blur = v2.GaussianBlur(taps, (a.blur_sigma_min, a.blur_sigma_max))
    view = v2.Compose(
        [
            v2.RandomResizedCrop(a.crop, *_crop_ranges(a), antialias=True),
            v2.RandomApply([jitter], p=a.jitter_p),
            v2.RandomGrayscale(a.gray_p),
            v2.RandomApply([blur], p=a.blur_p),
            v2.RandomHorizontalFlip(a.flip_p),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(augment.mean, augment.std),
        ]
    )
    return partial(_both_views, view)


def _both_views(view: Callable[[Any], Tensor], image: Any) -> Views:
    return view(image), view(image)


def _by_lightly(loading: Loading) -> Epoch:
    from fastsiam.bench.lightly_methods import transform_of

    return _by_dataloader(loading, transform_of("simsiam", loading.augment))


def _by_torchvision(loading: Loading) -> Epoch:
    from torchvision.io import ImageReadMode, decode_image

    read_image = partial(decode_image, mode=ImageReadMode.RGB)
    return _by_dataloader(loading, torchvision_views(loading.augment), read_image=read_image)


def _by_spdl(loading: Loading) -> Epoch:
    """SPDL's pipeline with one thread per worker; FFmpeg decodes."""
    from spdl.io import get_video_filter_desc, load_image, to_torch
    from spdl.pipeline import PipelineBuilder
    from torchvision.datasets import ImageFolder

    torch.set_num_threads(1)  # as in a DataLoader's workers: one per pipeline thread
    files = [path for path, _ in ImageFolder(loading.data.data).samples]
    views, as_rgb = torchvision_views(loading.augment), get_video_filter_desc(pix_fmt="rgb24")

    def views_of(path: str) -> Views:
        return views(to_torch(load_image(path, filter_desc=as_rgb)).permute(2, 0, 1))

    def epoch() -> Iterator[Views]:
        indices = torch.randperm(len(files))[: loading.images].tolist()
        pipeline = (
            PipelineBuilder()
            .add_source([files[index] for index in indices])
            .pipe(views_of, concurrency=loading.workers)
            .aggregate(loading.batch, drop_last=True)
            .pipe(default_collate)
            .add_sink(2)
            .build(num_threads=loading.workers)
        )
        with pipeline.auto_stop():
            for view1, view2 in pipeline:
                yield (
                    view1.to(loading.device, non_blocking=True),
                    view2.to(loading.device, non_blocking=True),
                )

    return epoch


def _by_albumentations(loading: Loading) -> Epoch:
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # it would look for a newer version online
    import albumentations as A
    import cv2

    a = loading.augment.views[0]
    view = A.Compose(
        [
            A.RandomResizedCrop((a.crop, a.crop), *_crop_ranges(a)),
            A.ColorJitter(a.brightness, a.contrast, a.saturation, a.hue, p=a.jitter_p),
            A.ToGray(p=a.gray_p),
            A.GaussianBlur(0, (a.blur_sigma_min, a.blur_sigma_max), p=a.blur_p),
            A.HorizontalFlip(p=a.flip_p),
            A.Normalize(loading.augment.mean, loading.augment.std),
            A.ToTensorV2(),
        ]
    )
    read_image = partial(cv2.imread, flags=cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    views = partial(_both_views, partial(_apply_albumentations, view))
    return _by_dataloader(loading, views, read_image=read_image, init_worker=_seed_albumentations)


def _apply_albumentations(transform: Any, image: Any) -> Any:
    return transform(image=image)["image"]


def _seed_albumentations(_: int) -> None:
    """Seed a worker's generator: all workers inherit the same one and would draw the same."""
    import cv2

    cv2.setNumThreads(0)
    info: Any = get_worker_info()
    info.dataset.transform.args[0].args[0].set_random_seed(torch.initial_seed() % 2**32)


def _by_dali_as_in_solo_learn(loading: Loading) -> Epoch:
    """solo-learn's pipeline for SimSiam (MIT), rewritten from its settings.

    Source: ``solo/data/dali_dataloader.py`` and ``scripts/pretrain/imagenet-100/simsiam.yaml`` with
    ``augmentations/symmetric_weak.yaml`` of github.com/vturrisi/solo-learn. Its iterator would
    prefetch the next epoch during another runner's turn, so batches are scheduled one by one, as
    many ahead as the iterator would.
    """
    from nvidia import dali
    from nvidia.dali import fn, types

    gpu = loading.device == "cuda"
    pipeline = dali.Pipeline(
        batch_size=loading.batch,
        num_threads=loading.workers,
        device_id=0 if gpu else None,
        seed=12,
        exec_dynamic=True,
        prefetch_queue_depth=1,  # each schedule_run starts one batch
    )
    with pipeline:
        encoded, _ = fn.readers.file(file_root=loading.data.data, shuffle_after_epoch=True)
        image = fn.decoders.image(encoded, device="mixed" if gpu else "cpu", output_type=types.RGB)
        pipeline.set_outputs(*(_solo_learn_view(loading, image) for _ in range(2)))
    pipeline.build()
    steps = loading.images // loading.batch

    def epoch() -> Iterator[Views]:
        for _ in range(min(_DALI_AHEAD, steps)):
            pipeline.schedule_run()
        for left in reversed(range(steps)):
            stream = torch.cuda.current_stream(loading.device) if gpu else None
            view1, view2 = pipeline.outputs(cuda_stream=stream)
            if left >= _DALI_AHEAD:
                pipeline.schedule_run()
            yield from_dlpack(view1.as_tensor()), from_dlpack(view2.as_tensor())

    return epoch


def _solo_learn_view(loading: Loading, image: Any) -> Any:
    """Make one view of decoded images: crop, jitter, gray, blur, flip, normalise."""
    from nvidia.dali import fn, types

    def uniform(centre: float, strength: float) -> Any:
        return fn.random.uniform(range=(centre - strength, centre + strength))

    def with_probability(p: float, modified: Any, image: Any) -> Any:
        coin = fn.cast(fn.random.coin_flip(probability=p), dtype=types.BOOL)
        return coin * modified + (coin ^ True) * image

    a = loading.augment.views[0]
    image = fn.random_resized_crop(
        image,
        device="gpu" if loading.device == "cuda" else "cpu",
        size=a.crop,
        random_area=_SOLO_LEARN_SCALE,
        interp_type=types.INTERP_CUBIC,
    )
    jittered = fn.color_twist(
        image,
        brightness=uniform(1, a.brightness),
        contrast=uniform(1, a.contrast),
        saturation=uniform(1, a.saturation),
        hue=uniform(0, 360 * a.hue),
    )
    image = with_probability(a.jitter_p, jittered, image)
    gray = fn.color_space_conversion(image, image_type=types.RGB, output_type=types.GRAY)
    image = with_probability(a.gray_p, fn.cat(gray, gray, gray, axis=2), image)
    if a.blur_p:
        sigma = fn.random.uniform(range=(a.blur_sigma_min, a.blur_sigma_max))
        blurred = fn.gaussian_blur(image, sigma=sigma, window_size=_SOLO_LEARN_TAPS)
        image = with_probability(a.blur_p, blurred, image)
    return fn.crop_mirror_normalize(
        image,
        mirror=fn.random.coin_flip(probability=a.flip_p),
        dtype=types.FLOAT,
        output_layout="CHW",
        mean=[255 * value for value in loading.augment.mean],
        std=[255 * value for value in loading.augment.std],
    )


def slipstream_views(loading: Loading) -> list[Any]:
    """Return slipstream's preset for SimCLR's two views, with the crop ranges of the settings.

    Raises:
        BackendError: the settings and the preset blur different shares of the views.
    """
    a = loading.augment.views[0]
    if a.blur_p != _SLIPSTREAM_BLUR_P:
        raise BackendError(
            f"its preset blurs {_SLIPSTREAM_BLUR_P:.0%} of the views, the recipe {a.blur_p:.0%}"
        )
    from slipstream.decoders.numba_decoder import Compiler
    from slipstream.pipelines import simclr

    Compiler.set_num_threads(min(loading.workers, len(os.sched_getaffinity(0))))
    fields = simclr(a.crop, *_crop_ranges(a), device=loading.device, dtype=torch.float32)
    views: list[Any] = fields["image"]
    return views


def _by_slipstream(loading: Loading) -> Epoch:
    views = slipstream_views(loading)
    from slipstream import SlipstreamLoader
    from slipstream.readers import SlipstreamImageFolder

    cache = tempfile.TemporaryDirectory()  # it copies the images' bytes into one file
    images = SlipstreamImageFolder(loading.data.data, cache_dir=Path(cache.name))
    loader = SlipstreamLoader(
        images,
        batch_size=loading.batch,
        indices=np.linspace(0, len(images) - 1, loading.images).round().astype(np.int64),
        pipelines={"image": views},
        device=loading.device,
        exclude_fields=["path"],
        verbose=False,
    )

    def epoch(_: Any = cache) -> Iterator[Views]:  # keeps the file while this exists
        for batch in loader:
            yield batch["view_0"], batch["view_1"]

    return epoch


def _by_ffcv_alone(loading: Loading) -> Epoch:
    """FFCV with only its own operations: two pipelines for the same field."""
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.pipeline.pipeline_spec import PipelineSpec
    from ffcv.transforms import (
        NormalizeImage,
        RandomHorizontalFlip,
        ToDevice,
        ToTensor,
        ToTorchImage,
    )

    a, gpu = loading.augment.views[0], loading.device == "cuda"
    mean, std = 255 * np.array(loading.augment.mean), 255 * np.array(loading.augment.std)

    def view() -> list[Any]:
        crop = RandomResizedCropRGBImageDecoder((a.crop, a.crop), *_crop_ranges(a))
        flip, device = RandomHorizontalFlip(a.flip_p), torch.device(loading.device)
        if gpu:  # FFCV's normalisation needs cupy, which is not installed with FFCV
            return [crop, flip, ToTensor(), ToDevice(device), ToTorchImage()]
        return [crop, flip, NormalizeImage(mean, std, np.float32), ToTensor(), ToTorchImage()]

    beton = Path(loading.data.data) / "train.beton"
    store = BetonStore(beton)
    loader = Loader(
        str(beton),
        batch_size=loading.batch,
        num_workers=loading.workers,
        os_cache=True,
        order=OrderOption.RANDOM,
        indices=np.linspace(0, len(store) - 1, loading.images).round().astype(np.int64),
        pipelines=dict.fromkeys(store.fields)
        | {store.image_field: view(), "second": PipelineSpec(store.image_field, transforms=view())},
    )
    shift, scale = (
        torch.tensor(values, dtype=torch.float32, device=loading.device)[:, None, None]
        for values in (mean, std)
    )

    def normalise(view: Tensor) -> Tensor:
        return view.float().sub_(shift).div_(scale) if gpu else view

    def epoch() -> Iterator[Views]:
        for view1, view2 in loader:
            yield normalise(view1), normalise(view2)

    return epoch


STARTERS: dict[str, Callable[[Loading], Epoch]] = {
    "lightly": _by_lightly,
    "torchvision-v2": _by_torchvision,
    "spdl": _by_spdl,
    "albumentations": _by_albumentations,
    "dali-solo-learn": _by_dali_as_in_solo_learn,
    "slipstream": _by_slipstream,
    "ffcv-plain": _by_ffcv_alone,
}
"""Functions that set up each of ``PEERS``."""


def _by_dataloader(
    loading: Loading,
    views: Callable[[Any], Any],
    *,
    read_image: Callable[[str], Any] | None = None,
    init_worker: Callable[[int], None] | None = None,
) -> Epoch:
    """Return epochs of a torch ``DataLoader`` that reads images, by default with PIL."""
    from torchvision.datasets import ImageFolder
    from torchvision.datasets.folder import default_loader

    device = loading.device
    images = ImageFolder(loading.data.data, views, loader=read_image or default_loader)
    loader: DataLoader[Any] = DataLoader(
        images,
        batch_size=loading.batch,
        sampler=RandomSampler(images, num_samples=loading.images),  # shuffled, of this length
        num_workers=loading.workers,
        persistent_workers=True,
        drop_last=True,
        pin_memory=device == "cuda",
        worker_init_fn=init_worker,
    )

    def epoch() -> Iterator[Views]:
        for (view1, view2), _ in loader:
            yield view1.to(device, non_blocking=True), view2.to(device, non_blocking=True)

    return epoch


def _crop_ranges(view: ViewConfig) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the ranges of a crop's area and of its width / height."""
    return (view.scale_min, view.scale_max), (view.ratio_min, view.ratio_max)
