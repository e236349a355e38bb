"""DALI's loader: crops that are PIL's, images that it cannot decode, and nothing mixed up."""

from __future__ import annotations

import json
import logging
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fastsiam.config import AugmentConfig
from fastsiam.errors import DataError
from fastsiam.pipelines import Order, open_store
from fastsiam.views.batch import crop_shapes
from tests.conftest import write_images
from tests.pipelines.cases import SMALL, build, equal, give_back_at_once, growth, resident
from tests.pipelines.dali_cases import KINDS, Loaders, gaps, load, pil_crops, trust
from tests.processes import Forked
from tests.sources import encoded, jpeg, picture
from tests.views.cases import UNEQUAL

pytestmark = pytest.mark.dali


def test_epochs_can_be_abandoned(images: Path, loaders: Loaders) -> None:
    """At any step, closed or merely left; the one that begins next is whole."""
    loader = loaders(images / "train", batch=4, prefetch=3)
    expected = list(loader.epoch(0))
    for taken in range(7):
        closed, left = loader.epoch(5), loader.epoch(6)
        assert len(list(islice(closed, taken))) == min(taken, 6)
        closed.close()  # type: ignore[attr-defined]
        next(left)
        again = list(loader.epoch(0))
        assert all(equal(a, b) for a, b in zip(again, expected, strict=True))
        with pytest.raises(RuntimeError, match="another epoch of this loader was begun"):
            list(left)


def test_an_error_mixes_nothing_up(
    images: Path, loaders: Loaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C or an error of CUDA's, wherever it strikes while a batch is handed over."""
    loader = loaders(images / "train", batch=4)
    expected = list(loader.epoch(0))
    cuda = RuntimeError("CUDA runtime API error cudaErrorIllegalAddress (700)")
    for name, number, error in (
        *(("feed_input", number, KeyboardInterrupt("now")) for number in (2, 5, 11)),
        *((name, 2, cuda) for name in ("outputs", "schedule_run", "feed_input")),
    ):
        function, calls = getattr(loader._cropper._dali, name), iter(range(1, 100))

        def fail(
            *arguments: Any, function: Any = function, calls: Any = calls, error: Any = error,
            number: int = number, **named: Any,
        ) -> Any:  # fmt: skip
            if next(calls) == number:
                raise error
            return function(*arguments, **named)

        with monkeypatch.context() as patch:
            patch.setattr(loader._cropper._dali, name, fail)
            with pytest.raises(type(error), match=r"cudaErrorIllegalAddress|now"):
                list(loader.epoch(0))
        assert all(equal(a, b) for a, b in zip(loader.epoch(0), expected, strict=True))


@pytest.mark.alone
def test_memory_does_not_grow(tmp_path: Path) -> None:
    """Over 24 epochs and as many abandoned ones, where DALI fails in each of them."""
    root = write_images(tmp_path, each=16, side=160)
    path = root / "class1" / "003.jpg"
    path.write_bytes(encoded(Image.open(path), "GIF"))
    done = Forked(print_sizes, str(root)).wait()
    assert done.returncode == 0, done.stderr
    assert "DALI cannot decode" in done.stderr
    # One epoch's crops are 14 MiB, its decoded images 3.5; eight epochs lie between the sizes.
    assert growth(json.loads(done.stdout)) < 16 * 2**20


def print_sizes(root: str) -> None:
    """Print this process's size after each epoch. DALI gets every image, as ``trusting`` has it."""
    give_back_at_once()
    logging.basicConfig(level=logging.WARNING)
    trust(pytest.MonkeyPatch())
    loader, sizes = load(Path(root), batch=16, augment=AugmentConfig.alike(crop=128)), []
    for epoch in range(24):
        assert len(list(loader.epoch(epoch))) == 3
        next(iter(loader.epoch(epoch)))
        sizes.append(resident())
    loader.close()
    print(json.dumps(sizes))


def without_end(data: bytes) -> bytes:
    return data[:-20]


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
    assert "DALI cannot decode an image" in caplog.text


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


def test_views_of_different_sides(real_images: Path, loaders: Loaders) -> None:
    """Each near PIL's, except for edges; DALI's graph has one decoder, and gets each image once."""
    store = open_store(real_images, "train")
    augment = UNEQUAL.changed(scale_min=0.3, scale_max=1.0)
    loader = loaders(store, batch=100, augment=augment)
    dali, fed = loader._cropper._dali, list[int]()
    assert dali.serialize().count(b"decoders__Image") == 1
    feed = dali.feed_input

    def counted(name: str, data: list[NDArray[np.uint8]]) -> None:
        fed.append(len(data) if name == "encoded" else 0)
        feed(name, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dali, "feed_input", counted)
        for index, params, crops in loader.crops(0, skip=3):
            for own, (side, views) in zip(crops, augment.by_side.items(), strict=True):
                theirs = pil_crops(store, index, params.views(views), side)
                gap = np.abs(own.cpu().numpy().astype(np.int64) - theirs)
                inside = gap[:, :, 4:-4, 4:-4]
                assert inside.max() <= 1 and inside.mean() < 0.2 and gap.mean() < 1
    assert sum(fed) == 200


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_image_is_cropped_as_pil_does(
    kind: str, tmp_path: Path, loaders: Loaders
) -> None:
    """Whatever the format, to one level except for the edges: so the decoding is exact."""
    for i in range(8):
        (tmp_path / f"{i}.jpg").write_bytes(KINDS[kind](i))
    store = open_store(tmp_path, "train")
    gap = gaps(loaders(store, augment=AugmentConfig.alike(crop=48)), store, 48, epochs=3)
    assert gap[:, :, 4:-4, 4:-4].max() <= 1
    assert gap.mean() < 0.25 and gap.mean((2, 3, 4)).max() < 0.35


def test_what_the_decoder_refuses_is_told_from_the_rest() -> None:
    """By the text of DALI that is installed here, of its CPU decoder."""
    from fastsiam.pipelines.dali_graph import build_graph, refuses_an_image

    def feed(*images: bytes) -> None:
        graph.feed_input("encoded", [np.frombuffer(image, np.uint8) for image in images])
        graph.schedule_run()
        graph.outputs()

    for image in (
        jpeg(1)[:-20],
        jpeg(1)[:200],
        np.random.default_rng(0).bytes(500),
        b"",
        encoded(picture(1), "GIF"),
        jpeg(1).replace(b"\xff\xc0", b"\xff\xc7", 1),  # lossless
    ):
        graph = build_graph(
            crop_shapes(SMALL, 2), threads=1, device=None, hw_decoder_load=0.9, resizes=False
        )
        feed(jpeg(1), jpeg(2))
        with pytest.raises(RuntimeError) as caught:
            feed(jpeg(1), image)
        assert refuses_an_image(caught.value)


def test_an_image_that_pil_takes_for_a_bomb_is_named(images: Path, loaders: Loaders) -> None:
    """DALI would ask for all the memory of its 12 GB of pixels."""
    loader = loaders(images / "train", batch=4)
    path = images / "train" / "class1" / "003.jpg"
    data = path.read_bytes()
    size = data.index(b"\xff\xc0") + 5
    path.write_bytes(data[:size] + b"\xff\xff\xff\xff" + data[size + 4 :])
    with pytest.raises(DataError, match=r"cannot decode .*class1/003\.jpg"):
        list(loader.epoch(0))
