"""A scale of seconds, and its runs as a user's process does them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fastsiam.config import (
    AugmentConfig,
    DataConfig,
    MonitorConfig,
    NumericsConfig,
    OptimConfig,
    StepConfig,
    TrainConfig,
)
from fastsiam.config.study import StudyRunConfig
from fastsiam.errors import FastSiamError, Interrupted
from fastsiam.study import runner
from fastsiam.study.catalogue import STUDIES
from fastsiam.study.runs import Run, runs_of
from fastsiam.study.scales import Scale
from tests.configs import model_of
from tests.processes import Forked, fork_programs


def tiny(*, epochs: int = 2, **optim: float) -> Scale:
    """Return a scale on 24 images of 3 classes."""
    base = TrainConfig(
        augment=AugmentConfig.alike(crop=16),
        model=model_of(
            backbone="resnet10", stem="cifar", width=4, projector_layers=2, dim=16, predictor_dim=4
        ),
        optim=replace(OptimConfig(epochs=epochs, batch=8, lr=0.5), **optim),  # type: ignore[arg-type]
        numerics=NumericsConfig(precision="fp32"),
        step=StepConfig(compile="off"),
        monitor=MonitorConfig(knn_every=epochs, knn_k=5, eval_resize=16),
    )
    return Scale(
        name="cifar",
        title="a ResNet-10 on stripes",
        recipe="demo",
        base=base,
        images=24,
        classes=3,
        measure="kNN top-1",
    )


def tiny_runs(
    data: Path, out: Path, scale: Scale, *, study: str = "stop-gradient", seeds: int = 1
) -> list[Run]:
    """Return a study's runs at such a scale."""

    base = replace(
        scale.base,
        data=DataConfig(data=str(data), pipeline="memory", workers=0),
        run=replace(scale.base.run, device="cpu"),
    )
    return runs_of([STUDIES[study]], replace(scale, base=base), out, seeds=range(seeds))


def do_in_process(
    runs: Sequence[Run], config: StudyRunConfig, *, failing: str = ""
) -> subprocess.CompletedProcess[str]:
    """Do runs in a process of its own, as the command does; ``failing`` as in ``study``."""
    return Forked(study, runs, config, failing).wait()


def study(runs: Sequence[Run], config: StudyRunConfig, failing: str = "") -> None:
    """Do runs in this process, and end as the command does.

    The run in the folder of this name fails at once.
    """
    usual = runner._command
    fails = [sys.executable, "-c", "print('error: no room'); raise SystemExit(2)"]
    runner._command = lambda run: fails if run.folder.name == failing else usual(run)
    fork_programs()
    try:
        runner.do_runs(runs, config)
    except Interrupted as error:
        print(error)
        raise SystemExit(error.exit_code) from error
    except FastSiamError as error:
        print(error)
        raise SystemExit(1) from error
