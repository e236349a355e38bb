"""DALI's pipeline: PIL's crops of every kind of image, and nothing lost, leaked or left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import functional as TF

from fastsiam.config import AugmentConfig, ConvertConfig
from fastsiam.errors import DataError
from fastsiam.pipelines import Order, Store, dali_cropper, open_store
from fastsiam.pipelines.convert import convert
from fastsiam.pipelines.dali_backend import DaliLoader
from fastsiam.views.draws import ViewParams
from tests.conftest import ROOT, write_images
from tests.pipelines.store.test_beton import Quiet
from tests.pipelines.test_pipelines import equal, joined
from tests.sources import encoded, folder_members, picture, rotated_jpeg, tar

pytestmark = pytest.mark.dali

CPU = torch.device("cpu")
SMALL = AugmentConfig.alike(crop=16)
Loaders = Callable[..., DaliLoader]


@pytest.fixture
def loaders() -> Iterator[Loaders]:
    """Open loaders and close them at the end."""
    opened: list[DaliLoader] = []

    def load(
        source: Path | Store,
        *,
        batch: int = 8,
        augment: AugmentConfig = SMALL,
        rank: int = 0,
        world: int = 1,
        workers: int = 2,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
        dali_resizes: bool = True,  # the GPU's graph, on whatever device
        **knobs: int,
    ) -> DaliLoader:
        store = open_store(source, "train") if isinstance(source, Path) else source
        order = Order(images=len(store), batch=batch, seed=0, rank=rank, world=world)
        opened.append(
            DaliLoader(
                store,
                order,
                augment,
                workers=workers,
                device=device,
                dtype=dtype,
                dali_resizes=dali_resizes,
                **knobs,
            )
        )
        return opened[-1]

    yield load
    for loader in opened:
        loader.close()


def pil_crops(
    store: Store, index: NDArray[np.int64], params: ViewParams, side: int
) -> NDArray[np.uint8]:
    """Make the crops (2, N, S, S, 3) with PIL, as torchvision does."""
    crops = np.empty((2, len(index), side, side, 3), np.uint8)
    for row, i in enumerate(index.tolist()):
        image = store.decode(i)
        for view in range(2):
            box = params.box[view, row].tolist()
            crop = TF.resized_crop(image, *box, [side, side])
            crops[view, row] = TF.hflip(crop) if params.flip[view, row] else crop
    return crops


def gaps(
    loader: DaliLoader, store: Store, side: int, *, epochs: int = 1, skip: int = 0
) -> NDArray[np.int64]:
    """Return the absolute differences to PIL's crops in levels of 255: (2, images, S, S, 3)."""
    found = [
        np.abs(crops.cpu().numpy().astype(np.int64) - pil_crops(store, index, params, side))
        for epoch in range(epochs)
        for index, params, (crops,) in loader.crops(epoch, skip=skip)
    ]
    return np.concatenate(found, axis=1)


def threads() -> int:
    """Count this process's threads, once the number stands: one that ended lingers a little."""
    counts = [0]
    while len(counts) < 5 or len(set(counts[-5:])) > 1:
        time.sleep(0.05)
        counts.append(len(os.listdir("/proc/self/task")))
    return counts[-1]


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_batches_have_the_promised_form(images: Path, loaders: Loaders) -> None:
    loader = loaders(images / "train", dtype=torch.bfloat16)
    assert loader.steps == 3 and loader.images == 24 and "train" in loader.source
    batches = list(loader.epoch(0))
    assert len(batches) == 3
    for batch in batches:
        for view in (batch.view1, batch.view2):
            assert view.shape == (8, 3, 16, 16) and view.dtype == torch.bfloat16
            assert view.is_contiguous(memory_format=torch.channels_last)
        assert batch.index.dtype == batch.label.dtype == torch.int64
        assert torch.equal(batch.label, batch.index // 8)
        assert not torch.equal(batch.view1, batch.view2)
    assert sorted(torch.cat([batch.index for batch in batches]).tolist()) == list(range(24))


def test_our_kernels_crop_photographs_to_the_last_bit(real_images: Path, loaders: Loaders) -> None:
    """What DALI decodes is cropped by the host's own kernels where there is no GPU."""
    store = open_store(real_images, "train")
    augment = AugmentConfig.alike(crop=224)
    loader = loaders(store, batch=20, augment=augment, dali_resizes=False)
    assert gaps(loader, store, 224, skip=loader.steps - 2).max() == 0


def test_photographs_are_cropped_as_pil_does(real_images: Path, loaders: Loaders) -> None:
    """Within one level; where a box is shrunk, DALI repeats its edge and PIL does without."""
    store = open_store(real_images, "train")
    loader = loaders(store, batch=100, augment=AugmentConfig.alike(crop=224))
    gap = gaps(loader, store, 224, skip=3)
    assert gap.mean() < 0.2 and gap.mean((2, 3, 4)).max() < 0.3
    assert gap[:, :, 4:-4, 4:-4].max() == 1
    assert (gap > 2).mean() < 0.001


def sixteen_bits(seed: int) -> bytes:
    gray = np.asarray(picture(seed, width=90, height=60).convert("L")).astype(np.uint16)
    return encoded(Image.fromarray(gray * 257), "PNG")


def with_alpha(seed: int) -> bytes:
    image = picture(seed, width=90, height=60).convert("RGBA")
    image.putalpha(picture(seed + 100, width=90, height=60).convert("L"))
    return encoded(image, "PNG")


def noisy(seed: int, width: int, height: int) -> Image.Image:
    """Return a picture with fine detail, which resampling brings out."""
    smooth = np.asarray(picture(seed, width=width, height=height)).astype(np.float64)
    grain = np.random.default_rng(seed).normal(0, 25, smooth.shape)
    return Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8))


