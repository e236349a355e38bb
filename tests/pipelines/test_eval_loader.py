"""Central crops: on the CPU, every pipeline's crops equal PIL's bit for bit."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as TF

from fastsiam.config import AugmentConfig, DataConfig, Pipeline
from fastsiam.pipelines import Store, backends, open_store
from fastsiam.pipelines import central as module
from fastsiam.pipelines.cuts import cut_centres
from fastsiam.pipelines.job import Images, Job, run_in_threads
from fastsiam.views.batch import EvalBatch, EvalLoader
from fastsiam.views.photometric.reference import normalize
from tests.data_formats import write_converted, write_once
from tests.pipelines.cases import central, delay_copies, levels, marked
from tests.pipelines.dali_cases import write_kinds
from tests.sources import picture


def crop_with_pil(images: list[Image.Image], resize: int, side: int) -> NDArray[np.uint8]:
    """Compute central crops with torchvision's Resize and CenterCrop."""
    return np.stack(
        [np.asarray(TF.center_crop(TF.resize(image, [resize]), [side, side])) for image in images]
    )


def compute_expected_crops(store: Store, resize: int, side: int) -> Tensor:
    crops = torch.from_numpy(
        crop_with_pil([store.decode(i) for i in range(len(store))], resize, side)
    )
    return normalize(crops.permute(0, 3, 1, 2).float(), AugmentConfig())


def load_images(loader: EvalLoader) -> Tensor:
    return torch.cat([batch.image for batch in loader])


def equal(one: EvalBatch, other: EvalBatch) -> bool:
    return all(torch.equal(getattr(one, f), getattr(other, f)) for f in EvalBatch.__slots__)


def test_central_crops_equal_pil_for_any_size() -> None:
    """Shrunk, enlarged, narrower than the crop, long and thin; noise and black-and-white images."""
    random = np.random.default_rng(0)
    for largest in (3, 20, 150, 700) * 25:
        side, resize = random.integers(1, 48, 2).tolist()
        size = random.integers(1, largest, (6, 2))
        size = size[size.max(1) * resize < 6000 * size.min(1)]  # PIL resizes all of it
        images = [random.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in size.tolist()]
        images[:1] = [(image > 128) * np.uint8(255) for image in images[:1]]
        crops = torch.full((1, len(images), side, side, 3), 7, dtype=torch.uint8)
        cuts = cut_centres(size, resize=resize, side=side)
        run_in_threads(Job(Images.of_arrays(images), [cuts], (crops,)))
        theirs = crop_with_pil([Image.fromarray(image) for image in images], resize, side)
        np.testing.assert_array_equal(crops[0].numpy(), theirs)


@pytest.fixture(scope="module")
def unusual_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of every kind, some much longer than the crop, and one of exactly its size."""
    folder = write_kinds(tmp_path_factory.mktemp("odd") / "images", each=1)
    for width, height in ((500, 3), (3, 500), (16, 16)):
        picture(width, width=width, height=height).save(folder / f"{width}-{height}.jpg")
    return folder


@pytest.mark.parametrize("kind", ["folder", "converted", "pixels"])
@pytest.mark.parametrize(("resize", "side"), [(20, 16), (12, 17)])
def test_central_crops_of_unusual_images_equal_pil(
    resize: int, side: int, kind: str, unusual_images: Path
) -> None:
    root = write_once(kind, unusual_images)
    ours = load_images(central("native", root, resize=resize, side=side))
    assert torch.equal(ours, compute_expected_crops(open_store(root, "train"), resize, side))


@pytest.fixture(scope="module")
def photographs(real_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_converted(real_images, tmp_path_factory.mktemp("photographs"), limit=60)


@pytest.mark.dali
@pytest.mark.parametrize(("resize", "side"), [(256, 224), (400, 224), (96, 96)])
def test_dali_resize_is_close_to_pil(resize: int, side: int, photographs: Path) -> None:
    """The GPU graph, run on the CPU: within one level, except at the edges of shrunk images."""
    from fastsiam.pipelines.dali_backend import central_crops

    store = open_store(photographs, "train")
    batches = np.split(np.arange(len(store)), [32])
    data, device = DataConfig(pipeline="dali", workers=2), torch.device("cpu")
    crop_batches = central_crops(data, store, batches, resize=resize, side=side, device=device)
    ours = np.concatenate([crops.clone().numpy() for crops in crop_batches])
    theirs = crop_with_pil([store.decode(i) for i in range(len(store))], resize, side)
    gap = np.abs(ours.astype(np.int64) - theirs)
    assert gap.mean() < 0.2 and gap.mean((1, 2, 3)).max() < 0.3
    assert gap.max() == 1 if resize > side else (gap > 2).mean() < 0.005


@pytest.mark.dali
@pytest.mark.ffcv
def test_engine_computes_central_crops_except_for_dali_on_gpu(images: Path) -> None:
    """So the other tests here use one pipeline. At resize 95, crops have a border."""
    store = open_store(images / "train", "train")
    for name in get_args(Pipeline):
        for device, resize in (("cpu", 96), ("cuda", 96), ("cuda", 95)):
            function = backends.BACKENDS[name].central_crops(
                DataConfig(pipeline=name), store, resize=resize, side=96,
                device=torch.device(device),
            )  # fmt: skip
            maker = "dali" if (name, device, resize) == ("dali", "cuda", 96) else "native"
            assert isinstance(function, partial) and function.func.__module__.endswith(
                f"{maker}_backend"
            )


@pytest.mark.parametrize("keep", [0, 2**30])
def test_repeated_passes_are_equal(
    keep: int, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after abandoned passes. Cached crops are not computed again."""
    monkeypatch.setattr(module, "_KEEP_BYTES", keep)
    root = images / "train"
    loader = central("native", root)
    for count in (1, 2):
        assert len(list(islice(loader, count))) == count
    first = list(loader)
    assert len(first) == 3
    if keep:
        for path in root.rglob("*.*"):
            path.unlink()
    for _ in range(2):
        assert all(equal(a, b) for a, b in zip(loader, first, strict=True))


