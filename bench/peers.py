"""What other people use to make SimSiam's two views: measured on the same images as ours.

Each peer is written as its own documentation has it, with the paper's settings where it lets one
choose; what it does otherwise stands in ``differs``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from fastsiam.bench.contest import Work
from fastsiam.config import AugmentConfig, ViewConfig
from fastsiam.errors import FastSiamError
from fastsiam.pipelines.store.beton import BetonStore

Views = tuple[Tensor, Tensor]
"""Both views of a batch: (N, 3, S, S) float32, normalised. The next batch may overwrite them."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a peer is to do."""

    folder: str
    """Folder of class folders of JPEGs."""
    beton: str | None
    """The same images as a .beton file."""
    augment: AugmentConfig
    batch: int
    workers: int
    images: int
    """Images of an epoch: whole batches of them."""
    device: torch.device

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        return self.images // self.batch


@dataclass(frozen=True)
class Opened:
    """A peer at work."""

    version: str
    """Of its package."""
    epoch: Callable[[], Iterator[Views]]
    """Yields the batches of the next epoch."""


@dataclass(frozen=True)
class Peer:
    """One of them."""

    title: str
    """Its name in a table."""
    packages: tuple[str, ...]
    """Modules that it needs."""
    install: str
    """What pip has to install for them."""
    devices: tuple[str, ...]
    """Kinds of devices on which it finishes views."""
    differs: str
    """Where its work is not ours."""
    open: Callable[[Job], Opened]
    """Begins its work; imports its packages."""


def missing(name: str) -> str | None:
    """Say how to install a peer if its packages are not there."""
    peer = PEERS[name]
    return None if all(map(_is_there, peer.packages)) else f"pip install {peer.install}"


def build(
    *,
    peer: str,
    folder: str,
    beton: str | None,
    crop: int,
    batch: int,
    workers: int,
    images: int,
    device: str,
    blur: bool,
) -> dict[str, Work]:
    """Return a peer's work for a contest: an epoch each time.

    Args:
        peer: one of ``PEERS``.
        folder: class folders of JPEGs: ``images`` or more.
        beton: the same images in a .beton file, for ffcv-plain.
        crop: side of a view in pixels.
        batch: images of a batch.
        workers: processes or threads that load, at least 1.
        images: of an epoch; a multiple of ``batch``.
        device: where the views shall lie.
        blur: whether half of the views are blurred.

    Raises:
        FastSiamError: its packages are missing.
    """
    if reason := missing(peer):
        raise FastSiamError(f"{PEERS[peer].title} is not installed: {reason}")
    job = Job(
        folder=folder,
        beton=beton,
        augment=AugmentConfig.alike(crop=crop, blur_p=0.5 if blur else 0.0),
        batch=batch,
        workers=workers,
        images=images,
        device=torch.device(device),
    )
    opened = PEERS[peer].open(job)

    def run() -> None:
        for _ in opened.epoch():
            pass

    facts = {"differs": PEERS[peer].differs, "version": opened.version}
    return {"views": Work(run, images, lambda: facts)}


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False


@dataclass(frozen=True)
class _Twice:
    """Both views of an image by the same transformation."""

    view: Callable[[Any], Tensor]

    def __call__(self, image: Any) -> Views:
        return self.view(image), self.view(image)


def _load(
    job: Job,
    views: Callable[[Any], Any],
    *,
    read: Callable[[str], Any] | None = None,
    begin: Callable[[int], None] | None = None,
) -> Callable[[], Iterator[Views]]:
    """Return epochs of torch's DataLoader.

    Args:
        job: what to do.
        views: makes both views of an image, in a worker.
        read: decodes a file; default: PIL.
        begin: is called in each worker when it starts.
    """
    from torch.utils.data import DataLoader, RandomSampler
    from torchvision.datasets import ImageFolder
    from torchvision.datasets.folder import default_loader

    images = ImageFolder(job.folder, views, loader=read or default_loader)
    loader: DataLoader[Any] = DataLoader(
        images,
        batch_size=job.batch,
        sampler=RandomSampler(images, num_samples=job.images),  # shuffle=True, but for the length
        num_workers=job.workers,
        persistent_workers=True,
        drop_last=True,
        pin_memory=job.device.type == "cuda",
        worker_init_fn=begin,
    )

    def epoch() -> Iterator[Views]:
        for (view1, view2), _ in loader:
            yield (
                view1.to(job.device, non_blocking=True),
                view2.to(job.device, non_blocking=True),
            )

    return epoch


