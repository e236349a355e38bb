"""Read and write .beton files with FFCV only. It needs its own process: it may hang or crash."""

from __future__ import annotations

import numpy as np


def write(pixels: str, path: str, mode: str) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    images = list(np.load(pixels).values())
    samples = [(image, number % 3) for number, image in enumerate(images)]
    fields = {"image": RGBImageField(write_mode=mode), "label": IntField()}
    DatasetWriter(path, fields, num_workers=1).from_indexed_dataset(samples)


def crops(path: str, os_cache: bool) -> dict[str, object]:
    """Return the labels, the crops' shape and means, and which crops are gray."""
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption

    loader = Loader(
        path,
        batch_size=4,
        num_workers=1,
        order=OrderOption.SEQUENTIAL,
        os_cache=os_cache,
        drop_last=False,
        pipelines={
            # Crop the entire image, so that the pixels can be compared.
            "image": [RandomResizedCropRGBImageDecoder((16, 16), scale=(1, 1), ratio=(1, 1))],
            "label": [IntDecoder()],
        },
    )
    crop_batches, labels = [], []
    for image, label in loader:
        crop_batches.append(np.array(image))
        labels += np.array(label)[:, 0].tolist()
    joined = np.concatenate(crop_batches)
    means = joined.reshape(len(joined), -1).mean(1).tolist()
    gray = (joined == joined[..., :1]).all((1, 2, 3)).tolist()
    return {"labels": labels, "crops": joined.shape, "means": means, "gray": gray}
