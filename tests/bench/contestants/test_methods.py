"""lightly's loop and our step are the same training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fastsiam.bench.config import BenchConfig
from fastsiam.bench.contestants.methods import lightly_step
from fastsiam.bench.contestants.step import fed, step_of
from fastsiam.bench.session import session
from fastsiam.bench.variants import VARIANTS
from fastsiam.config import METHOD_CONFIGS, DataConfig

pytest.importorskip("lightly", reason="needs lightly: pip install lightly")


@pytest.mark.parametrize("name", ["simsiam", "simclr"])
def test_lightlys_step_is_the_same_training(name: str, little: BenchConfig) -> None:
    """From the same weights, on the same batches, both come to the same weights."""
    with session(little) as own:
        config = own.train_config(8, **VARIANTS["plain"].settings)
        config = replace(config, data=DataConfig(data=little.data, pipeline="memory", workers=0))
    if name != "simsiam":
        config = replace(config, model=replace(config.model, method=METHOD_CONFIGS[name]()))
    place = fed(config)
    ours, theirs = step_of(place), lightly_step(place)
    weights = [list(stepper.method.parameters()) for stepper in (ours, theirs)]
    with torch.no_grad():
        for one, other in zip(*weights, strict=True):
            other.copy_(one)
    before = nn.utils.parameters_to_vector(weights[0]).detach().clone()
    for batch in place.loader.epoch(0):
        for stepper in (ours, theirs):
            stepper.take(batch)
    after, other = (nn.utils.parameters_to_vector(own).detach() for own in weights)
    assert (after - before).norm() > 100 * (after - other).norm()
