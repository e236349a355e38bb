"""What a run's ``config.json`` says of how the run was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastsiam.errors import DataError
from fastsiam.files import explained, parsed_json

from .train import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """A run's settings and machine, written by this version or an older one."""

    recipe: str
    config: TrainConfig
    """The settings as they were used."""
    environment: dict[str, Any]
    """Versions and machine (``fastsiam.environment``)."""
    branch: Mapping[str, Any] | None
    """Where the run branched off another; None if it did not."""
    compiled: bool | None
    """Whether the steps were compiled; None if that is not recorded."""

    @classmethod
    def read(cls, run: Path) -> RunSettings:
        """Read the file in a run's folder.

        Raises:
            DataError: it is missing or damaged.
        """
        path = run / "config.json"
        with explained(DataError, f"cannot read the settings of the run, {path}"):
            content = path.read_bytes()
        try:
            found = parsed_json(content)
            return cls(
                recipe=found["recipe"],
                config=TrainConfig.from_dict(found["config"]),
                environment=found["environment"],
                branch=found.get("branch"),
                compiled=found.get("compiled"),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"cannot read the settings of the run, {path}: {error}") from error
