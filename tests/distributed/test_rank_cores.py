"""How ranks share a machine: cores near their GPU, thread counts and timeouts."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist
from torch._inductor import config as inductor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from fastsiam import kernels
from fastsiam.bench import runner
from fastsiam.child_process import LAUNCHER
from fastsiam.config import NumericsConfig, RunConfig, TrainConfig
from fastsiam.distributed import StopSignals, bn_group, place, rank_cores, start
from fastsiam.environment import environment
from fastsiam.errors import DeviceError
from fastsiam.kernels.cores import own_cores
from fastsiam.train.compile import compile_settings
from tests.sources import put

GPUS = [0, 0, 1, 1]
"""The NUMA node of each of the machine's four GPUs. It has 12 cores; node 0 has the even ones."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[set[int]]:
    """A fake machine with ``GPUS``; yields the set of cores that this process may use."""
    allowed = set(range(12))
    for node, listed in enumerate(["0,2,4-4,6,8,10", "1,3,5,7,9,11"]):
        put(tmp_path / f"devices/system/node/node{node}/cpulist", f"{listed}\n")
    for gpu, node in enumerate(GPUS):
        put(tmp_path / f"bus/pci/devices/0001:{gpu + 10:02x}:00.0/numa_node", f"{node}\n")

    monkeypatch.setattr(rank_cores, "_SYSTEM", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed))
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda _, chosen: allowed.intersection_update(chosen)
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(GPUS))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda gpu: SimpleNamespace(pci_domain_id=1, pci_bus_id=gpu + 10, pci_device_id=0),
    )
    monkeypatch.setenv("FASTSIAM_CORES", "")  # so that the test restores it afterwards
    monkeypatch.delenv("FASTSIAM_CORES")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = torch.get_num_threads()
    yield allowed
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "250000 100000\n",
         "sys/fs/cgroup/cpu.max": "max 100000\n"},
        {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
         "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
        {"proc/self/cgroup": "5:cpuset:/one\n4:cpu,cpuacct:/job:cri:1\n",
         "sys/fs/cgroup/cpu/job:cri:1/cpu.cfs_quota_us": "300000\n",
         "sys/fs/cgroup/cpu/job:cri:1/cpu.cfs_period_us": "100000\n",
         "sys/fs/cgroup/cpu/one/cpu.cfs_quota_us": "100000\n",
         "sys/fs/cgroup/cpu/one/cpu.cfs_period_us": "100000\n"},
    ],
)  # fmt: skip
@pytest.mark.usefixtures("machine")
def test_cpu_quota_limits_threads(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quota limits loaders and torch, because additional threads would wait for each other.

    It also applies to the recorded environment and to what bench measures.
    """
    for name, text in files.items():
        put(tmp_path / name, text)
    monkeypatch.setattr(kernels.cores, "_ROOT", tmp_path)
    kernels.cores._quotas.cache_clear()
    for limit in (
        lambda: take_cores_of_rank(monkeypatch, gpu=0, of=1),
        lambda: runner._build("a", lambda: runner.Task(lambda: None, 1)),
    ):
        torch.set_num_threads(12)
        limit()
        assert own_cores() == torch.get_num_threads() == 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert environment()["cores"] == 3
    kernels.cores._quotas.cache_clear()


def take_cores_of_rank(monkeypatch: pytest.MonkeyPatch, *, gpu: int, of: int) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(of))
    rank_cores.take_cores(torch.device("cuda", gpu), beside_gpu=True)


@pytest.mark.parametrize(
    ("gpu", "of", "near", "share"),
    [
        (3, 4, {1, 3, 5, 7, 9, 11}, 3),
        (0, 4, {0, 2, 4, 6, 8, 10}, 3),
        (1, 2, {0, 2, 4, 6, 8, 10}, 3),  # both ranks are on node 0
        (2, 3, {1, 3, 5, 7, 9, 11}, 6),  # the only rank on its node
    ],
)
def test_ranks_share_cores_of_their_numa_node(
    gpu: int,
    of: int,
    near: set[int],
    share: int,
    machine: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_cores_of_rank(monkeypatch, gpu=gpu, of=of)
    assert machine == near
    assert torch.get_num_threads() == own_cores() == share


def test_quota_is_shared_by_the_ranks_of_all_nodes(
    machine: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.cores, "_quotas", lambda: [8])
    take_cores_of_rank(monkeypatch, gpu=0, of=4)
    assert machine == {0, 2, 4, 6, 8, 10} and own_cores() == 2


def test_rank_that_its_launcher_bound_takes_its_share(
    machine: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine &= {0, 2, 4, 6, 8, 10}
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: set(range(12)) if pid else set(machine)
    )
    take_cores_of_rank(monkeypatch, gpu=0, of=4)
    assert machine == {0, 2, 4, 6, 8, 10} and own_cores() == 3


def test_single_process_uses_all_cores(machine: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    take_cores_of_rank(monkeypatch, gpu=1, of=1)
    assert machine == set(range(12)) and torch.get_num_threads() == before and own_cores() == 12


@pytest.mark.parametrize("value", ["x", "0", "-1", "1.5"])
def test_invalid_fastsiam_cores_is_rejected(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTSIAM_CORES", value)
    with pytest.raises(DeviceError, match=f"FASTSIAM_CORES must be a positive integer.*'{value}'"):
        own_cores()


@pytest.mark.parametrize(
    ("given", "launcher", "threads"),
    [("1", "torchrun", 3), ("5", "torchrun", 5), ("1", "fastsiam", 1)],
)
def test_user_thread_count_is_kept(
    given: str, launcher: str, threads: int, machine: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user sets OMP_NUM_THREADS, torchrun sets it to 1; fastsiam does not set it."""
    torch.set_num_threads(int(given))
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.delenv(LAUNCHER, raising=False)
    if launcher == "fastsiam":
        monkeypatch.setenv(LAUNCHER, "1")
    take_cores_of_rank(monkeypatch, gpu=0, of=4)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("trouble", "of"), [("unknown", 2), (0, 2), (1, 4)])
