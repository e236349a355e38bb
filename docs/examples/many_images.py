"""Write shards of many small images, to measure how long their conversion takes.

python docs/examples/many_images.py 1000000 shards

This writes 1,000,000 images in 100 WebDataset shards to shards/train: each image is NUMBER.jpg,
with one of 1,000 classes in NUMBER.cls. There are 2,000 different JPEGs (64 x 64 pixels, 1.6 kB on
average).
"""

import io
import sys
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 1000
EACH = 10_000


def main(images: int, out: str) -> None:
    """Write the shards."""
    generator = np.random.default_rng(0)
    jpegs = [jpeg(generator) for _ in range(2000)]
    folder = Path(out) / "train"
    folder.mkdir(parents=True, exist_ok=True)
    for first in range(0, images, EACH):
        with tarfile.open(folder / f"{first // EACH:05d}.tar", "w") as shard:
            for number in range(first, min(first + EACH, images)):
                add(shard, f"{number:07d}.jpg", jpegs[generator.integers(len(jpegs))])
                add(shard, f"{number:07d}.cls", str(number % CLASSES).encode())


def jpeg(generator: np.random.Generator) -> bytes:
    """Draw an image of coloured clouds."""
    coarse = generator.integers(0, 256, (6, 6, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((64, 64), Image.Resampling.BICUBIC).save(
        file, "JPEG", quality=90
    )
    return file.getvalue()


def add(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    """Append a file to a shard."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    shard.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
