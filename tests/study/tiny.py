"""A study scale that trains in seconds, and a function that runs studies like the command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fastsiam.config.study import StudyRunConfig
from fastsiam.errors import Interrupted
from fastsiam.study import execution
from fastsiam.study.catalogue import STUDIES
from fastsiam.study.runs import Run, runs_of
from fastsiam.study.scales import Scale
from tests.configs import with_settings
from tests.conftest import small_config
from tests.processes import fork_programs


def tiny(*, epochs: int = 2, lr: float = 0.5) -> Scale:
    """Return a scale on 24 images of 3 classes."""
    base = small_config(Path("images"), Path("run"))
    return Scale(
        name="cifar",
        title="a ResNet-10 on stripes",
        recipe="demo",
        base=with_settings(base, out="", epochs=epochs, knn_every=epochs, lr=lr),
        images=24,
        classes=3,
        measure="kNN top-1",
    )


def tiny_runs(data: Path, out: Path, scale: Scale, *, study: str = "stop-gradient") -> list[Run]:
    data_scale = scale.on(str(data), gpus=1, device="cpu")
    return runs_of([STUDIES[study]], data_scale, out, seeds=[0])


def study(runs: Sequence[Run], config: StudyRunConfig, failing: str = "") -> None:
    """Do runs in this process, a ``Forked`` one, and exit like the command after a signal.

    Args:
        failing: name of a run's folder; that run fails at once.
    """
    usual = execution._command
    says = "print('error: no room'); print('step 1: a line of another process')"
    fails = [sys.executable, "-c", f"{says}; raise SystemExit(2)"]
    execution._command = lambda run: fails if run.folder.name == failing else usual(run)
    fork_programs()
    try:
        execution.execute_runs(runs, config)
    except Interrupted as error:
        print(error)
        raise SystemExit(error.exit_code) from error