@pytest.mark.parametrize("world", [2, 1, 5])
def test_ranks_split_subset_in_order(world: int, images: Path) -> None:
    root = images / "train"
    chosen = np.array([0, 1, 5, 11, 12, 20, 23])
    everything = next(iter(central("native", root, batch=24)))
    settings: dict[str, Any] = {"batch": 2, "world": world, "chosen": chosen}
    loaders = [central("native", root, rank=rank, **settings) for rank in range(world)]
    batches = [batch for loader in loaders for batch in loader]
    index = torch.cat([batch.index for batch in batches])
    assert index.tolist() == chosen.tolist()
    assert torch.equal(torch.cat([b.image for b in batches]), everything.image[index])
    assert torch.equal(torch.cat([b.label for b in batches]), index // 8)
    assert all(loader.images == 7 for loader in loaders)
    store = open_store(root, "train")
    names = [store.name(i) for i in chosen.tolist()]
    assert all(loader.names() == names for loader in loaders)
    assert all(loader.classes == ("class0", "class1", "class2") for loader in loaders)


def test_ranks_take_batches_in_turn(images: Path) -> None:
    root, chosen = images / "train", np.arange(3, 24)
    batch_indices: dict[int, list[int]] = {}
    for rank in range(3):
        loader = central("native", root, batch=4, rank=rank, world=3, chosen=chosen, in_turn=True)
        batch_indices |= {rank + 3 * i: batch.index.tolist() for i, batch in enumerate(loader)}
    assert [batch_indices[i] for i in range(6)] == [
        list(range(3 + 4 * i, min(24, 7 + 4 * i))) for i in range(6)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("name", marked("native", "dali"))
def test_central_crops_on_gpu_are_close_to_cpu(name: str, photographs: Path) -> None:
    """They equal the CPU's, except that nvJPEG rounds its transform and colours differently."""
    settings = {"resize": 256, "side": 224, "batch": 32}
    host = central(name, photographs, **settings)
    device = central(name, photographs, device="cuda", **settings)
    for _ in range(2):  # computed, then cached
        for a, b in zip(device, host, strict=True):
            assert all(getattr(a, field).is_cuda for field in EvalBatch.__slots__)
            assert a.image.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(a.index.cpu(), b.index) and torch.equal(a.label.cpu(), b.label)
            gap = levels(a.image.cpu(), b.image)
            if name == "dali":
                assert gap.mean() < 1 and gap.mean((1, 2, 3)).max() < 3
            else:
                assert gap.max() < 1e-3


@pytest.mark.gpu
@pytest.mark.dali
@pytest.mark.parametrize(("resize", "side"), [(256, 224), (72, 96)])
def test_dali_resize_on_gpu_is_close_to_pil(resize: int, side: int, photographs: Path) -> None:
    """Raw pixels, which need no decoding: within one level, except near edges.

    The engine computes crops with a border, bit for bit.
    """
    pixels = photographs.with_name("pixels")
    if not pixels.exists():
        write_converted(photographs, pixels, raw=True, limit=16)
    ours = load_images(central("dali", pixels, resize=resize, side=side, device="cuda"))
    gap = levels(ours.cpu(), compute_expected_crops(open_store(pixels, "train"), resize, side))
    assert gap.max() < 1.01 if resize > side else (gap > 2).float().mean() < 0.005


@pytest.mark.gpu
def test_crops_are_correct_on_slow_gpu(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory must not be reused before it has been copied."""
    monkeypatch.setattr(module, "_KEEP_BYTES", 0)
    host, device = (
        central("native", images / "train", batch=2, device=at) for at in ("cpu", "cuda")
    )
    delay_copies(monkeypatch)
    for _ in range(3):
        crops = []
        for batch in device:
            torch.cuda._sleep(50_000_000)
            crops.append(batch.image)
        assert torch.allclose(torch.cat(crops).cpu(), load_images(host), atol=1e-5)
