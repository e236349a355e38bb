"""Settings of ``fastsiam verify``."""

from __future__ import annotations

from dataclasses import dataclass

from .setting import Config, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyConfig(Config):
    """Verify: what of a run is computed again."""

    step: int = setting(
        0, "Verify only the log line of this step, from 1, and list its images; 0: all.", at_least=0
    )
    data: str = setting("", "Data, as for train, if they have moved. Default: the run's.")
    image_column: str = setting("", "Column with the images. Default: the run's, for its own data.")
    label_column: str = setting("", "Column with the labels. Default: the run's, for its own data.")
