"""solo-learn's DALI pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from fastsiam.bench.peers.job import Job, Opened, Views

_SOLO_LEARN_SCALE = (0.08, 1.0)
_SOLO_LEARN_TAPS = 23
_AHEAD = 2
"""Batches in the air: DALI's default."""


def start(job: Job) -> Opened:
    """Open solo-learn's pipeline for SimSiam (MIT), written anew from its settings.

    ``solo/data/dali_dataloader.py`` and ``scripts/pretrain/imagenet-100/simsiam.yaml`` with
    ``augmentations/symmetric_weak.yaml`` of github.com/vturrisi/solo-learn. Its iterator runs on
    into the next epoch, which here would be another contender's turn, so batches are asked for one
    by one, as many ahead as it would make.
    """
    from nvidia import dali
    from nvidia.dali import fn, types

    gpu = job.device.type == "cuda"
    device = "gpu" if gpu else "cpu"

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
        pipeline.set_outputs(*(_view(job, image, device=device) for _ in range(2)))
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


def _view(job: Job, image: Any, *, device: str) -> Any:
    """Make one view of decoded images: crop, jitter, gray, blur, flip, normalise."""
    from nvidia.dali import fn, types

    a = job.augment.views[0]
    image = fn.random_resized_crop(
        image,
        device=device,
        size=a.crop,
        random_area=_SOLO_LEARN_SCALE,
        interp_type=types.INTERP_CUBIC,
    )
    twisted = fn.color_twist(
        image,
        brightness=_uniform(1, a.brightness),
        contrast=_uniform(1, a.contrast),
        saturation=_uniform(1, a.saturation),
        hue=_uniform(0, 360 * a.hue),
    )
    image = _sometimes(a.jitter_p, twisted, image)
    gray = fn.color_space_conversion(image, image_type=types.RGB, output_type=types.GRAY)
    image = _sometimes(a.gray_p, fn.cat(gray, gray, gray, axis=2), image)
    if a.blur_p:
        sigma = fn.random.uniform(range=(a.blur_sigma_min, a.blur_sigma_max))
        blurred = fn.gaussian_blur(image, sigma=sigma, window_size=_SOLO_LEARN_TAPS)
        image = _sometimes(a.blur_p, blurred, image)
    return fn.crop_mirror_normalize(
        image,
        mirror=fn.random.coin_flip(probability=a.flip_p),
        dtype=types.FLOAT,
        output_layout="CHW",
        mean=[255 * value for value in job.augment.mean],
        std=[255 * value for value in job.augment.std],
    )


def _uniform(around: float, strength: float) -> Any:
    """Draw a number for each image."""
    from nvidia.dali import fn

    return fn.random.uniform(range=(around - strength, around + strength))


def _sometimes(p: float, changed: Any, image: Any) -> Any:
    """Choose the changed images with a probability; both are computed."""
    from nvidia.dali import fn, types

    coin = fn.cast(fn.random.coin_flip(probability=p), dtype=types.BOOL)
    return coin * changed + (coin ^ True) * image
