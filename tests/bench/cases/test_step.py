"""All variants of a training step give the same weights and report their actual settings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fastsiam.bench.cases.step import authors_step, step_of, training_setup
from fastsiam.bench.config import VARIANTS, BenchConfig
from fastsiam.bench.session import session
from fastsiam.config import DataConfig, TrainConfig
from fastsiam.errors import BackendError
from tests.configs import with_settings


def config_of(bench_config: BenchConfig, variant: str) -> TrainConfig:
    with session(bench_config) as bench_session:
        config = bench_session.train_config(8, **VARIANTS[variant])
    return replace(config, data=DataConfig(data=bench_config.data, pipeline="memory", workers=0))


def test_authors_step_gives_same_weights(bench_config: BenchConfig) -> None:
    """The authors' loop and fastsiam's, both in float32, give the same weights."""
    config = config_of(bench_config, "authors")
    setup = training_setup(config)
    batches = list(setup.loader.epoch(0))
    weights = []
    for stepper in (step_of(setup), authors_step(setup)):
        for batch in batches:
            stepper.take(batch)
        weights.append(torch.cat([p.detach().flatten() for p in stepper.method.parameters()]))
    assert torch.allclose(weights[0], weights[1], rtol=1e-3, atol=1e-4)
    with pytest.raises(BackendError, match="the authors' step is for SimSiam, not for"):
        authors_step(training_setup(with_settings(config, encoder_momentum=0.99)))


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