def _lightly(job: Job) -> Opened:
    from lightly.transforms.simsiam_transform import SimSiamTransform

    augment = job.augment
    views = SimSiamTransform(input_size=augment.crop, gaussian_blur=augment.views[0].blur_p)
    return Opened(metadata.version("lightly"), _load(job, views))


def _torchvision(job: Job) -> Opened:
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms import v2

    a = job.augment.views[0]
    blur = v2.GaussianBlur(_taps(a), (a.blur_sigma_min, a.blur_sigma_max))
    view = v2.Compose(
        [
            v2.RandomResizedCrop(a.crop, _scale(a), _ratio(a), antialias=True),
            v2.RandomApply(
                [v2.ColorJitter(a.brightness, a.contrast, a.saturation, a.hue)], p=a.jitter_p
            ),
            v2.RandomGrayscale(a.gray_p),
            v2.RandomApply([blur], p=a.blur_p),
            v2.RandomHorizontalFlip(a.flip_p),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(job.augment.mean, job.augment.std),
        ]
    )
    read = partial(decode_image, mode=ImageReadMode.RGB)
    return Opened(metadata.version("torchvision"), _load(job, _Twice(view), read=read))


@dataclass(frozen=True)
class _Albumentations:
    """Its transformation as a function of the image."""

    transform: Any

    def __call__(self, image: Any) -> Tensor:
        view: Tensor = self.transform(image=image)["image"]
        return view


def _begin_albumentations(_: int) -> None:
    """Give a worker threads and draws of its own: they inherit one generator, and draw the same."""
    import cv2
    from torch.utils.data import get_worker_info

    cv2.setNumThreads(0)
    info: Any = get_worker_info()
    info.dataset.transform.view.transform.set_random_seed(torch.initial_seed() % 2**32)


