"""Settings of ``fastsiam verify``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .data import PipelineSetting
from .setting import Config, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyConfig(Config):
    """Verify: what of a run is computed again."""

    step: int = setting(
        0, "Check only the log line of this step, and list its images; 0: all lines.", at_least=0
    )
    data: str = setting("", "Data, as of train, if they have moved. Default: the run's.")
    image_column: str = setting("", "Image column. Default: the run's, for its own data.")
    label_column: str = setting("", "Label column. Default: the run's, for its own data.")
    pipeline: Literal["", "run", PipelineSetting] = setting(
        "", "Also compare the batches of this pipeline (run: the run's). Default: decode no images."
    )
    workers: int = setting(-1, "Loader processes or threads; -1: one for each core.", at_least=-1)
