"""torchvision's decoder in threads, and our own kernels behind it: views are ours."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray

from fastsiam.bench.peers.job import Job, Opened, Views
from fastsiam.pipelines.cuts import cut_views
from fastsiam.pipelines.job import Images, run_in_threads, stages_of
from fastsiam.pipelines.job import Job as CropJob
from fastsiam.views.draws import draw_views


def start(job: Job) -> Opened:
    """Open threads that decode the next batch while our kernels are at this one."""
    from torchvision.datasets import ImageFolder
    from torchvision.io import ImageReadMode, decode_image, read_file

    files = [path for path, _ in ImageFolder(job.folder).samples]
    pool, epochs = ThreadPoolExecutor(job.workers), count()

    def decode(index: int) -> NDArray[np.uint8]:
        # Rows of pixels, as libjpeg-turbo wrote them: (3, H, W) is a view of these.
        image = decode_image(read_file(files[index]), ImageReadMode.RGB)
        pixels: NDArray[np.uint8] = image.permute(1, 2, 0).contiguous().numpy()
        return pixels

    def epoch() -> Iterator[Views]:
        number = next(epochs)
        chosen = np.random.default_rng(number).permutation(len(files))[: job.images]
        batches = chosen.reshape(job.steps, job.batch)
        decoding = pool.map(decode, batches[0].tolist())
        for step, index in enumerate(batches):
            images = list(decoding)
            if step + 1 < len(batches):
                decoding = pool.map(decode, batches[step + 1].tolist())
            size = np.array([image.shape[:2] for image in images])
            params = draw_views(job.augment, seed=0, epoch=number, index=index, size=size)
            (stage,) = stages_of(params, job.augment, torch.float32)
            cuts, sides = cut_views(params, job.augment), list(job.augment.by_side)
            run_in_threads(CropJob(Images.of_arrays(images), cuts, sides, None, [stage]))
            view1, view2 = stage.views().chunk(2)
            yield view1, view2

    return Opened(metadata.version("torchvision"), epoch)
