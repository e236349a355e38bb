"""How fast ``fastsiam convert`` is, beside copying the same bytes and FFCV's own writer.

    python -m fastsiam.bench.convert --data DIR [--copies N] [--tar] [--json FILE]

All read from the page cache and write to the same disk; none waits for the disk at the end. FFCV's
writer does what its documentation shows: a torchvision ``ImageFolder``, ``RGBImageField`` in mode
"jpg" at the same quality, as many processes. It encodes every image anew, which is what it is.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import multiprocessing
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastsiam.bench.images import Silent, gather
from fastsiam.bench.measure import Timing, in_turns
from fastsiam.config import ConvertConfig
from fastsiam.info import environment
from fastsiam.pipelines.convert import convert
from fastsiam.pipelines.processes import cores
from fastsiam.pipelines.store import open_store


def measure(
    data: Path, *, copies: int = 1, as_tar: bool = False, repeats: int = 5
) -> dict[str, Any]:
    """Time conversion, copying and FFCV's writer on the same images.

    Args:
        data: a folder of class folders.
        copies: repeat the images so many times under other names, to measure longer.
        as_tar: read from one tar, which FFCV's writer cannot, of the images that keep their bytes.
        repeats: how often each is timed.

    Returns:
        A bench record.
    """
    with tempfile.TemporaryDirectory(prefix="fastsiam-bench-") as name:
        work = Path(name)
        source = gather(data, copies, work / "source", as_tar=as_tar)
        store = open_store(source, "train", sources=True)
        size = int(store.sizes().sum())
        config = ConvertConfig(source=str(source), out=str(work / "out"))
        workers = cores()
        (written,) = convert("folder", config, Silent())  # and refuse what would stop FFCV's writer
        cases: dict[str, Callable[[], None]] = {
            "cp": lambda: _copy(source, work / "copy"),
            "fastsiam": lambda: _convert(config),
        }
        if find_spec("ffcv") and not as_tar:
            cases["ffcv"] = lambda: _ffcv(source, work / "ffcv.beton", workers, config.quality)

        def before() -> None:
            for path in (work / "copy", work / "out", work / "ffcv.beton"):
                shutil.rmtree(path, ignore_errors=True)
                path.unlink(missing_ok=True)

        timings = in_turns(cases, repeats=repeats, before=before)
    ours = timings["fastsiam"]
    return {
        "case": "convert",
        "images": len(store),
        "bytes": size,
        "stored": written.about["stored"],
        "n": repeats,
        "workers": workers,
        "results": {
            name: _result(timing, ours, len(store), size) for name, timing in timings.items()
        },
        "in_the_clock": "opening the source, reading from the page cache, writing to the same "
        "disk without waiting for it; not: the interpreter's start and imports",
        "config": {"data": data.name, "copies": copies, "tar": as_tar, "quality": config.quality},
        "environment": environment(),
        "date": datetime.date.today().isoformat(),
    }


def table(record: dict[str, Any]) -> str:
    """Return a record as a Markdown table."""
    lines = [
        f"{record['images']:,} images, {record['bytes'] / 1e6:,.0f} MB, {record['workers']} "
        f"processes, medians of {record['n']} in turns",
        "",
        "| | seconds | spread | images/s | MB/s | CPU ms an image | fastsiam is |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, result in record["results"].items():
        lines.append(
            f"| {name} | {result['seconds']:.2f} | ±{result['spread']:.0%} | "
            f"{result['images_per_second']:,.0f} | {result['megabytes_per_second']:,.0f} | "
            f"{1000 * result['cpu_seconds_per_image']:.2f} | "
            f"{result['fastsiam_is_times_as_fast']:.2f}x as fast |"
        )
    return "\n".join(lines)


def _result(timing: Timing, ours: Timing, images: int, size: int) -> dict[str, Any]:
    return {
        "seconds": timing.median,
        "all_seconds": timing.wall,
        "spread": timing.spread,
        "images_per_second": images / timing.median,
        "megabytes_per_second": size / 1e6 / timing.median,
        "cpu_seconds_per_image": sum(timing.cpu) / len(timing.cpu) / images,
        "fastsiam_is_times_as_fast": timing.median / ours.median,
    }


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)


def _convert(config: ConvertConfig) -> None:
    convert("folder", config, Silent())


def _ffcv(source: Path, target: Path, workers: int, quality: int) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    image = RGBImageField(write_mode="jpg", jpeg_quality=quality)
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        writer = DatasetWriter(
            str(target), {"image": image, "label": IntField()}, num_workers=workers
        )
        writer.from_indexed_dataset(ImageFolder(str(source)))
    for process in multiprocessing.active_children():
        process.join()  # or their processor time counts for the next case


def main() -> None:
    """Measure from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of class folders")
    parser.add_argument("--copies", type=int, default=1, help="repeat the images so many times")
    parser.add_argument(
        "--tar", action="store_true", help="read from one tar of the images that keep their bytes"
    )
    parser.add_argument("--repeats", type=int, default=5, help="how often each is timed")
    parser.add_argument("--json", type=Path, help="write the record there too")
    options = parser.parse_args()
    record = measure(
        options.data, copies=options.copies, as_tar=options.tar, repeats=options.repeats
    )
    print(table(record))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
