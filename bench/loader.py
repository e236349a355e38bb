"""How fast the pipelines load, beside torchvision's and beside the bare decoding of the same JPEGs.

    python -m fastsiam.bench.loader --data DIR [--copies N] [--crop 224] [--json FILE]

The images are measured as they are, stored with a shorter side of 256, and as pixels of that size;
torchvision's pipeline reads the files as they are, as its users do. "views" is the whole work:
decode, both crops, colours, blur, normalised float32 on the training device; "crops" is what a GPU
leaves to the host: both crops, uint8. "decode" is libjpeg-turbo alone, in as many threads.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, get_args

import torch

from fastsiam.batch import Loader
from fastsiam.bench.images import Silent, gather
from fastsiam.bench.measure import Timing, in_turns
from fastsiam.config import AugmentConfig, ConvertConfig, DataConfig, Pipeline
from fastsiam.info import environment
from fastsiam.pipelines import build_loader
from fastsiam.pipelines.convert import convert
from fastsiam.pipelines.store.beton import RAW, BetonStore
from fastsiam.pipelines.workers import count as count_workers

SHORT_SIDE = 256
STORED = {
    "original": ConvertConfig(),
    f"short side {SHORT_SIDE}": ConvertConfig(short_side=SHORT_SIDE),
    f"pixels {SHORT_SIDE}": ConvertConfig(short_side=SHORT_SIDE, raw=True),
}
BASELINE = "torchvision views"
PIPELINES = tuple(name for name in get_args(Pipeline) if name not in {"torchvision", "synthetic"})


@dataclass(frozen=True)
class Case:
    """One thing to measure: an epoch's work each time it is called."""

    stored: str
    pipeline: str
    what: str
    run: Callable[[], None]

    @property
    def name(self) -> str:
        """Return what it is called in a table."""
        name = f"{self.pipeline} {self.what}"
        return name if self.stored == "original" else f"{name}, {self.stored}"


def measure(
    data: Path,
    *,
    copies: int = 1,
    crop: int = 224,
    batch: int = 64,
    workers: int = -1,
    repeats: int = 5,
    pipelines: Sequence[Pipeline] = PIPELINES,
    stored: Sequence[str] = tuple(STORED),
    blur: bool = True,
    device: str = "cpu",
) -> dict[str, Any]:
    """Time all pipelines on the same images, in turns.

    Args:
        data: a folder of class folders.
        copies: repeat the images so many times under other names: the epochs become longer.
        crop: side of the views, in pixels.
        batch: images in a batch.
        workers: processes or threads that load; -1 is one for each core.
        repeats: how often each case is timed.
        pipelines: which, beside torchvision's.
        stored: in which forms, of ``STORED``.
        blur: whether half of the views are blurred.
        device: where the views shall lie.

    Returns:
        A bench record.
    """
    augment = AugmentConfig(crop=crop, blur_p=0.5 if blur else 0.0)
    with tempfile.TemporaryDirectory(prefix="fastsiam-bench-") as folder:
        source = gather(data, copies, Path(folder) / "source")
        converted = {name: _convert(source, Path(folder), name) for name in stored}
        open_loaders: list[Loader] = []

        def build(pipeline: Pipeline, path: Path) -> Any:
            settings = DataConfig(data=str(path), pipeline=pipeline, workers=workers)
            loader = build_loader(settings, augment, batch=batch, device=device)
            open_loaders.append(loader)
            return loader

        torchvision = build("torchvision", source)
        images = torchvision.steps * batch
        cases = [Case("original", "torchvision", "views", _epochs(torchvision.epoch))]
        for name, path in converted.items():
            store = BetonStore(path / "train.beton")
            if not (store.modes == RAW).any():
                cases.append(Case(name, "libjpeg-turbo", "decode", _decode(store, workers, images)))
            for pipeline in pipelines:
                loader = build(pipeline, path)
                if hasattr(loader, "crops"):
                    cases.append(Case(name, pipeline, "crops", _epochs(loader.crops)))
                cases.append(Case(name, pipeline, "views", _epochs(loader.epoch)))
        try:
            timings = in_turns(
                {case.name: case.run for case in cases}, repeats=repeats, before=lambda: None
            )
        finally:
            for loader in open_loaders:
                loader.close()
    return {
        "case": "loader",
        "images": images,
        "n": repeats,
        "workers": count_workers(workers),
        "results": [_result(case, cases, timings, images) for case in cases],
        "in_the_clock": "one epoch, from its first request to its last batch on the device; "
        "not: opening the data, compiling, the first epoch",
        "config": {
            "data": data.name,
            "copies": copies,
            "crop": crop,
            "batch": batch,
            "blur": blur,
            "device": device,
        },
        "environment": environment(),
        "date": datetime.date.today().isoformat(),
    }