def _albumentations(job: Job) -> Opened:
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # it would ask the network for a newer one
    import albumentations as A
    import cv2

    a = job.augment.views[0]
    view = A.Compose(
        [
            A.RandomResizedCrop((a.crop, a.crop), _scale(a), _ratio(a)),
            A.ColorJitter(a.brightness, a.contrast, a.saturation, a.hue, p=a.jitter_p),
            A.ToGray(p=a.gray_p),
            A.GaussianBlur(0, (a.blur_sigma_min, a.blur_sigma_max), p=a.blur_p),
            A.HorizontalFlip(p=a.flip_p),
            A.Normalize(job.augment.mean, job.augment.std),
            A.ToTensorV2(),
        ]
    )

    read = partial(cv2.imread, flags=cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    views = _Twice(_Albumentations(view))
    return Opened(
        metadata.version("albumentations"),
        _load(job, views, read=read, begin=_begin_albumentations),
    )


def _kornia(job: Job) -> Opened:
    import kornia.augmentation as K
    from torchvision.transforms import v2

    a = job.augment.views[0]
    crop = v2.Compose([v2.RandomResizedCrop(a.crop, _scale(a), _ratio(a)), v2.PILToTensor()])
    taps, sigma = _taps(a), (a.blur_sigma_min, a.blur_sigma_max)
    finish = nn.Sequential(
        K.ColorJitter(a.brightness, a.contrast, a.saturation, a.hue, p=a.jitter_p),
        K.RandomGrayscale(p=a.gray_p),
        K.RandomGaussianBlur((taps, taps), sigma, p=a.blur_p),
        K.RandomHorizontalFlip(p=a.flip_p),
        K.Normalize(job.augment.mean, job.augment.std),
    )
    crops = _load(job, _Twice(crop))

    def epoch() -> Iterator[Views]:
        with torch.no_grad():
            for view1, view2 in crops():
                yield finish(view1.float() / 255), finish(view2.float() / 255)

    return Opened(metadata.version("kornia"), epoch)


_SOLO_LEARN_SCALE = (0.08, 1.0)
_SOLO_LEARN_TAPS = 23
_AHEAD = 2
"""Batches in the air: DALI's default."""


def _dali(job: Job) -> Opened:
    """Open solo-learn's pipeline for SimSiam (MIT), written anew from its settings.

    ``solo/data/dali_dataloader.py`` and ``scripts/pretrain/imagenet-100/simsiam.yaml`` with
    ``augmentations/symmetric_weak.yaml`` of github.com/vturrisi/solo-learn. Its iterator runs on
    into the next epoch, which here would be another contender's turn: so batches are asked for one
    by one, as many ahead.
    """
    from nvidia import dali
    from nvidia.dali import fn, types

    a, gpu = job.augment.views[0], job.device.type == "cuda"
    device = "gpu" if gpu else "cpu"

    def uniform(around: float, strength: float) -> Any:
        return fn.random.uniform(range=(around - strength, around + strength))

    def sometimes(p: float, changed: Any, image: Any) -> Any:
        coin = fn.cast(fn.random.coin_flip(probability=p), dtype=types.BOOL)
        return coin * changed + (coin ^ True) * image

    def view(image: Any) -> Any:
        image = fn.random_resized_crop(
            image,
            device=device,
            size=a.crop,
            random_area=_SOLO_LEARN_SCALE,
            interp_type=types.INTERP_CUBIC,
        )
        twisted = fn.color_twist(
            image,
            brightness=uniform(1, a.brightness),
            contrast=uniform(1, a.contrast),
            saturation=uniform(1, a.saturation),
            hue=uniform(0, 360 * a.hue),
        )
        image = sometimes(a.jitter_p, twisted, image)
        gray = fn.color_space_conversion(image, image_type=types.RGB, output_type=types.GRAY)
        image = sometimes(a.gray_p, fn.cat(gray, gray, gray, axis=2), image)
        if a.blur_p:
            sigma = fn.random.uniform(range=(a.blur_sigma_min, a.blur_sigma_max))
            blurred = fn.gaussian_blur(image, sigma=sigma, window_size=_SOLO_LEARN_TAPS)
            image = sometimes(a.blur_p, blurred, image)
        return fn.crop_mirror_normalize(
            image,
            mirror=fn.random.coin_flip(probability=a.flip_p),
            dtype=types.FLOAT,
            output_layout="CHW",
            mean=[255 * value for value in job.augment.mean],
            std=[255 * value for value in job.augment.std],
        )

    pipeline = dali.Pipeline(
        batch_size=job.batch,
        num_threads=job.workers,
        device_id=(job.device.index or 0) if gpu else None,
        seed=12,
        exec_dynamic=True,
        prefetch_queue_depth=1,  # each schedule_run starts one batch
    )
    with pipeline:
        encoded, _ = fn.readers.file(file_root=job.folder, shuffle_after_epoch=True)
        image = fn.decoders.image(encoded, device="mixed" if gpu else "cpu", output_type=types.RGB)
        pipeline.set_outputs(view(image), view(image))
    pipeline.build()

    def epoch() -> Iterator[Views]:
        for _ in range(min(_AHEAD, job.steps)):
            pipeline.schedule_run()
        for left in reversed(range(job.steps)):
            stream = torch.cuda.current_stream(job.device) if gpu else None
            view1, view2 = pipeline.outputs(cuda_stream=stream)
            if left >= _AHEAD:
                pipeline.schedule_run()
            yield from_dlpack(view1.as_tensor()), from_dlpack(view2.as_tensor())

    return Opened(dali.__version__, epoch)


def _ffcv(job: Job) -> Opened:
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

    assert job.beton is not None, "ffcv reads .beton files only"
    a, gpu = job.augment.views[0], job.device.type == "cuda"
    mean, std = 255 * np.array(job.augment.mean), 255 * np.array(job.augment.std)

    def view() -> list[Any]:
        # On a GPU its normalisation would need cupy, which it does not install.
        normalised = [] if gpu else [NormalizeImage(mean, std, np.float32)]
        there = [ToDevice(job.device)] if gpu else []
        return [
            RandomResizedCropRGBImageDecoder((a.crop, a.crop), _scale(a), _ratio(a)),
            RandomHorizontalFlip(a.flip_p),
            *normalised,
            ToTensor(),
            *there,
            ToTorchImage(),
        ]

    store = BetonStore(Path(job.beton))
    loader = Loader(
        job.beton,
        batch_size=job.batch,
        num_workers=job.workers,
        os_cache=True,
        order=OrderOption.RANDOM,
        indices=np.linspace(0, len(store) - 1, job.images).round().astype(np.int64),
        pipelines=dict.fromkeys(store.fields)
        | {store.image_field: view(), "second": PipelineSpec(store.image_field, transforms=view())},
    )
    on_device = [
        torch.tensor(values, dtype=torch.float32, device=job.device)[:, None, None]
        for values in (mean, std)
    ]

    def normalise(view: Tensor) -> Tensor:
        return view.float().sub_(on_device[0]).div_(on_device[1]) if gpu else view

    def epoch() -> Iterator[Views]:
        for view1, view2 in loader:
            yield normalise(view1), normalise(view2)

    return Opened(metadata.version("ffcv"), epoch)


def _scale(view: ViewConfig) -> tuple[float, float]:
    return view.scale_min, view.scale_max


def _ratio(view: ViewConfig) -> tuple[float, float]:
    return view.ratio_min, view.ratio_max


def _taps(view: ViewConfig) -> int:
    """Return how wide a blur's kernel has to be: three sigma to each side."""
    return 2 * ceil(3 * view.blur_sigma_max) + 1


_BOTH = ("cpu", "cuda")

PEERS = {
    "lightly": Peer(
        "lightly SimSiamTransform",
        ("lightly",),
        "lightly",
        _BOTH,
        "Nothing but the flip's place, before the colours; PIL and torchvision, decoded once.",
        _lightly,
    ),
    "torchvision-v2": Peer(
        "torchvision transforms.v2",
        ("torchvision",),
        "torchvision",
        _BOTH,
        "Works on uint8 tensors, decoded once; blurs by a Gaussian kernel of 13 x 13 pixels, not "
        "by PIL's boxes.",
        _torchvision,
    ),
    "albumentations": Peer(
        "albumentations",
        ("albumentations", "cv2"),
        "albumentations",
        _BOTH,
        "OpenCV, decoded once; resizes bilinearly without antialiasing; torchvision's jitter in "
        "random order, on 8 bits, hue in steps of 2 degrees; blurs by a Gaussian kernel of "
        "3.5 sigma to each side.",
        _albumentations,
    ),
    "kornia": Peer(
        "kornia",
        ("kornia",),
        "kornia",
        _BOTH,
        "Decoded once and cropped by PIL in worker processes, the rest in float32 on the device: "
        "torchvision's jitter, but one order for the whole batch and no rounding in between; blurs "
        "by a Gaussian kernel of 13 pixels, not by PIL's boxes.",
        _kornia,
    ),
    "dali-solo-learn": Peer(
        "DALI as in solo-learn",
        ("nvidia.dali",),
        "nvidia-dali-cuda120",
        _BOTH,
        "Crops from 0.08 of the area, resized by antialiased cubics, decoded once; jitter is one "
        "linear map (color_twist) in a fixed order, contrast about 128, hue in YIQ; blurs by a "
        "Gaussian kernel of 23 pixels; jitter, gray and blur are computed for every view and then "
        "chosen or not.",
        _dali,
    ),
    "ffcv-plain": Peer(
        "FFCV's own operations",
        ("ffcv",),
        "ffcv",
        _BOTH,
        "Crops, flips and normalises only: no jitter, gray or blur; decodes each image twice, once "
        "for each view, by libjpeg-turbo's fast DCT; resizes by area averages.",
        _ffcv,
    ),
}
"""All of them, by name."""
