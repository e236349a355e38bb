"""Write generated images as the archives in which data sets are published."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from fastsiam.pipelines.store.cifar import MD5

WNIDS = ("n01440764", "n01443537", "n02119789")


def picture(seed: int, *, width: int = 40, height: int = 30) -> Image.Image:
    """Return a smooth random image, which JPEG compression barely changes."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def jpeg(seed: int, **options: object) -> bytes:
    return encoded(picture(seed), "JPEG", **options)


def gray_jpeg(seed: int, *, sampling: int = 0x11, **options: object) -> bytes:
    """Return a one-channel JPEG with any sampling factors, which decoders have to ignore."""
    data = encoded(picture(seed).convert("L"), "JPEG", **options)
    frame = data.index(b"\xff\xc2" if options.get("progressive") else b"\xff\xc0")
    return data[: frame + 11] + bytes([sampling]) + data[frame + 12 :]


def rotated_jpeg(seed: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return jpeg(seed, exif=exif)


def insert_junk(data: bytes) -> bytes:
    """Insert junk between two markers of a JPEG, which Pillow skips and other decoders reject."""
    return data.replace(b"\xff\xdb", b"junk\xff\xdb", 1)


def put(path: Path, data: bytes | str = b"") -> Path:
    """Write a file, creating its parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def tar(
    path: Path, members: Iterable[tuple[str, bytes]], *, kind: int = tarfile.GNU_FORMAT
) -> Path:
    """Write a tar of (name, content) members."""
    return put(path, tar_bytes(members, kind=kind))


def huge_tar(path: Path, name: str) -> Path:
    """Write a tar of a sparse 4 GiB member and an image."""
    image = tarfile.TarInfo("a/0.jpg")
    image.size = len(jpeg(0))
    with path.open("wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
        huge = tarfile.TarInfo(name)
        huge.size = 2**32
        archive.addfile(huge)
        archive.offset += huge.size
        file.seek(huge.size, io.SEEK_CUR)
        archive.addfile(image, io.BytesIO(jpeg(0)))
    return path


def tar_bytes(members: Iterable[tuple[str, bytes]], *, kind: int = tarfile.GNU_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def folder_members(folder: Path) -> list[tuple[str, bytes]]:
    """Return the files of class folders as (class/name, content), sorted."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(str(path.relative_to(folder)), path.read_bytes()) for path in files]


def imagenet_train_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    """Write a tar of one tar per class, like ILSVRC2012_img_train.tar."""
    classes: dict[str, list[tuple[str, bytes]]] = {}
    for name, content in members:
        class_name, file = name.split("/", 1)
        classes.setdefault(class_name, []).append((file, content))
    return tar(path, [(f"{name}.tar", tar_bytes(classes[name])) for name in sorted(classes)])


def imagenet(root: Path) -> Path:
    """Write both official archives and the devkit, with three classes."""
    from scipy.io import savemat

    members = [
        (f"{wnid}/{wnid}_{i}.JPEG", jpeg(10 * k + i))
        for k, wnid in enumerate(WNIDS)
        for i in range(3)
    ]
    imagenet_train_tar(root / "ILSVRC2012_img_train.tar", members)
    names = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, 5)]
    tar(root / "ILSVRC2012_img_val.tar", [(n, jpeg(100 + i)) for i, n in enumerate(names)])
    # The devkit does not number the classes in the order of their names.
    numbers = {1: WNIDS[2], 2: WNIDS[0], 3: WNIDS[1]}
    rows = np.array(
        [(number, wnid) for number, wnid in numbers.items()],
        dtype=[("ILSVRC2012_ID", object), ("WNID", object)],
    )
    table = io.BytesIO()
    savemat(table, {"synsets": rows})
    truth = "\n".join(str(1 + i % 3) for i in range(4)) + "\n"
    content = tar_bytes(
        [
            ("ILSVRC2012_devkit_t12/data/meta.mat", table.getvalue()),
            (
                "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt",
                truth.encode(),
            ),
        ]
    )
    (root / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(content))
    return root


VAL_WNIDS = (WNIDS[2], WNIDS[0], WNIDS[1], WNIDS[2])
"""Classes of the first validation images that ``imagenet`` writes."""


CIFAR_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"
)  # fmt: skip


def cifar(path: Path) -> Path:
    """Write an archive like cifar-10-python.tar.gz and register its MD5 as an official one."""
    generator = np.random.default_rng(0)

    def batch(count: int) -> bytes:
        pixels = generator.integers(0, 256, (count, 3072), dtype=np.uint8)
        labels = [i % 10 for i in range(count)]
        return pickle.dumps({b"data": pixels, b"labels": labels, b"batch_label": b"x"}, 2)

    root = "cifar-10-batches-py"
    members = [(f"{root}/data_batch_{i}", batch(10)) for i in range(1, 6)]
    members.append((f"{root}/test_batch", batch(5)))
    names = pickle.dumps({b"label_names": [name.encode() for name in CIFAR_CLASSES]}, 2)
    members.append((f"{root}/batches.meta", names))
    put(path, gzip.compress(tar_bytes(members)))
    MD5.add(hashlib.md5(path.read_bytes()).hexdigest())
    return path
