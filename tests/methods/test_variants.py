"""Runs of every variant of every method: on ranks, compiled, killed, resumed on other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fastsiam.config import TrainConfig
from fastsiam.methods import build_method, image_rows, method_skeleton
from fastsiam.run import checkpoint as checkpoints
from tests import rank_jobs
from tests.configs import TINY, flags, with_settings
from tests.methods.variants import ALL_CASES, SMALL
from tests.ranks import fastsiam_on_ranks
from tests.tiers import rest_slow, slow
from tests.train.runs import assert_same_runs, train_run, train_until_kill

Ranks = Callable[..., list[Any]]

CORE_VARIANTS = (
    "average, 2 steps, asymmetric 2x",
    "fixed predictor",
    "no stop-gradient",
    "BN on all",
    "fastsiam 3, average",
    "momentum encoder",
    "simclr",
    "mocov2, parts",
    "byol",
    "swav, queue",
    "swav, predictor, queue, no stop-gradient",
)
"""A few variants that together cover every feature."""


def drop_running_statistics(state: dict[str, Any]) -> dict[str, Any]:
    """Drop BN's running statistics, which differ between ranks unless BN is synchronised."""
    return {k: v for k, v in state.items() if "running_" not in k and "num_batches" not in k}


@pytest.mark.parametrize(("names", "world"), [(CORE_VARIANTS, 2), slow((tuple(ALL_CASES), 4))])
def test_ranks_equal_one_process(names: tuple[str, ...], world: int, ranks: Ranks) -> None:
    """Losses, weights, other encoders, averages and queues are equal for three steps."""
    parts, references = ranks("variants", world, names=names), rank_jobs.variants(0, 1, names)
    for name, reference in references.items():
        results = [part[name] for part in (*parts, {name: reference})]
        if not ALL_CASES[name].run.get("sync_bn", True):
            results = [one | {"state": drop_running_statistics(one["state"])} for one in results]
        for part in results[1:-1]:
            torch.testing.assert_close(results[0], part, atol=0, rtol=0, msg=name)
        torch.testing.assert_close(results[0], results[-1], atol=5e-5, rtol=1e-4)


def test_ranks_without_sync_bn_equal_bn_over_parts(ranks: Ranks) -> None:
    """MoCo's keys move to other ranks, as in the original, or to other parts of a rank's batch."""
    settings: dict[str, Any] = {"name": "mocov2", "sync_bn": False}
    parts, joint = ranks("variant", 2, **settings), rank_jobs.variant(0, 1, **settings)
    reference = rank_jobs.variant(0, 1, **settings, bn_images=8)
    states = [drop_running_statistics(one["state"]) for one in (*parts, reference, joint)]
    torch.testing.assert_close(states[0], states[1], atol=0, rtol=0)
    torch.testing.assert_close(states[0], states[2], atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(parts[0]["loss"], reference["loss"], atol=5e-5, rtol=1e-4)
    assert (states[0]["queue"] - states[3]["queue"]).abs().max() > 1e-2


def test_image_rows_and_skeleton_shapes() -> None:
    """Also check that a skeleton has the same shapes as a built method."""
    model = replace(TINY, method=ALL_CASES["average"].config(**SMALL))
    rows = {name: row.shape for name, row in image_rows(model).items()}
    assert rows == {"averages": (1, SMALL["dim"])} and image_rows(TINY) == {}
    skeleton, built = method_skeleton(model, images=24), build_method(model, images=24)
    assert {value.device.type for value in skeleton.state_dict().values()} == {"meta"}
    shapes = [{k: v.shape for k, v in one.state_dict().items()} for one in (skeleton, built)]
    assert shapes[0] == shapes[1]


def test_parts_are_modules_with_weights() -> None:
    """``--init`` looks for their weights, and skips those that it does not find."""
    for name, case in ALL_CASES.items():
        method = method_skeleton(replace(TINY, method=case.config(**SMALL)), images=24)
        modules = {weight.partition(".")[0] for weight in method.state_dict()}
        assert {"backbone", "projector"} <= set(method.parts) <= modules, name


COMPILED_VARIANTS = ("swav, multi-crop", "default", *CORE_VARIANTS)


@pytest.mark.parametrize("name", rest_slow(COMPILED_VARIANTS))
def test_compiled_steps_match_eager_steps(name: str) -> None:
    torch._dynamo.reset()
    plain, compiled = (rank_jobs.variant(0, 1, name, compile=on) for on in ("off", "on"))
    torch.testing.assert_close(compiled, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name", rest_slow([name for name in ALL_CASES if name not in COMPILED_VARIANTS])
)
def test_captured_steps_match_eager_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of the other variants are captured in full, but their operations are not compiled."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(_captured, torch.compile))
    plain, captured = (rank_jobs.variant(0, 1, name, compile=on) for on in ("off", "on"))
    torch.testing.assert_close(captured, plain, atol=1e-4, rtol=1e-4)


def _captured(capture: Callable[..., Any], function: Any, **settings: Any) -> Any:
    return capture(function, **settings | {"mode": None, "backend": "aot_eager"})


@pytest.mark.slow
def test_two_compiled_ranks_match_one_eager_process(ranks: Ranks) -> None:
    """DDP's buckets split the graph, and some of its views are encoded without gradients."""
    wide: dict[str, Any] = {"dim": 512, "projector_dim": 512, "predictor_dim": 256}
    parts = ranks("variant", 2, name="asymmetric", compile="on", **wide)
    reference = rank_jobs.variant(0, 1, "asymmetric", compile="off", **wide)
    torch.testing.assert_close(parts[0], parts[1], atol=0, rtol=0)
    torch.testing.assert_close(parts[0], reference, atol=1e-4, rtol=1e-3)


KILLED_VARIANTS = ["an epoch", "average", "swav, queue", "2 steps", "mocov2"]


@pytest.mark.parametrize("name", rest_slow(KILLED_VARIANTS, fast=3))
def test_killed_run_resumes_bitwise(name: str, small: TrainConfig, tmp_path: Path) -> None:
    """The run is killed within an interval of two steps, which is also within an epoch."""
    config = ALL_CASES[name].applied(small, knn_every=0, lr=0.1, save_every=1)
    reference = train_run(config, out=tmp_path / "whole")
    run = train_until_kill(config, 5)
    assert checkpoints.load(run).step in (4, 5)  # a checkpoint may still be in progress
    assert_same_runs(train_run(config), reference)


STATEFUL_VARIANTS = ["average, 2 steps, asymmetric 2x", "mocov2", "swav, queue", "byol"]


@pytest.mark.parametrize("name", rest_slow(STATEFUL_VARIANTS, fast=2))
def test_run_resumes_on_another_number_of_ranks(
    name: str, small: TrainConfig, tmp_path: Path
) -> None:
    """Two steps on one rank, two on two and two on one give the state of a single process."""
    config = ALL_CASES[name].applied(small, epochs=2, lr=0.1, knn_every=0)
    reference = checkpoints.load(train_run(config, out=tmp_path / "whole"))
    for world, steps in ((1, 2), (2, 4), (1, 0)):
        part = with_settings(config, max_steps=steps, gpus=world)
        fastsiam_on_ranks(world, "train", *flags(part))
    moved = checkpoints.load(tmp_path / "run")
    assert reference.step == moved.step == 6
    if "averages" in moved.model:
        assert moved.model["averages"].abs().sum(1).min() > 0
    torch.testing.assert_close(moved.model, reference.model, atol=1e-3, rtol=1e-3)
