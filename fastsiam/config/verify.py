"""Settings of ``fastsiam verify``; fastsiam/cli/options.py makes its command line out of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from .checks import require
from .data import PipelineSetting
from .setting import Config, setting

_PIPELINES = ("run", *get_args(PipelineSetting))


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyConfig(Config):
    """Verify: what of a run is computed again."""

    step: int = setting(
        0,
        "Look at the log line of this step alone (the first is 1), and list the images that the "
        "step was trained on; 0 is all lines.",
        at_least=0,
    )
    data: str = setting("", "Data as of train, if they lie elsewhere now; default: the run's.")
    image_column: str = setting(
        "", "Column of the images, as of train; default: the run's, for the run's own data."
    )
    label_column: str = setting(
        "", "Column of the labels, as of train; default: the run's, for the run's own data."
    )
    pipeline: str = setting(
        "",
        "Have this pipeline make the batches again and compare what it shows; run is the run's "
        "own. By default no image is decoded: order and draws are computed, from images' sizes.",
    )
    workers: int = setting(
        -1, "Loader processes or threads of that pipeline; -1 is one for each core.", at_least=-1
    )

    def check(self) -> None:
        """Refuse settings that contradict each other."""
        require(
            not self.pipeline or self.pipeline in _PIPELINES,
            f"pipeline must be one of {', '.join(_PIPELINES)}, not {self.pipeline!r}",
        )
