"""Records of evaluations: ``RUN/eval/*.json``, which the report and the model card show.

A record says what was evaluated (``network``, with a hash of its weights), on which images
(``data``, ``images``), by which ``protocol``, what came out (``results``, ``per_class``) and where
(``environment``); ``summary`` says it in lines for people.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastsiam.atomic import why, written_whole
from fastsiam.distributed import Place
from fastsiam.errors import DataError, FastSiamError


def keep_record(record: dict[str, Any], path: Path | None, elsewhere: str, place: Place) -> None:
    """Write a record, by rank 0 alone.

    Args:
        record: plain JSON values.
        path: in its run's ``eval`` folder, if the network is of a run.
        elsewhere: where the user wants it too, "" for nowhere.
        place: this rank.

    Raises:
        FastSiamError: it cannot be written.
    """
    if not place.leads:
        return
    text = json.dumps(record, indent=2) + "\n"
    for target in filter(None, (path, Path(elsewhere) if elsewhere else None)):
        try:
            with written_whole(target) as temporary:
                temporary.write_text(text)
        except OSError as error:
            raise FastSiamError(f"cannot write {target}: {why(error)}") from error


def read_records(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run's evaluations, in the order of their files' names.

    Raises:
        DataError: a file is no record.
    """
    found = []
    for path in sorted((run / "eval").glob("*.json")):
        try:
            record = json.loads(path.read_text())
            found.append({**record, "summary": record["summary"]})
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is no record of an evaluation: move it elsewhere") from error
    return found
