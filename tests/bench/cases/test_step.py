"""All variants of a training step give the same weights and report their actual settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from fastsiam.bench.cases.methods import lightly_step
from fastsiam.bench.cases.step import (
    Stepper,
    TrainingSetup,
    authors_step,
    step_of,
    training_setup,
)
from fastsiam.bench.config import VARIANTS, BenchConfig
from fastsiam.bench.session import session
from fastsiam.config import DataConfig, TrainConfig
from fastsiam.errors import BackendError
from tests.configs import with_settings
from tests.conftest import import_or_skip


def config_of(bench_config: BenchConfig, variant: str) -> TrainConfig:
    with session(bench_config) as bench_session:
        config = bench_session.train_config(8, **VARIANTS[variant])
    return replace(config, data=DataConfig(data=bench_config.data, pipeline="memory", workers=0))


@pytest.mark.parametrize("begin", [authors_step, lightly_step])
def test_step_of_others_gives_same_weights(
    begin: Callable[[TrainingSetup], Stepper], bench_config: BenchConfig
) -> None:
    """From the same weights, on the same batches, both in float32."""
    if begin is lightly_step:
        import_or_skip("lightly", "peers")
    setup = training_setup(config_of(bench_config, "plain"))
    steppers = step_of(setup), begin(setup)
    weights = [list(stepper.method.parameters()) for stepper in steppers]
    with torch.no_grad():
        for one, other in zip(*weights, strict=True):
            other.copy_(one)
    before = nn.utils.parameters_to_vector(weights[0]).detach().clone()
    for batch in setup.loader.epoch(0):
        for stepper in steppers:
            stepper.take(batch)
    ours, theirs = (nn.utils.parameters_to_vector(one).detach() for one in weights)
    assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    assert (ours - before).norm() > 100 * (ours - theirs).norm()


def test_authors_step_is_for_simsiam_alone(bench_config: BenchConfig) -> None:
    config = with_settings(config_of(bench_config, "authors"), encoder_momentum=0.99)
    with pytest.raises(BackendError, match="the authors' step is for SimSiam, not for"):
        authors_step(training_setup(config))


def test_recorded_settings_are_resolved(
    bench_config: BenchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = training_setup(config_of(bench_config, "eager"))
    settings = step_of(setup).settings
    assert settings["numerics"]["precision"] in ("bf16", "fp32")  # "auto" is resolved
    assert settings["step"]["compile"] == "off"
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[settings["numerics"]["precision"]]
    assert setup.facts == {"precision": dtype, "batch": 8, "ranks": 1}
    # An uncompiled step must not be recorded as a compiled one.
    monkeypatch.setattr("fastsiam.train.step.compile_failure", lambda _: "no compiler")
    with pytest.raises(BackendError, match="no compiler"):
        step_of(training_setup(config_of(bench_config, "plain-compiled")))
