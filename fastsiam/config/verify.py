"""Settings of ``fastsiam verify``; fastsiam/cli/options.py makes its command line out of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from .checks import require
from .data import PipelineSetting

_PIPELINES = ("run", *get_args(PipelineSetting))


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyConfig:
    """Verify: what of a run is computed again."""

    step: int = 0
    (
        "Look at the log line of this step alone (the first is 1), and list the images that the "
        "step was trained on; 0 is all lines."
    )
    data: str = ""
    """Data as of train, if they lie elsewhere now; default: the run's."""
    image_column: str = ""
    """Column of the images, as of train; default: the run's, for the run's own data."""
    label_column: str = ""
    """Column of the labels, as of train; default: the run's, for the run's own data."""
    pipeline: str = ""
    (
        "Have this pipeline make the batches again and compare what it shows; run is the run's "
        "own. By default no image is decoded: order and draws are computed, from images' sizes."
    )
    workers: int = -1
    """Loader processes or threads of that pipeline; -1 is one for each core."""

    def __post_init__(self) -> None:
        require(self.step >= 0, f"step must be 1 or more, or 0 for all, not {self.step}")
        require(self.workers >= -1, f"workers must be -1 or more, not {self.workers}")
        require(
            not self.pipeline or self.pipeline in _PIPELINES,
            f"pipeline must be one of {', '.join(_PIPELINES)}, not {self.pipeline!r}",
        )
