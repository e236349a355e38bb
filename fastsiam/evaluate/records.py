"""Records of evaluations: ``RUN/eval/*.json``, which the report and the model card show.

A record says what was evaluated (``network``, with a hash of its weights), on which images
(``data``, ``images``), by which ``protocol``, what came out (``results``, ``per_class``) and where
(``environment``); ``summary`` says it in lines for people.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fastsiam.errors import DataError, FastSiamError
from fastsiam.files import why, written_whole


def check_targets(*targets: Path | None) -> None:
    """Make the folders of files that will be written, before hours are spent on what goes in.

    Raises:
        FastSiamError: one cannot be written.
    """
    for target in filter(None, targets):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            possible = os.access(target.parent, os.W_OK) and not target.is_dir()
        except OSError:
            possible = False
        if not possible:
            raise FastSiamError(f"cannot write {target}: it is a folder, or not yours to write")


def keep_record(record: dict[str, Any], *targets: Path | None) -> None:
    """Write a record to some files.

    Raises:
        FastSiamError: one cannot be written; the others were tried.
    """
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    failed = []
    for target in filter(None, targets):
        try:
            with written_whole(target) as temporary:
                temporary.write_text(text)
        except OSError as error:
            failed.append(f"cannot write {target}: {why(error)}")
    if failed:
        raise FastSiamError("; ".join(failed))


_PARTS = ("kind", "network", "data", "images", "protocol", "results", "summary", "date")


def read_records(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run's evaluations, in the order of their files' names.

    Raises:
        DataError: a file is no record.
    """
    found = []
    for path in sorted((run / "eval").glob("*.json")):
        try:
            record = json.loads(path.read_text())
            found.append({**record, **{part: record[part] for part in _PARTS}})
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is no record of an evaluation: move it elsewhere") from error
    return found