def test_missing_numa_binding_warns_once(
    trouble: str | int,
    of: int,
    machine: set[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ranks near cores that they may use do not bind either, or take more than their share."""
    if isinstance(trouble, str):
        (tmp_path / "bus/pci/devices/0001:0a:00.0/numa_node").write_text("-1\n")
    else:
        machine -= set(range(trouble, 12, 2))  # the cores of that node
    before = set(machine)
    with caplog.at_level(logging.WARNING):
        for gpu in range(of):  # only rank 0 warns
            monkeypatch.delenv("FASTSIAM_CORES", raising=False)
            take_cores_of_rank(monkeypatch, gpu=gpu, of=of)
            assert own_cores() == len(before) // of
    (record,) = caplog.records
    assert record.getMessage().startswith("ranks use all cores") and machine == before


@pytest.mark.parametrize(("ranks", "given", "expected"), [(4, "", 3), (1, "", 12), (4, "7", 7)])
def test_ranks_share_compile_threads(
    ranks: int,
    given: str,
    expected: int,
    machine: set[int],
    small: TrainConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    if given:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", given)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    with inductor.patch(compile_threads=inductor.decide_compile_threads()), compile_settings(small):
        assert inductor.compile_threads == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rank_timeout_applies_to_all_groups(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout applies to the default, BN and stop-vote groups; NCCL's are a minute longer."""
    init_process_group, new_group = Mock(), Mock()
    store: Any = HashStore()
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(place, "rendezvous", lambda *_, **__: iter([(store, 1, 4)]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(place, "take_cores", lambda device, beside_gpu: None)
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    here = start(RunConfig(gpus=4, device=device, rank_timeout=5))
    StopSignals(here)
    bn_group(here, NumericsConfig(sync_bn_ranks=2))
    host, chip = timedelta(seconds=5), timedelta(seconds=5 if device == "cpu" else 65)
    assert store.timeout == host
    on_gpu = device == "cuda"
    init_process_group.assert_called_once_with(
        "cuda:nccl,cpu:gloo" if on_gpu else "gloo",
        store=store,
        rank=1,
        world_size=4,
        timeout=chip,
        device_id=torch.device("cuda", 1) if on_gpu else None,
    )
    assert new_group.call_args_list == [
        call(backend="gloo", timeout=host),
        call([0, 1], timeout=chip),
        call([2, 3], timeout=chip),
    ]
    for text, kind, message in (
        ("NCCL error in: x.cpp:1\nLast error:\nDuplicate GPU", DeviceError, "error: Duplicate"),
        ("wait timeout after 5000ms", dist.DistError, "^wait timeout"),  # another rank is late
    ):
        init_process_group.side_effect = dist.DistBackendError(text)
        with pytest.raises(kind, match=message):
            start(RunConfig(gpus=4, device=device, rank_timeout=5))
