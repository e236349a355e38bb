"""What ``fastsiam convert`` does: runs a conversion or a check and tells the user about it."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

from fastsiam.config import ConvertConfig
from fastsiam.console import Console, FileProgress, duration
from fastsiam.errors import Interrupted
from fastsiam.pipelines.convert import BadImagesError, Kind, Written, convert, verify


def convert_data(kind: Kind, config: ConvertConfig) -> list[Written]:
    """Convert a data set, show the progress, and print what was written.

    Raises:
        BadImagesError: after having listed the bad images.
        DataError: the source cannot be read, or the files not be written.
        Interrupted: Ctrl-C or SIGTERM.
    """
    watcher = FileProgress(Console())
    began = time.monotonic()
    try:
        with _stoppable("the same command goes on from here"):
            written = convert(kind, config, watcher)
    except BadImagesError as error:
        watcher.end()
        for where, reason in error.bad:
            print(f"{where}: {reason}", file=sys.stderr)
        raise
    finally:
        watcher.end()
    for file in written:
        print(_summary(file))
    seconds = time.monotonic() - began
    took = f"{seconds:.1f} s" if seconds < 10 else duration(seconds)
    print(f"in {took}; check it with: fastsiam convert verify {written[0].path.parent}")
    return written


def convert_demo(config: ConvertConfig) -> None:
    """Make the demo's images and convert them."""
    from fastsiam.demo import make_images_once

    out = Path(config.out) if config.out else config.root / "demo"
    source = Path(config.source) if config.source else out / "images"
    make_images_once(source)
    convert_data("folder", replace(config, source=str(source), out=str(out)))


def verify_data(path: Path, *, decode: bool, workers: int) -> bool:
    """Check converted files, print what was found, and return whether all is well."""
    watcher = FileProgress(Console())
    try:
        with _stoppable("nothing was changed"):
            reports = verify(
                path,
                decode=decode,
                workers=workers,
                begin=watcher.begin,
                progress=watcher.progress,
            )
    finally:
        watcher.end()
    for report in reports:
        for line in report.bad:
            print(line, file=sys.stderr)
        state = f"{len(report.bad):,} faults" if report.bad else "whole"
        print(
            f"{report.path}: {state}; {report.images:,} images, "
            f"{report.bytes / 1e6:,.1f} MB, checked: {report.checked or 'nothing'}"
        )
    return not any(report.bad for report in reports)


def _summary(file: Written) -> str:
    about = file.about
    stored = ", ".join(f"{count:,} {how}" for how, count in about["stored"].items())
    left_out = f"; {len(about['left_out']):,} bad ones left out" if about["left_out"] else ""
    return (
        f"{file.path}: {about['images']:,} images of {about['classes']:,} classes, "
        f"{about['bytes'] / 1e6:,.1f} MB ({stored}){left_out}"
    )


@contextlib.contextmanager
def _stoppable(then: str) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into one line and the usual exit codes."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Interrupted(f"stopped; {then}", exit_code=128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
