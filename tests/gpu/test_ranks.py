"""Ranks on GPUs: two equal one with the full batch, and a failing rank ends the run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastsiam.config import RunConfig, TrainConfig
from fastsiam.distributed import finish, gather_uneven, meet, start
from tests import rank_jobs
from tests.configs import flags, with_settings
from tests.processes import fastsiam
from tests.ranks import (
    FAULTS,
    WIDE,
    check_failing_run,
    check_same_training,
)
from tests.train.runs import history

pytestmark = pytest.mark.gpu

Ranks = Callable[..., list[Any]]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(autouse=True)
def ranks_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKS_ON", "cuda")


@two_gpus
@pytest.mark.parametrize(("job", "model"), [("steps", {}), ("compiled_steps", WIDE)])
def test_two_ranks_equal_one_process(job: str, model: dict[str, Any], ranks: Ranks) -> None:
    """Losses, gradients, weights and BN statistics of three steps; DDP and SyncBN use NCCL."""
    check_same_training(ranks(job, 2, **model), rank_jobs.steps(0, 1, **model))


@two_gpus
def test_ranks_gather_uneven_tensors_and_agree_on_signal(ranks: Ranks) -> None:
    expected = torch.tensor([[1.0, 1.0]] * 3)
    assert all(torch.equal(result, expected) for result in ranks("uneven", 2))
    verdicts = ranks("stop", 2)
    assert verdicts[0] == verdicts[1] and verdicts[0][-1] == signal.SIGTERM


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_sync_bn_groups_share_statistics(ranks: Ranks) -> None:
    """Groups are split off the global communicator, so ranks of other groups take part in that."""
    assert [float(mean) for mean in ranks("groups", 4)] == [0.5, 0.5, 2.5, 2.5]


@two_gpus
@pytest.mark.parametrize("fault", FAULTS)
def test_failing_rank_ends_run(fault: str, gpu: TrainConfig) -> None:
    """While a rank waits for its GPU, only NCCL can detect that another hangs, and aborts.

    A compiled step does not wait for the GPU, and the run waits only for its log lines.
    """
    if fault == "hang":
        gpu = with_settings(gpu, compile="on", log_every=100)
    check_failing_run(gpu, fault)


@two_gpus
def test_losses_on_two_gpus_match_one_gpu(gpu: TrainConfig, tmp_path: Path) -> None:
    """Compare the first losses of the command line, with the same images and draws."""
    losses = []
    for gpus in (1, 2):
        config = with_settings(
            gpu, gpus=gpus, max_steps=4, knn_every=0, precision="fp32", tf32=False,
            out=str(tmp_path / f"on-{gpus}"),
        )  # fmt: skip
        fastsiam("train", *flags(config))
        losses.append([loss for _, _, loss, *_ in history(Path(config.run.out))])
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_collectives_work_with_single_nccl_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL connects immediately. Groups that are split off, and gloo groups, also work."""
    around = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    for name, value in (around | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}).items():
        monkeypatch.setenv(name, str(value))
    place = start(RunConfig(device="cuda", rank_timeout=30))
    assert place.device == torch.device("cuda", 0) and not dist.is_initialized()
    meet(place)
    try:
        assert gather_uneven(torch.ones(3, device=place.device)).tolist() == [1, 1, 1]
        groups: Any = (
            (dist.new_group([0], timeout=place.device_timeout), place.device),
            (dist.new_group(backend="gloo", timeout=place.timeout), "cpu"),
        )
        for group, device in groups:
            value = torch.full((2,), 3.0, device=device)
            dist.all_reduce(value, group=group)
            assert value.tolist() == [3, 3]
    finally:
        finish()
