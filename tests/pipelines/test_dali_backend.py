"""DALI's loader: crops match PIL's, and batches stay in order after errors and bad images."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
from PIL import Image

from fastsiam.config import AugmentConfig
from fastsiam.errors import BackendError, DataError
from fastsiam.pipelines import Order, open_store
from tests.pipelines.cases import GRAPH, batches, change_image, same
from tests.pipelines.conftest import Loaders
from tests.pipelines.dali_cases import KINDS, gaps, pil_crops, write_kinds
from tests.processes import Forked
from tests.sources import encoded
from tests.views.cases import UNEQUAL

pytestmark = pytest.mark.dali


def test_next_epoch_is_correct_after_error(
    images: Path, loaders: Loaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C or a CUDA error at any point while a batch is passed to DALI."""
    loader = loaders(GRAPH, images / "train", batch=4)
    expected = list(loader.epoch(0))
    cuda = RuntimeError("CUDA runtime API error cudaErrorIllegalAddress (700)")
    for name, number, error in (
        *(("feed_input", number, KeyboardInterrupt("now")) for number in (2, 5, 11)),
        *((name, 2, cuda) for name in ("outputs", "schedule_run", "feed_input")),
    ):
        fails = Mock(wraps=getattr(loader._cropper._dali, name))
        fails.side_effect = [*[DEFAULT] * (number - 1), error]
        with monkeypatch.context() as patch:
            patch.setattr(loader._cropper._dali, name, fails)
            with pytest.raises(type(error), match=r"cudaErrorIllegalAddress|now"):
                list(loader.epoch(0))
        assert same(list(loader.epoch(0)), expected)


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (
            "cudaErrorInsufficientDriver (35):\nat 0x1",
            BackendError,
            r"^DALI cannot start on cpu \(cudaErrorInsufficientDriver \(35\):\): install the DALI "
            r"package for this driver's CUDA version, or pass --pipeline native$",
        ),
        ("Can't allocate 4096 bytes on device 0.", RuntimeError, "^Can't allocate"),
    ],
)
def test_dali_that_cannot_start_is_refused(
    error: str,
    raised: type[Exception],
    message: str,
    images: Path,
    loaders: Loaders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An example is a package for a newer CUDA than the driver's: it imports."""
    monkeypatch.setattr("nvidia.dali.Pipeline.build", Mock(side_effect=RuntimeError(error)))
    with pytest.raises(raised, match=message):
        loaders(GRAPH, images / "train", batch=4)


@pytest.mark.usefixtures("trusting")
@pytest.mark.parametrize("prefetch", [1, 3])
def test_images_dali_rejects_are_decoded_by_pil(
    prefetch: int, images: Path, loaders: Loaders, caplog: pytest.LogCaptureFixture
) -> None:
    """DALI loses that batch and those in flight behind it. All arrive, in order; one warning."""
    for number in (1, 5):
        path = images / "train" / "class1" / f"{number:03d}.jpg"
        path.write_bytes(encoded(Image.open(path), "GIF"))
    store = open_store(images / "train", "train")
    loader = loaders(GRAPH, images / "train", batch=4, prefetch=prefetch)
    for epoch in range(2):
        order = Order(images=24, batch=4, seed=0)
        indices = [index.tolist() for index, *_ in loader.crops(epoch)]
        assert indices == [order.indices(epoch, step).tolist() for step in range(6)]
    assert gaps(loader, store, 16).mean() < 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "DALI cannot decode some images" in caplog.text


@pytest.mark.usefixtures("trusting")
def test_images_dali_and_pil_reject_are_named_in_error(images: Path, loaders: Loaders) -> None:
    """The error names the image and is distinguished from other DALI errors."""
    path = images / "train" / "class1" / "003.jpg"
    loader, original = loaders(GRAPH, images / "train", batch=4, prefetch=3), path.read_bytes()
    expected = list(loader.epoch(0))
    broken = next(step for step, batch in enumerate(expected) if 11 in batch.index)
    for damaged in (
        original[:-20],
        original[:200],
        np.random.default_rng(0).bytes(500),
        b"",
        original.replace(b"\xff\xc0", b"\xff\xc7", 1),  # lossless
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"cannot decode .*class1/003\.jpg"):
            list(loader.epoch(0))
        next(loader.epoch(0, skip=broken - 1))  # abandoned with the broken one in flight
        path.write_bytes(original)
        assert same(list(loader.epoch(0)), expected)


def test_dali_prints_nothing_about_corrupt_image(images: Path) -> None:
    """It is passed to Pillow; DALI would print an error without the image's name."""
    change_image("dali", images / "train", 11, lambda data: data[:-20])
    result = Forked(print_load_error, images).wait()
    assert result.stdout.count("\n") == 1 and "cannot decode" in result.stdout
    assert (result.returncode, result.stderr) == (0, "")


def print_load_error(data: Path) -> None:
    try:
        batches("dali", data, batch=4, workers=2)
    except DataError as error:
        print(error)


def test_views_of_different_sizes_are_close_to_pil(real_images: Path, loaders: Loaders) -> None:
    """Close to PIL's except at edges. DALI's graph has one decoder and gets each image once."""
    store = open_store(real_images, "train")
    augment = UNEQUAL.changed(scale_min=0.3, scale_max=1.0)
    loader = loaders(GRAPH, real_images, batch=100, augment=augment, workers=2)
    dali = loader._cropper._dali
    assert dali.serialize().count(b"decoders__Image") == 1
    feed = Mock(wraps=dali.feed_input)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dali, "feed_input", feed)
        for index, params, crops in loader.crops(0, skip=3):
            for crop, (side, views) in zip(crops, augment.by_side.items(), strict=True):
                theirs = pil_crops(store, index, params.views(views), side)
                gap = np.abs(crop.cpu().numpy().astype(np.int64) - theirs)
                inside = gap[:, :, 4:-4, 4:-4]
                assert inside.max() <= 1 and inside.mean() < 0.2 and gap.mean() < 1
    fed = [call.args for call in feed.call_args_list]
    assert sum(len(data) for name, data in fed if name == "encoded") == 200


def test_crops_of_every_image_kind_are_close_to_pil(tmp_path: Path, loaders: Loaders) -> None:
    """In every format, within one level except at the edges, so the decoding is exact."""
    store, images = open_store(write_kinds(tmp_path, each=8), "train"), 8 * len(KINDS)
    loader = loaders(GRAPH, tmp_path, augment=AugmentConfig.alike(crop=48))
    order = Order(images=images, batch=8, seed=0)
    indices = [order.indices(epoch, step) for epoch in range(3) for step in range(order.steps)]
    gap = gaps(loader, store, 48, epochs=3)
    for kind in range(len(KINDS)):
        gap_of_kind = gap[:, np.concatenate(indices) // 8 == kind]
        assert gap_of_kind.shape[1] == 24 and gap_of_kind[:, :, 4:-4, 4:-4].max() <= 1
        assert gap_of_kind.mean() < 0.25 and gap_of_kind.mean((2, 3, 4)).max() < 0.35
