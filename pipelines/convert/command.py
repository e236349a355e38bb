"""Implementation of ``fastsiam convert``: runs a conversion or a check and prints the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from fastsiam.config import ConvertConfig
from fastsiam.console import Console, duration, format_count
from fastsiam.errors import Interrupted, as_one_line
from fastsiam.files import quote
from fastsiam.pipelines.convert import BadImagesError, Kind, OutputFile, convert, verify
from fastsiam.signals import exit_immediately, handle_stop_signals


def convert_data(kind: Kind, config: ConvertConfig) -> None:
    """Convert a data set, show progress, and print a summary of each file.

    Raises:
        BadImagesError: some images are bad; they have been listed on standard error.
        DataError: the source cannot be read, or a file cannot be written.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP.
    """
    start = time.monotonic()
    try:
        with stoppable("run the same command again to resume"):
            outputs = convert(kind, config, Console())
    except BadImagesError as error:
        for location, reason in error.bad:
            print(as_one_line(f"{location}: {reason}"), file=sys.stderr)
        raise
    for file in outputs:
        print(_summary(file))
    out = quote(outputs[0].path.parent)
    if all(file.existed for file in outputs):
        files = " ".join(quote(file.path) for file in outputs)
        print(f"nothing to do; to convert again, run `rm {files}` first, or choose another --out")
        return
    seconds = time.monotonic() - start
    elapsed = f"{seconds:.1f} s" if seconds < 10 else duration(seconds)
    when, it = ("", "it") if config.part_of[1] == 1 else (" when all parts are there,", "them")
    print(
        f"in {elapsed};{when} check {it} with: fastsiam convert verify {out}; use {it} with: "
        f"--data {out}"
    )


def verify_data(path: Path, *, decode: bool, workers: int) -> bool:
    """Check converted files, print the results, and return whether all files are intact.

    Raises:
        DataError: there is no file to check, or the folder cannot be read.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP.
    """
    with stoppable("nothing was changed"):
        reports = verify(path, decoding=decode, workers=workers, console=Console())
    for report in reports:
        for line in report.bad:
            print(as_one_line(line), file=sys.stderr)
        state = f"NOT intact ({format_count(len(report.bad), 'fault')})" if report.bad else "intact"
        print(
            f"{report.path}: {state}; {format_count(report.images, 'image')}, "
            f"{report.bytes / 1e6:,.1f} MB, checked: {report.checked}"
        )
    return not any(report.bad for report in reports)


def _summary(file: OutputFile) -> str:
    about = file.about
    stored = ", ".join(f"{count:,} {processing}" for processing, count in about["stored"].items())
    left_out = f"; bad images left out: {len(about['left_out']):,}" if about["left_out"] else ""
    plural = "" if about["classes"] == 1 else "es"
    classes = f"of {about['classes']:,} class{plural}" if about["classes"] else "unlabelled"
    prefix = "already exists: " if file.existed else ""
    return (
        f"{prefix}{file.path}: {format_count(about['images'], 'image')} {classes}, "
        f"{about['bytes'] / 1e6:,.1f} MB ({stored}){left_out}"
    )


@contextmanager
def stoppable(then: str) -> Iterator[None]:
    """Raise ``Interrupted`` with the message "stopped; {then}" on Ctrl-C, SIGTERM or SIGHUP.

    A second signal ends the process at once. Ignored signals (``nohup``) stay ignored.
    """

    def stop(number: int) -> NoReturn:
        raise Interrupted(f"stopped; {then}", number)

    with handle_stop_signals(stop, again=exit_immediately):
        yield
