"""Training step of each method on ready tensors, compared with a loop of lightly's components.

Network, heads, tensors and settings are the same. fastsiam's step is measured in some variants of
``fastsiam bench step``; "plain" is float32, NCHW and not compiled, like lightly's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import metadata

import torch

from fastsiam.bench.cases.step import Stepper, TrainingSetup, build_step, step_of
from fastsiam.bench.config import AUTHORS, ONLY_ON_GPU, SYNC_BN, VARIANTS
from fastsiam.bench.libraries import require_lightly
from fastsiam.bench.measurements import Record, Row
from fastsiam.bench.runner import compare
from fastsiam.bench.session import Session
from fastsiam.config import METHOD_CONFIGS, TrainConfig
from fastsiam.views.batch import Batch

_DEFAULT_VARIANTS = ("default", "eager", "plain")
"""Default variants of fastsiam's step."""


def measure(session: Session) -> list[Record]:
    """Measure the methods one after the other, fastsiam's and lightly's interleaved."""
    return [
        one for name in session.config.names("methods") for one in _measure_method(session, name)
    ]


def _measure_method(session: Session, name: str) -> list[Record]:
    """Measure a method, with lightly's step as the baseline."""
    reference = f"{name}, lightly"

    def row(
        row_name: str, variant: str, begin: Callable[[TrainingSetup], Stepper] = step_of
    ) -> Row:
        config = _config(session, name, variant)
        return Row(
            case="methods",
            name=row_name,
            build=partial(build_step, config=config, begin=begin),
            baseline=(reference, reference),
            in_the_clock="forward, backward, optimizer, momentum encoder and queue, on tensors "
            "that are ready",
            config=session.settings(batch=session.trained_batch, model=config.to_dict()["model"]),
        )

    try:
        rows = [row(reference, "plain", lightly_step)]
    except ValueError as error:  # the method does not support the recipe's number of views
        session.skip(name, error)
        return []
    for variant in session.config.variants or _DEFAULT_VARIANTS:
        if variant in (SYNC_BN, AUTHORS):
            session.skip(f"{name}, {variant}", "only bench step measures it")
        elif session.gpu or variant not in ONLY_ON_GPU:
            rows.append(row(f"{name}, {variant}", variant))
        else:
            session.skip(f"{name}, {variant}", "needs a GPU")
    return compare(session, rows, apart=session.gpu)


def _config(session: Session, name: str, variant: str) -> TrainConfig:
    """Return the recipe with a method; one other than the recipe's has its default settings."""
    settings = {"compile": "on"} | VARIANTS[variant]
    config = session.train_config(session.trained_batch, **settings)
    if config.model.method.name == name:
        return config
    return replace(config, model=replace(config.model, method=METHOD_CONFIGS[name]()))


def lightly_step(own: TrainingSetup) -> Stepper:
    """Return the step of lightly's examples: float32, eager, one forward pass per view.

    ``channels_last`` follows the settings, whatever the layout of the batches.

    Raises:
        BackendError: lightly is not installed, or does not support a setting.
    """
    require_lightly()
    from fastsiam.bench.lightly_methods import Step

    torch.manual_seed(0)
    step = Step(own.config, own.loader.steps, own.place.device)

    def take(batch: Batch) -> None:
        step(batch.views, at=0)

    settings = {
        "precision": "fp32",
        "channels_last": step.layout == torch.channels_last,
        "compile": "off",
        "lightly": metadata.version("lightly"),
    }
    return Stepper(take, step.model, settings)