KINDS: dict[str, Callable[[int], bytes]] = {
    "landscape": lambda i: encoded(noisy(i, 190, 97)),
    "portrait": lambda i: encoded(noisy(i, 83, 201)),
    "4:4:4": lambda i: encoded(noisy(i, 120, 90), subsampling=0),
    "progressive": lambda i: encoded(noisy(i, 120, 90), progressive=True),
    "gray": lambda i: encoded(noisy(i, 120, 90).convert("L")),
    "cmyk": lambda i: encoded(noisy(i, 120, 90).convert("CMYK")),
    "coded as RGB": lambda i: encoded(noisy(i, 120, 90), keep_rgb=True),
    "rotated by EXIF": rotated_jpeg,
    "tiny": lambda i: encoded(picture(i, width=3 + i % 3, height=2)),
    "one pixel": lambda i: encoded(picture(i, width=1, height=1)),
    "PNG": lambda i: encoded(noisy(i, 90, 60), "PNG"),
    "PNG with alpha": with_alpha,
    "PNG of 16 bits": sixteen_bits,
    "PNG with a palette": lambda i: encoded(noisy(i, 90, 60).convert("P"), "PNG"),
    "GIF": lambda i: encoded(noisy(i, 90, 60), "GIF"),
    "WebP": lambda i: encoded(noisy(i, 90, 60), "WEBP"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_image_is_cropped_as_pil_does(
    kind: str, tmp_path: Path, loaders: Loaders
) -> None:
    """Whatever the format, to one level but for the edges: so the decoding is exact."""
    for i in range(8):
        (tmp_path / f"{i}.jpg").write_bytes(KINDS[kind](i))
    store = open_store(tmp_path, "train")
    gap = gaps(loaders(store, augment=AugmentConfig.alike(crop=48)), store, 48, epochs=3)
    assert gap[:, :, 4:-4, 4:-4].max() <= 1
    assert gap.mean() < 0.25 and gap.mean((2, 3, 4)).max() < 0.35


def test_what_is_enlarged_is_pils_to_one_level(tmp_path: Path, loaders: Loaders) -> None:
    for i in range(8):
        (tmp_path / f"{i}.png").write_bytes(encoded(noisy(i, 40, 30), "PNG"))
    store = open_store(tmp_path, "train")
    gap = gaps(loaders(store, augment=AugmentConfig.alike(crop=48)), store, 48, epochs=3)
    assert gap.max() == 1 and gap.mean() < 0.25


def converted(root: Path, out: Path, **options: bool) -> Path:
    config = ConvertConfig(source=str(root), out=str(out), **options)  # type: ignore[arg-type]
    return convert("folder", config, Quiet())[0].path


def test_all_sources_give_the_same_views(images: Path, tmp_path: Path, loaders: Loaders) -> None:
    """Files, a tar, JPEGs and pixels in a .beton: DALI gets the same images of all."""
    sources = [
        images / "train",
        tar(tmp_path / "train.tar", folder_members(images / "train")),
        converted(images / "train", tmp_path / "jpeg"),
        converted(images / "train", tmp_path / "raw", raw=True),
    ]
    stores = [open_store(source, "train") for source in sources]
    assert [store.raw_size(0) for store in stores] == [None, None, None, (24, 24)]
    first, *others = (list(loaders(store).epoch(1)) for store in stores)
    for other in others:
        assert all(equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("prefetch", [1, 2, 5])
@pytest.mark.parametrize("workers", [0, 3])
def test_skipping_gives_the_tail_of_the_epoch(
    prefetch: int, workers: int, images: Path, loaders: Loaders
) -> None:
    loader = loaders(images / "train", batch=4, workers=workers, prefetch=prefetch)
    whole = list(loader.epoch(1))
    assert len(whole) == 6
    for skip in range(7):
        tail = list(loader.epoch(1, skip=skip))
        assert len(tail) == 6 - skip
        assert all(equal(a, b) for a, b in zip(tail, whole[skip:], strict=True))


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_same_global_batches(world: int, images: Path, loaders: Loaders) -> None:
    alone = loaders(images / "train").epoch(2)
    shares = [loaders(images / "train", rank=r, world=world).epoch(2) for r in range(world)]
    for whole, *parts in zip(alone, *shares, strict=True):
        assert equal(joined(parts), whole)


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


@pytest.mark.parametrize("call", range(2, 12))
def test_ctrl_c_mixes_nothing_up(
    call: int, images: Path, loaders: Loaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it strikes while a batch is handed over: images keep their own boxes."""
    loader = loaders(images / "train")
    expected = list(loader.epoch(0))
    feed, calls = loader._cropper._dali.feed_input, iter(range(1, 100))

    def interrupted(*arguments: object) -> None:
        if next(calls) == call:
            raise KeyboardInterrupt
        feed(*arguments)

    monkeypatch.setattr(loader._cropper._dali, "feed_input", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(loader.epoch(0))
    assert all(equal(a, b) for a, b in zip(loader.epoch(0), expected, strict=True))


def test_two_loaders_at_once(images: Path, loaders: Loaders) -> None:
    one, other = loaders(images / "train"), loaders(images / "train", workers=1)
    for a, b in zip(one.epoch(0), other.epoch(0), strict=True):
        assert equal(a, b)


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


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let DALI have whatever PIL can open, GIFs too, which it refuses."""
    monkeypatch.setattr(dali_cropper, "_BY_PIL", 0)
    monkeypatch.setattr(dali_cropper, "ends", lambda data, scan: True)


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


@pytest.mark.usefixtures("trusting")
@pytest.mark.parametrize(("refused", "most"), [(False, 16), (True, 32)])
def test_memory_does_not_grow(refused: bool, most: float, tmp_path: Path, loaders: Loaders) -> None:
    """Over 20 epochs and as many abandoned ones, and where DALI fails in each of them."""
    root = write_images(tmp_path, each=16, side=160)
    if refused:
        path = root / "class1" / "003.jpg"
        path.write_bytes(encoded(Image.open(path), "GIF"))
    loader = loaders(root, batch=16, augment=AugmentConfig.alike(crop=128))
    sizes = []
    for epoch in range(20):
        assert len(list(loader.epoch(epoch))) == 3
        next(loader.epoch(epoch))
        sizes.append(resident_mib())
    # One epoch's crops are 14 MiB, its decoded images 3.5.
    assert max(sizes[6:]) - sizes[5] < most


def test_closing_ends_all_threads(images: Path, loaders: Loaders) -> None:
    """In mid-epoch, and more than once; an epoch that was under way just ends."""
    warm = loaders(images / "train")  # DALI and torch start some threads once, for good
    next(warm.epoch(0))
    warm.close()
    before = threads()
    loader = loaders(images / "train", batch=4, workers=3)
    batches = loader.epoch(0)
    next(batches)
    assert threads() >= before + 4  # DALI's, and those that read
    loader.close()
    loader.close()
    assert threads() == before
    assert list(batches) == []


SCRIPT = """
import sys, torch
from pathlib import Path
from fastsiam.config import AugmentConfig
from fastsiam.pipelines import Order, open_store
from fastsiam.pipelines.dali_backend import DaliLoader
store = open_store(Path(sys.argv[1]), "train")
order = Order(images=len(store), batch=4, seed=0)
loader = DaliLoader(
    store, order, AugmentConfig(crop=16), workers=2, device=torch.device("cpu"), dtype=torch.float32
)
"""


@pytest.mark.parametrize("ending", ["sys.exit(7)", "list(batches); sys.exit(7)"])
def test_a_loader_that_nobody_closed_does_not_keep_the_program(ending: str, images: Path) -> None:
    """Nor does it say anything: nothing that DALI prints of itself reaches the user."""
    script = SCRIPT + f"batches = loader.epoch(0); next(batches); {ending}"
    command = [sys.executable, "-c", script, str(images)]
    done = subprocess.run(command, timeout=60, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


def test_a_broken_image_is_said_in_one_voice(images: Path) -> None:
    path = images / "train" / "class1" / "003.jpg"
    path.write_bytes(without_end(path.read_bytes()))
    script = SCRIPT + "try: list(loader.epoch(0))\nexcept Exception as error: print(error)"
    command = [sys.executable, "-c", script, str(images)]
    done = subprocess.run(command, timeout=60, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1 and "cannot decode" in done.stdout
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
def test_crops_of_the_gpu_are_near_pils(
    gpu: torch.device, real_images: Path, loaders: Loaders
) -> None:
    """nvJPEG's transform and colours round otherwise than libjpeg's."""
    store = open_store(real_images, "train")
    loader = loaders(store, batch=100, augment=AugmentConfig.alike(crop=224), device=gpu)
    gap = gaps(loader, store, 224, skip=3)
    assert gap.mean() < 1
    assert gap.mean((2, 3, 4)).max() < 3
    assert (gap[:, :, 4:-4, 4:-4] > 4).mean() < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_image_on_the_gpu(
    kind: str, gpu: torch.device, tmp_path: Path, loaders: Loaders
) -> None:
    for i in range(8):
        (tmp_path / f"{i}.jpg").write_bytes(KINDS[kind](i))
    store = open_store(tmp_path, "train")
    loader = loaders(store, augment=AugmentConfig.alike(crop=48), device=gpu)
    gap = gaps(loader, store, 48, epochs=3)
    assert gap.mean() < 1.5


@pytest.mark.gpu
def test_a_gpu_that_is_behind_loses_no_crops(
    gpu: torch.device, images: Path, loaders: Loaders
) -> None:
    """The host runs ahead of the device: memory must not be used again before it was read."""
    batches = dict[str, list[torch.Tensor]]()
    for pace in ("slow", "fast"):
        loader = loaders(images / "train", batch=4, device=gpu)
        made = batches[pace] = []
        for _ in range(3):
            for batch in loader.epoch(0):
                made += [batch.view1, batch.view2]
                if pace == "slow":
                    torch.cuda._sleep(100_000_000)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(*batches.values(), strict=True))


@pytest.mark.gpu
def test_torch_never_waits_for_the_device(
    gpu: torch.device, images: Path, loaders: Loaders
) -> None:
    loader = loaders(images / "train", batch=4, device=gpu)
    batches = loader.epoch(0)
    next(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(list(batches)) == 5
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_memory_of_the_gpu_does_not_grow(
    gpu: torch.device, tmp_path: Path, loaders: Loaders
) -> None:
    root = write_images(tmp_path, each=16, side=320)
    before = torch.cuda.mem_get_info(gpu)[0]
    loader = loaders(root, batch=16, augment=AugmentConfig.alike(crop=64), device=gpu)
    free = []
    for epoch in range(10):
        for _ in loader.epoch(epoch):
            pass
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info(gpu)[0])
    assert free[3] - min(free[4:]) < 64 * 2**20
    loader.close()
    torch.cuda.empty_cache()
    assert before - torch.cuda.mem_get_info(gpu)[0] < 1024 * 2**20


@pytest.mark.gpu
@pytest.mark.usefixtures("trusting")
def test_what_only_nvjpeg_refuses_is_decoded_by_pil(
    gpu: torch.device, images: Path, loaders: Loaders
) -> None:
    path = images / "train" / "class1" / "003.jpg"
    path.write_bytes(encoded(Image.open(path), "GIF"))
    loader = loaders(images / "train", batch=4, device=gpu)
    assert len(list(loader.epoch(0))) == 6
    whole = path.read_bytes()
    path.write_bytes(without_end(whole))
    with pytest.raises(DataError, match=r"cannot decode .*class1/003\.jpg"):
        list(loader.epoch(0))
    path.write_bytes(whole)
    assert len(list(loader.epoch(0))) == 6
