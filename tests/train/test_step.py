"""The training step: optimisations do not change its results."""

from __future__ import annotations

import resource
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fastsiam.config import TrainConfig
from fastsiam.errors import CheckpointError, DeviceError
from fastsiam.model.numerics import keep_freed_memory
from fastsiam.train.command import preflight
from fastsiam.train.step import TrainingStep
from tests import rank_jobs
from tests.configs import with_settings
from tests.processes import Forked
from tests.train.runs import CPU


def test_recomputing_activations_saves_memory_and_does_not_change_step() -> None:
    saved_bytes = Counter[float]()

    def steps(activation_memory: float) -> dict[str, Any]:
        def note(tensor: Tensor) -> Tensor:
            saved_bytes[activation_memory] += tensor.nbytes
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            return rank_jobs.steps(0, 1, activation_memory=activation_memory)

    torch.testing.assert_close(steps(0.5), steps(1.0), atol=0, rtol=0)
    assert saved_bytes[0.5] < 0.5 * saved_bytes[1.0]


@pytest.mark.parametrize("kept", [True, False])
def test_keep_freed_memory_avoids_page_faults(kept: bool) -> None:
    """Count page faults of the tenth large tensor: almost none if it reuses the ninth's memory."""
    result = Forked(count_faults, kept).wait()
    assert result.returncode == 0, result.stderr
    assert (int(result.stdout) < 100) == kept, result.stdout  # the tensor has 16,384 pages


def count_faults(keep: bool) -> None:
    """Print the page faults of the tenth large tensor; runs in a separate process."""

    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    if keep:
        keep_freed_memory()
    for _ in range(10):
        before = faults()
        torch.empty(2**26, dtype=torch.uint8).fill_(1)
    print(faults() - before, flush=True)


def test_state_of_other_network_is_one_line_error() -> None:
    """Versions of timm may name layers differently."""
    step = TrainingStep(rank_jobs.CONFIG, rank_jobs.make_method(), CPU, steps_per_epoch=10)
    state = step.state()
    state["model"] = {f"backbone.{name}": x for name, x in state["model"].items()}
    with pytest.raises(CheckpointError, match=r"does not match resnet\d+ .*Missing key") as caught:
        step.load(**state)
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


def test_preflight_rejects_invalid_step_settings(small: TrainConfig) -> None:
    graphs = {"compile": "on", "cuda_graphs": True}
    for settings, world, message in (
        ({"compile": "yes"}, 1, "compile must be one of auto, on, off"),
        ({"activation_memory": 1.5}, 1, "activation-memory must be at least 0 and at most 1"),
        (graphs | {"compile": "off"}, 1, "cuda-graphs needs"),
        (graphs | {"accumulate": 2}, 1, "cuda-graphs cannot be combined with accumulate"),
        ({"sync_bn_ranks": 3}, 2, "2 ranks cannot be divided into groups of 3"),
        (
            {"sync_bn": False, "bn_images": 3},
            2,
            r"4 images that a rank processes .* groups of 3: choose",
        ),
        ({"bn_images": 2}, 1, "bn-images 2 needs --no-sync-bn; for --sync-bn, pass --bn-images 0"),
    ):
        with pytest.raises(ValueError, match=message):
            preflight(with_settings(small, **settings), world=world)
    preflight(with_settings(small, sync_bn=False, sync_bn_ranks=3), world=2)  # it has no effect
    with pytest.raises(DeviceError, match="needs exactly one GPU; pass --no-cuda-graphs"):
        preflight(with_settings(small, **graphs), world=1)
