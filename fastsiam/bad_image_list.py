"""The list of a run's bad images, in its folder; ``fastsiam.pipelines.bad_images`` makes it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fastsiam.config.plain import from_plain
from fastsiam.errors import CheckpointError
from fastsiam.files import parsed_json

FILE = "bad_images.jsonl"
"""An object a line, with the fields of ``BadImage``."""


@dataclass(frozen=True, slots=True, order=True)
class BadImage:
    """One image that is bad."""

    step: int
    """Steps of the run that were done when it was to be shown for the first time, and could not."""
    index: int
    """Its position in the data set, as the run has it."""
    name: str
    """Its name within the data set."""
    reason: str
    """What is wrong with it."""
    epoch: int
    """Of that step, from 0."""


def read_bad_images(run: Path) -> list[BadImage]:
    """Read the list of a run's folder; empty if there is none.

    Raises:
        CheckpointError: it is damaged.
    """
    path = run / FILE
    try:
        return parsed(path.read_text("utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}, the list of the run's bad images, cannot be read ({error}): restore it, or "
            "delete it to have them found again"
        ) from error


def written(known: Iterable[BadImage]) -> str:
    """Return the text of a list."""
    return "".join(f"{json.dumps(dataclasses.asdict(own))}\n" for own in known)


def parsed(text: str) -> list[BadImage]:
    """Read the text of a list.

    Raises:
        ValueError: it is none.
    """
    try:
        return [from_plain(BadImage, parsed_json(x), where="image") for x in text.splitlines()]
    except TypeError as error:
        raise ValueError(f"it lacks fields: {error}") from error
