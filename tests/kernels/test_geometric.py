"""Compiled crops are bitwise equal to PIL's and touch no memory outside their arrays."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import PIL
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from fastsiam.kernels import library
from fastsiam.pipelines.cuts import Cuts, cut_centres
from fastsiam.pipelines.job import JPEG, PIXELS, Images, Job
from tests.kernels.decoders import DECODE, DecodedImage, job_of_jpeg
from tests.processes import Forked

Pixels = NDArray[np.uint8]
pytestmark = pytest.mark.skipif(
    int(PIL.__version__.split(".")[0]) < 13, reason="Pillow before 13 resizes in another order"
)


class Cut(NamedTuple):
    """One cut of ``Cuts``."""

    box: tuple[int, int, int, int]
    flip: bool
    resized: tuple[int, int]
    corner: tuple[int, int]

    @property
    def columns_first(self) -> bool:
        """Whether Pillow 13 resizes along columns first."""
        excess = [length - side for length, side in zip(self.box[2:], self.resized, strict=True)]
        return excess[0] > max(0, 2 * excess[1])


def crop_with_pil(image: Pixels, cut: Cut, side: int) -> Pixels:
    (top, left, tall, wide), (high, broad), (y, x) = cut.box, cut.resized, cut.corner
    picture = Image.fromarray(image[top : top + tall, left : left + wide])
    picture = picture.resize((broad, high), Image.Resampling.BILINEAR).crop(
        (x, y, x + side, y + side)
    )
    return np.asarray(picture)[:, :: -1 if cut.flip else 1]


def guarded_buffer(count: int, *, at_the_end: bool) -> Pixels:
    """Return a buffer directly after or before a page that must not be accessed."""
    page, system = mmap.PAGESIZE, ctypes.CDLL(None)
    pages = -(-count // page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (start, start + (pages + 1) * page):
        assert system.mprotect(ctypes.c_void_p(guard), page, 0) == 0
    first = (pages + 1) * page - count if at_the_end else page
    return np.frombuffer(memory, np.uint8, count, first)


def crop(image: Pixels, cut: Cut, side: int, *, part: bool = False) -> Pixels:
    """Crop an image, with source and destination buffers next to inaccessible pages.

    Args:
        image: (H, W, 3).
        cut: the crop.
        side: side of the crop in pixels.
        part: provide only the pixels of the box, as a decoder does.
    """
    top, left, tall, wide = cut.box
    there = image[top : top + tall, left : left + wide] if part else image
    source = guarded_buffer(there.size, at_the_end=True)
    source[:] = there.ravel()
    address = source.ctypes.data

    def decode(
        data: Any, count: int, height: int, width: int, box: Any, buffer: Any, to: Any
    ) -> int:
        assert box[:4] == [top, left, top + tall, left + wide]
        to[0] = DecodedImage(address, 3 * wide, top, left, address + source.size)
        return 0

    crops = torch.from_numpy(guarded_buffer(3 * side * side, at_the_end=cut.flip))
    crops = crops.view(1, 1, side, side, 3)
    images = Images.of_pixels(np.array([address]), np.array([image.shape[:2]]))
    images.form[:] = JPEG if part else PIXELS
    box, resized, corner = (np.array([[x]], np.int32) for x in (cut.box, cut.resized, cut.corner))
    cuts = Cuts(box, np.array([[cut.flip]]), resized, corner)
    compiled = DECODE(decode)
    Job(images, [cuts], (crops,), decode=library.address(compiled)).run()
    return crops[0, 0].numpy()


def noise(height: int, width: int, *, seed: int) -> Pixels:
    """Return a noise image. With odd seeds it is black and white, which shows rounding best."""
    random = np.random.default_rng(seed)
    image = random.integers(0, 256, (height, width, 3), np.uint8)
    return (image > 127) * np.uint8(255) if seed % 2 else image


def compare(image: Pixels, cut: Cut, side: int, *, part: bool = False) -> None:
    cropped = crop(image, cut, side, part=part)
    np.testing.assert_array_equal(cropped, crop_with_pil(image, cut, side), f"{cut}, {side}")


def full_image_cut(height: int, width: int, side: int, *, flip: bool = False) -> Cut:
    return Cut((0, 0, height, width), flip, (side, side), (0, 0))


def random_cut(random: np.random.Generator, height: int, width: int, side: int) -> Cut:
    """Return a random cut: boxes from one pixel to the entire image, also at every border."""

    def one_of(*values: int | np.integer[Any]) -> int:
        return int(values[random.integers(len(values))])

    high, broad = (one_of(1, n, random.integers(1, n + 1)) for n in (height, width))
    top = one_of(0, height - high, random.integers(0, height - high + 1))
    left = one_of(0, width - broad, random.integers(0, width - broad + 1))
    box, flip = (top, left, high, broad), bool(random.integers(2))
    if random.integers(3):
        return Cut(box, flip, (side, side), (0, 0))
    if random.integers(2):
        resize = int(random.integers(max(1, side // 3), 2 * side + 1))
        cuts = cut_centres(np.array([[high, broad]]), resize=resize, side=side)
        resized, corner = cuts.resized[0, 0].tolist(), cuts.corner[0, 0].tolist()
    else:
        resized = random.integers(1, 3 * side + 1, 2).tolist()
        corner = random.integers(-side, 3 * side, 2).tolist()
    return Cut(box, flip, tuple(resized), tuple(corner))


def compare_random_crops() -> None:
    seen = set()
    for seed in range(150):
        random = np.random.default_rng(seed)
        side = int(random.choice([1, 2, 7, 31, 32, 33, 96]))
        height, width = random.integers(1, random.choice([8, 60, 300]) + 1, 2).tolist()
        cut = random_cut(random, height, width, side)
        compare(noise(height, width, seed=seed), cut, side, part=seed % 3 == 0)
        seen.add((cut.columns_first, cut.flip))
    assert len(seen) == 4


def compare_all_tap_counts() -> None:
    """Cover both axes and both orders, from enlarging to shrinking a hundredfold."""
    side = 24
    lengths = [1, 2, 5, 23, 24, 25, 31, 36, 37, 47, 48, 60, 72, 90, 120, 170, 250, 400]
    for seed, length in enumerate(lengths):
        for height, width in [(length, length), (length, 20), (20, length), (2 * length, length)]:
            cut = full_image_cut(height, width, side, flip=bool(seed & 2))
            compare(noise(height, width, seed=seed), cut, side)
    for height, width in [(700, 5), (5, 700), (700, 700)]:
        compare(noise(height, width, seed=height), full_image_cut(height, width, 7), 7)


@pytest.mark.parametrize("kind", library.kinds())
@pytest.mark.parametrize("work", [compare_random_crops, compare_all_tap_counts])
def test_crops_equal_pil(work: Callable[[], None], kind: str) -> None:
    """The work is in a separate process, because an access outside the buffers kills it."""
    result = Forked(work, environment={library.CHOICE: kind}).wait()
    assert result.returncode == 0, result.stderr


def test_decompression_bomb_is_rejected_without_decoding() -> None:
    calls: list[Any] = []
    decode = DECODE(lambda *arguments: calls.append(arguments) or 1)  # type: ignore[func-returns-value]
    assert 2 * (Image.MAX_IMAGE_PIXELS or 0) < 13500**2
    job = job_of_jpeg(13500, 13500, decode)
    job.run()
    assert job.rejected_rows().tolist() == [0] and not calls


def test_invalid_box_raises() -> None:
    for box in [
        (-1, 0, 2, 2), (0, -1, 2, 2), (4, 0, 2, 5), (0, 4, 5, 2), (0, 0, 0, 1), (0, 0, 1, 0)
    ]:  # fmt: skip
        with pytest.raises(ValueError, match="is not inside its image of 5 x 5"):
            crop(noise(5, 5, seed=0), Cut(box, False, (2, 2), (0, 0)), 2)
