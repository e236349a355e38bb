"""torchvision's decoder in threads, and our own kernels behind it: views are ours."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray

from fastsiam.bench.contestants.peers.job import Job, Opened, Views
from fastsiam.pipelines.geometric.cpu import Images, make_views
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
            pixels = Images.of_arrays(images)
            view1, view2, *_ = make_views(pixels, params, job.augment, torch.float32)
            yield view1, view2

    return Opened(metadata.version("torchvision"), epoch)
