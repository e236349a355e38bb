"""Makes the archives that data sets are published as, out of images of our own."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

WNIDS = ("n01440764", "n01443537", "n02119789")


def picture(seed: int, *, width: int = 40, height: int = 30) -> Image.Image:
    """Return a smooth random image: JPEG keeps it recognisable."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def jpeg(seed: int, **options: object) -> bytes:
    return encoded(picture(seed), "JPEG", **options)


def gray_jpeg(seed: int, *, sampling: int = 0x11, **options: object) -> bytes:
    """Return a JPEG of one channel; its sampling factors say nothing then, and some are odd."""
    data = encoded(picture(seed).convert("L"), "JPEG", **options)
    frame = data.index(b"\xff\xc2" if options.get("progressive") else b"\xff\xc0")
    return data[: frame + 11] + bytes([sampling]) + data[frame + 12 :]


def rotated_jpeg(seed: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return jpeg(seed, exif=exif)


def tar(
    path: Path, members: Iterable[tuple[str, bytes]], *, kind: int = tarfile.GNU_FORMAT
) -> Path:
    """Write a tar of (name, content) members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_bytes(members, kind=kind))
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
    """Write a tar of one tar for each class, as ILSVRC2012_img_train.tar is."""
    classes = sorted({name.split("/")[0] for name, _ in members})
    return tar(
        path,
        [
            (
                f"{own}.tar",
                tar_bytes((n.split("/", 1)[1], d) for n, d in members if n.split("/")[0] == own),
            )
            for own in classes
        ],
    )


def imagenet(root: Path, *, each: int = 3, val: int = 4) -> Path:
    """Write both official archives and the devkit, with three classes."""
    from scipy.io import savemat

    members = [
        (f"{wnid}/{wnid}_{i}.JPEG", jpeg(10 * k + i))
        for k, wnid in enumerate(WNIDS)
        for i in range(each)
    ]
    imagenet_train_tar(root / "ILSVRC2012_img_train.tar", members)
    names = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, val + 1)]
    tar(root / "ILSVRC2012_img_val.tar", [(n, jpeg(100 + i)) for i, n in enumerate(names)])
    # The devkit numbers the classes in another order than that of their names.
    numbers = {1: WNIDS[2], 2: WNIDS[0], 3: WNIDS[1]}
    rows = np.array(
        [(number, wnid) for number, wnid in numbers.items()],
        dtype=[("ILSVRC2012_ID", object), ("WNID", object)],
    )
    table = io.BytesIO()
    savemat(table, {"synsets": rows})
    truth = "\n".join(str(1 + i % 3) for i in range(val)) + "\n"
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


def parquet(
    path: Path, rows: Sequence[tuple[bytes | None, str, int]], names: list[str], *, group: int = 4
) -> Path:
    """Write (bytes, path, label) rows as Hugging Face's datasets do."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    features = {"label": {"names": names, "_type": "ClassLabel"}, "image": {"_type": "Image"}}
    table = pa.table(
        {
            "image": [{"bytes": data, "path": name} for data, name, _ in rows],
            "label": pa.array([label for _, _, label in rows], pa.int64()),
        }
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, row_group_size=group)
    return path


CIFAR_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"
)  # fmt: skip


def python2_pickle(value: object) -> bytes:
    """Pickle as Python 2 did for CIFAR's authors: protocol 2, byte strings, numpy's old names."""
    return b"\x80\x02" + _python2(value) + b"."


def _python2(value: object) -> bytes:
    match value:
        case bytes():
            return b"T" + struct.pack("<i", len(value)) + value
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            return b"J" + struct.pack("<i", value)
        case None:
            return b"N"
        case list():
            return b"](" + b"".join(map(_python2, value)) + b"e"
        case tuple():
            return b"(" + b"".join(map(_python2, value)) + b"t"
        case dict():
            return b"}(" + b"".join(_python2(k) + _python2(v) for k, v in value.items()) + b"u"
        case np.ndarray():
            dtype = (
                b"cnumpy\ndtype\n" + _python2((b"u1", 0, 1)) + b"R"
                + _python2((3, b"|", None, None, None, -1, -1, 0)) + b"b"
            )  # fmt: skip
            state = (
                b"(" + _python2(1) + _python2(value.shape) + dtype + _python2(False)
                + _python2(value.tobytes()) + b"t"
            )  # fmt: skip
            return (
                b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n"
                + _python2((0,)) + _python2(b"b") + b"tR" + state + b"b"
            )  # fmt: skip
    raise TypeError(value)


def cifar(path: Path, *, each: int = 10, test: int = 5, extra: bytes = b"") -> Path:
    """Write an archive like cifar-10-python.tar.gz; ``extra`` stands for the first batch."""
    generator = np.random.default_rng(0)

    def batch(count: int) -> bytes:
        pixels = generator.integers(0, 256, (count, 3072), dtype=np.uint8)
        return python2_pickle(
            {b"data": pixels, b"labels": [i % 10 for i in range(count)], b"batch_label": b"x"}
        )

    root = "cifar-10-batches-py"
    members = [(f"{root}/data_batch_{i}", batch(each)) for i in range(1, 6)]
    if extra:
        members[0] = (members[0][0], extra)
    members.append((f"{root}/test_batch", batch(test)))
    names = python2_pickle({b"label_names": [name.encode() for name in CIFAR_CLASSES]})
    members.append((f"{root}/batches.meta", names))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(tar_bytes(members)))
    return path


class Evil:
    """Unpickling it would make a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.mkdir, (str(self.target),)


def evil_pickle(target: Path) -> bytes:
    return pickle.dumps({b"data": Evil(target)})
