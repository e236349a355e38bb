"""Images that DALI cannot decode, or nobody can: what is theirs is said, and all others come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastsiam.errors import DataError
from fastsiam.pipelines import (
    Order,
    open_store,
)
from tests.pipelines.cases import build, equal
from tests.pipelines.dali_cases import Loaders, gaps
from tests.processes import Forked
from tests.sources import encoded

pytestmark = pytest.mark.dali


def without_end(data: bytes) -> bytes:
    return data[:-20]


def of_noise(data: bytes) -> bytes:
    return np.random.default_rng(0).bytes(len(data))


DAMAGES: list[Callable[[bytes], bytes]] = [
    without_end,
    of_noise,
    lambda data: data[:200],
    lambda data: data[:-2],
    lambda _: b"",
]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_broken_image_ends_the_epoch_at_its_step_and_is_named(
    damage: Callable[[bytes], bytes], prefetch: int, images: Path, loaders: Loaders
) -> None:
    path = images / "train" / "class1" / "003.jpg"
    loader = loaders(images / "train", batch=4, prefetch=prefetch)
    expected = list(loader.epoch(0))
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    got = []
    with pytest.raises(DataError, match=r"cannot decode .*class1/003\.jpg") as caught:
        for batch in loader.epoch(0):
            got.append(batch)
    assert "\n" not in str(caught.value)
    assert 11 in expected[len(got)].index.tolist()
    assert all(equal(a, b) for a, b in zip(got, expected, strict=False))
    path.write_bytes(whole)
    assert all(equal(a, b) for a, b in zip(loader.epoch(0), expected, strict=True))


def test_a_file_that_went_is_named(images: Path, loaders: Loaders) -> None:
    loader = loaders(images / "train")
    (images / "train" / "class2" / "001.jpg").unlink()
    with pytest.raises(DataError, match=r"cannot read .*class2/001\.jpg"):
        list(loader.epoch(0))


@pytest.mark.usefixtures("trusting")
@pytest.mark.parametrize("prefetch", [1, 3])
def test_what_only_dali_refuses_is_decoded_by_pil(
    prefetch: int, images: Path, loaders: Loaders, caplog: pytest.LogCaptureFixture
) -> None:
    """DALI loses the batch, and those behind it in flight: all come, in order, one warning."""
    for number in (1, 5):
        path = images / "train" / "class1" / f"{number:03d}.jpg"
        path.write_bytes(encoded(Image.open(path), "GIF"))
    store = open_store(images / "train", "train")
    loader = loaders(store, batch=4, prefetch=prefetch)
    for epoch in range(2):
        order = Order(images=24, batch=4, seed=0)
        found = [index.tolist() for index, *_ in loader.crops(epoch)]
        assert found == [order.indices(epoch, step).tolist() for step in range(6)]
    assert gaps(loader, store, 16).mean() < 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "DALI cannot decode an image of step" in caplog.text


@pytest.mark.usefixtures("trusting")
def test_what_dali_and_pil_refuse_is_named(images: Path, loaders: Loaders) -> None:
    path = images / "train" / "class1" / "003.jpg"
    loader = loaders(images / "train", batch=4, prefetch=3)
    expected = list(loader.epoch(0))
    whole = path.read_bytes()
    path.write_bytes(without_end(whole))
    with pytest.raises(DataError, match=r"cannot decode .*class1/003\.jpg"):
        list(loader.epoch(0))
    broken = next(step for step, batch in enumerate(expected) if 11 in batch.index)
    next(loader.epoch(0, skip=broken - 1))  # abandoned with the broken one in flight
    path.write_bytes(whole)
    assert all(equal(a, b) for a, b in zip(loader.epoch(0), expected, strict=True))


def test_a_broken_image_is_said_in_one_voice(images: Path) -> None:
    """Nothing that DALI prints of itself reaches the user."""
    path = images / "train" / "class1" / "003.jpg"
    path.write_bytes(without_end(path.read_bytes()))
    done = Forked(print_the_error, str(images)).wait()
    assert done.stdout.count("\n") == 1 and "cannot decode" in done.stdout
    assert (done.returncode, done.stderr) == (0, "")


def print_the_error(data: str) -> None:
    loader = build("dali", Path(data), batch=4, workers=2)
    try:
        list(loader.epoch(0))
    except DataError as error:
        print(error)
    loader.close()
