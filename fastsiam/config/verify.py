"""Settings of ``fastsiam verify``; fastsiam/cli/options.py makes its command line out of them."""

from __future__ import annotations

from dataclasses import dataclass

from .setting import Config, setting


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