def table(record: dict[str, Any]) -> str:
    """Return a record as a Markdown table."""
    lines = [
        f"{record['images']:,} images an epoch, {record['workers']} workers, medians of "
        f"{record['n']} epochs in turns",
        "",
        "| | images/s | spread | times torchvision | CPU ms an image | share of bare decoding |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for result in record["results"]:
        share = result["share_of_ceiling"]
        lines.append(
            f"| {result['name']} | {result['images_per_second']:,.0f} | ±{result['spread']:.0%} | "
            f"{result['ratio_to_torchvision']:.1f} | "
            f"{1000 * result['cpu_seconds_per_image']:.2f} | "
            f"{'' if share is None else f'{share:.0%}'} |"
        )
    return "\n".join(lines)


def _result(
    case: Case, cases: Sequence[Case], timings: dict[str, Timing], images: int
) -> dict[str, Any]:
    timing, baseline = timings[case.name], timings[BASELINE]
    ceilings = [  # the memory pipeline decodes nothing
        timings[other.name].median
        for other in cases
        if other.what == "decode" and other.stored == case.stored and case.pipeline != "memory"
    ]
    return {
        "name": case.name,
        "stored": case.stored,
        "pipeline": case.pipeline,
        "what": case.what,
        "images_per_second": images / timing.median,
        "spread": timing.spread,
        "all_seconds": timing.wall,
        "ratio_to_torchvision": baseline.median / timing.median,
        "share_of_ceiling": ceilings[0] / timing.median if ceilings else None,
        "cpu_seconds_per_image": sum(timing.cpu) / len(timing.cpu) / images,
    }


def _convert(source: Path, folder: Path, name: str) -> Path:
    settings = STORED[name]
    out = folder / name.replace(" ", "-")
    values = {field: getattr(settings, field) for field in ("short_side", "raw")}
    convert("folder", ConvertConfig(source=str(source), out=str(out), **values), Silent())
    return out


def _epochs(epoch: Callable[[int], Iterator[Any]]) -> Callable[[], None]:
    """Return a function that goes through the next epoch each time."""
    numbers = count()

    def run() -> None:
        for _ in epoch(next(numbers)):
            pass
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return run


def _decode(store: BetonStore, workers: int, images: int) -> Callable[[], None]:
    """Return a function that decodes the images and does nothing with them."""
    from fastsiam.pipelines.ffcv_backend import Decompressor

    threads = max(1, count_workers(workers))
    largest = int((store.height.astype(int) * store.width).max())
    decompressors = [Decompressor(largest) for _ in range(threads)]

    def run() -> None:
        def work(decompressor: Decompressor, first: int) -> None:
            for index in range(first, images, threads):
                decompressor.decode(store, index)

        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(work, d, i) for i, d in enumerate(decompressors)]:
                done.result()

    return run


def main() -> None:
    """Measure from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of class folders")
    parser.add_argument("--copies", type=int, default=1, help="repeat the images so many times")
    parser.add_argument("--crop", type=int, default=224, help="side of the views")
    parser.add_argument("--batch", type=int, default=64, help="images in a batch")
    parser.add_argument("--workers", type=int, default=-1, help="-1 is one for each core")
    parser.add_argument("--repeats", type=int, default=5, help="how often each is timed")
    parser.add_argument("--pipelines", default=",".join(PIPELINES), help="beside torchvision")
    parser.add_argument("--stored", default=",".join(STORED), help="forms of the images")
    parser.add_argument("--no-blur", action="store_true", help="as the CIFAR-10 recipe has it")
    parser.add_argument("--device", default="cpu", help="where the views shall lie")
    parser.add_argument("--json", type=Path, help="write the record there too")
    options = parser.parse_args()
    record = measure(
        options.data,
        copies=options.copies,
        crop=options.crop,
        batch=options.batch,
        workers=options.workers,
        repeats=options.repeats,
        pipelines=options.pipelines.split(","),
        stored=options.stored.split(","),
        blur=not options.no_blur,
        device=options.device,
    )
    print(table(record))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
