"""Two ranks with half a batch each equal one process with the full batch; errors and signals."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fastsiam.config import RunConfig
from fastsiam.distributed import check_devices, start
from fastsiam.environment import environment
from fastsiam.errors import DeviceError
from tests import rank_jobs
from tests.ranks import WIDE, check_same_training
from tests.tiers import slow

Ranks = Callable[..., list[Any]]

PARTS = [*range(4), *range(8, 12), *range(4, 8), *range(12, 16)]
"""Image order that gives one process the same accumulation parts as two ranks."""


@pytest.mark.parametrize(
    ("job", "world", "model", "images"),
    [
        ("steps", 2, {}, range(16)),
        ("compiled_steps", 2, {"short": True, "accumulate": 2, **WIDE}, PARTS),
        slow(("steps", 4, {}, range(16))),
    ],
)
def test_ranks_match_one_process_with_joint_batch(
    job: str, world: int, model: dict[str, Any], images: Sequence[int], ranks: Ranks
) -> None:
    """Losses, gradients, weights and BN statistics of three steps are equal, including SyncBN.

    With accumulation, a part consists of that part of each rank's share.
    """
    check_same_training(ranks(job, world, **model), rank_jobs.steps(0, 1, images=images, **model))


def test_separate_bn_statistics_change_gradient() -> None:
    """BN over half batches is far off, so the test above would detect a SyncBN without effect."""
    one_batch, halves = rank_jobs.steps(0, 1), rank_jobs.steps(0, 1, accumulate=2)
    assert (one_batch["gradient"][0] - halves["gradient"][0]).abs().max() > 1e-2


def test_layer_buffers_are_broadcast_without_sync_bn(ranks: Ranks) -> None:
    """Rank 0's layer buffers are broadcast. A method's own buffers, possibly gigabytes, are not."""
    first, second = ranks("own_bn", 2)
    statistics = [f"0.{x}" for x in ("running_mean", "running_var", "num_batches_tracked")]
    assert first["sent"] == second["sent"] == [*statistics, "1.average"]
    torch.testing.assert_close(first["mean"], second["mean"])
    assert (first["1.average"], second["1.average"]) == (0.0, 0.0)
    assert (first["rows"], second["rows"]) == (0.0, 1.0)


def test_sync_bn_groups_share_statistics(ranks: Ranks) -> None:
    assert [float(mean) for mean in ranks("groups", 4)] == [0.5, 0.5, 2.5, 2.5]


def test_no_rank_compiles_if_one_cannot(ranks: Ranks) -> None:
    first, second = ranks("one_without_compiler", 2)
    assert first["compile"] == second["compile"] == "off"
    assert first["line"] == second["line"] and "on rank 1); training continues" in first["line"]
    assert "no-such-compiler" in first["line"]
    alone = rank_jobs.steps(0, 1)["loss"][0]
    torch.testing.assert_close((first["loss"] + second["loss"]) / 2, alone, atol=1e-5, rtol=1e-5)


def test_gather_joins_uneven_tensors_in_rank_order(ranks: Ranks) -> None:
    expected = torch.tensor([[1.0, 1.0]] * 3 + [[2.0, 2.0]] * 6)
    assert all(torch.equal(result, expected) for result in ranks("uneven", 3))


def test_signal_to_one_rank_stops_all_after_same_step(ranks: Ranks) -> None:
    assert ranks("stop", 3) == [[0, 1, 2, signal.SIGTERM]] * 3


def test_read_error_on_one_rank_ends_all_at_same_item(ranks: Ranks) -> None:
    """The rank with the error exits first, because a launcher then kills the others."""
    (*first, first_exit), (*second, second_exit) = ranks("fail", 2)
    assert first == [[0, 1, 2], "OtherRankError: rank 1 cannot continue; see its own error message"]
    assert second == [[0, 1, 2], "DataError: a broken image"]
    assert second_exit < first_exit


def test_rank_with_fewer_items_waits(ranks: Ranks) -> None:
    assert ranks("shares", 3) == [[], [0], [0, 1]]


def test_missing_gpus_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for config, there, message in (
        (RunConfig(gpus=8), 0, r"--gpus 8: torch finds no GPU; .* --device cpu"),
        (RunConfig(gpus=8), 1, r"--gpus 8: torch finds 1 GPU; pass at most --gpus 1"),
        (RunConfig(device="cuda"), 0, r"--device cuda: torch finds no GPU"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda there=there: there)
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there > 0)
        with pytest.raises(DeviceError, match=message):
            check_devices(config)
    check_devices(RunConfig())
    check_devices(RunConfig(gpus=4, device="cpu"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_devices(RunConfig(gpus=8))
    monkeypatch.setenv("LOCAL_RANK", "0")  # torchrun has started the ranks
    check_devices(RunConfig(gpus=16))


@pytest.mark.parametrize(
    ("visible", "problem"),
    [
        ("", "which has 1 GPU; start"),
        (
            "1",
            r"but it sees 1 GPU \(CUDA_VISIBLE_DEVICES=1\); let every rank see all GPUs of the "
            r"machine, start",
        ),
    ],
)
def test_rank_without_gpu_is_rejected(
    visible: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    variables = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in (variables | address | {"CUDA_VISIBLE_DEVICES": visible}).items():
        monkeypatch.setenv(name, value)
    message = f"^rank 1 is process 2 of this machine, {problem} one process for each GPU, or add"
    with pytest.raises(DeviceError, match=message):
        start(RunConfig())


def test_gpus_whose_driver_is_too_old_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts them, but cannot use them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for config in (RunConfig(gpus=8), RunConfig(device="cuda")):
        with pytest.raises(DeviceError, match="torch finds no GPU"):
            check_devices(config)
    assert environment()["gpus"] == []
