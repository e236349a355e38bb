"""The list of bad images in a run's folder, which ``fastsiam.pipelines.bad_images`` writes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fastsiam.config.setting import convert_value
from fastsiam.errors import CheckpointError
from fastsiam.files import parse_json, quote

FILE = "bad_images.jsonl"
"""Name of the list: JSON lines with the fields of ``BadImage``."""


@dataclass(frozen=True, slots=True, order=True)
class BadImage:
    """An image that cannot be decoded."""

    step: int
    """Number of completed steps when the image was first needed."""
    index: int
    """Position in the run's data set."""
    name: str
    """Name within the data set."""
    reason: str
    """Why it cannot be decoded."""
    epoch: int
    """Epoch of that step, from 0."""


def read_bad_images(run: Path) -> list[BadImage]:
    """Read the bad-image list of a run's folder; empty if the file does not exist.

    Raises:
        CheckpointError: the list is corrupt.
    """
    path = run / FILE
    try:
        return parse_list(path.read_text("utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot read the bad-image list {path} ({error}); restore it, or run "
            f"`rm {quote(path)}` to rebuild it"
        ) from error


def format_list(known: Iterable[BadImage]) -> str:
    """Format bad images as JSON lines."""
    return "".join(f"{json.dumps(dataclasses.asdict(image))}\n" for image in known)


def parse_list(text: str) -> list[BadImage]:
    """Parse a bad-image list from JSON lines.

    Raises:
        ValueError: the text is not a list of bad images.
    """
    try:
        return [convert_value(BadImage, parse_json(x), "image") for x in text.splitlines()]
    except TypeError as error:
        raise ValueError(f"fields are missing: {error}") from error
