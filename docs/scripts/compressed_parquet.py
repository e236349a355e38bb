"""Measure what a random image costs in compressed parquet: why such files are converted first.

    python docs/scripts/compressed_parquet.py FOLDER_OF_JPEGS [RECORD.json]

Packs the images like the Hub's files, in row groups of 100, and times in turn: reading one row
group with pyarrow, which a random image needs; decoding one image; converting everything with
``fastsiam convert parquet``.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torchvision.io import ImageReadMode, decode_image

from fastsiam.config import ConvertConfig
from fastsiam.console import Console
from fastsiam.environment import environment
from fastsiam.files import write_json
from fastsiam.pipelines.convert import convert

GROUP, REPEATS = 100, 7


def main() -> None:
    """Measure, print the medians, and write the record."""
    folder, record = Path(sys.argv[1]), [Path(path) for path in sys.argv[2:]]
    images = [path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()]
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    with tempfile.TemporaryDirectory() as temporary:
        tasks = tasks_of(images, Path(temporary))
        seconds: dict[str, list[float]] = {name: [] for name in tasks}
        for repeat in range(REPEATS + 1):
            for name, task in tasks.items():
                start = time.perf_counter()
                task(repeat)
                seconds[name].append(time.perf_counter() - start)
    seconds = {name: values[1:] for name, values in seconds.items()}  # the first is a warm-up
    for name, values in seconds.items():
        middle = median(values)
        print(f"{name}: {1000 * middle:.1f} ms ±{(max(values) - min(values)) / 2 / middle:.0%}")
    facts = {"images": len(images), "bytes": sum(map(len, images)), "images_in_group": GROUP}
    today = datetime.now(UTC).date().isoformat()
    for path in record:
        about = {"seconds": seconds, **facts, "environment": environment(), "date": today}
        write_json(path, {"command": "python " + " ".join(sys.argv), **about})


def tasks_of(images: list[bytes], folder: Path) -> dict[str, Callable[[int], Any]]:
    """Write the parquet files and return what to time; each function takes the repeat's number."""
    table = pa.table({"image": [{"bytes": data, "path": ""} for data in images]})
    tasks: dict[str, Callable[[int], Any]] = {}
    for compression in ("snappy", "zstd"):
        source = folder / compression
        source.mkdir()
        pq.write_table(
            table, source / "train.parquet", row_group_size=GROUP, compression=compression
        )
        reader = pq.ParquetFile(source / "train.parquet", memory_map=True)

        def read(repeat: int, reader: pq.ParquetFile = reader) -> None:
            rows = reader.read_row_group(repeat % reader.num_row_groups, use_threads=False)
            rows["image"][repeat].as_py()

        def convert_all(repeat: int, source: Path = source) -> None:
            config = ConvertConfig(source=str(source), out=str(folder / f"{source.name}-{repeat}"))
            convert("parquet", config, Console(quiet=True))

        tasks |= {f"{compression}, one row group": read, f"{compression}, convert": convert_all}

    def decode(repeat: int) -> None:
        for data in images[repeat * GROUP % len(images) :][:GROUP]:
            encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            decode_image(encoded, mode=ImageReadMode.RGB)

    return tasks | {f"decode {GROUP} images": decode}


if __name__ == "__main__":
    main()
