"""torchrun's elastic launcher on two machines, played by two of its agents on this one.

One is lost in mid-run; the other goes on alone; then there is one again, and all go on together.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastsiam.config import TrainConfig
from fastsiam.training.log import read_metrics
from tests.configs import flags, with_settings
from tests.conftest import ROOT
from tests.ranks import fastsiam_on_ranks
from tests.training.runs import history

FAULTS = str(Path(__file__).parents[1] / "faults")
Agent = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    """Start an agent of so many ranks with a command line; what is left of them ends here."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    begun: list[subprocess.Popen[str]] = []

    def start(
        ranks: int, arguments: list[str], *, hosts: bool = False, **environment: str
    ) -> subprocess.Popen[str]:
        meeting = f"is_host={hosts},last_call_timeout=1,heartbeat=1"
        line = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"]
        line += ["--nproc-per-node", str(ranks), "--max-restarts", "3", "--rdzv-backend", "c10d"]
        line += ["--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "test"]
        line += ["--rdzv-conf", meeting, "-m", "fastsiam", *arguments]
        path = os.pathsep.join([FAULTS, os.environ.get("PYTHONPATH", "")])
        with (tmp_path / f"agent{len(begun)}").open("w") as log:
            begun.append(
                subprocess.Popen(
                    line,
                    cwd=ROOT,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={
                        **os.environ,
                        "PYTHONPATH": path,
                        "OMP_NUM_THREADS": "1",
                        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                        **environment,
                    },
                    text=True,
                )
            )
        return begun[-1]

    yield start
    for one in begun:
        one.kill()
        one.wait()


@pytest.mark.slow
def test_a_machine_is_lost_and_another_joins(
    small: TrainConfig, tmp_path: Path, agent: Agent
) -> None:
    """Three ranks, two, three: the same steps, rates and images, the losses to rounding."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    config = with_settings(small, batch=12, epochs=12, lr=0.1, knn_every=0, save_every=2)
    lost = {"FAULT": "machine", "FAULT_RANK": "any", "FAULT_AT": "5"}
    alone = {"FAULT": "wait", "FAULT_RANK": "0", "FAULT_WORLD": "2", "FAULT_AT": "6"}
    fastsiam_on_ranks(3, "train", *flags(config), "--out", str(whole))
    command = ["train", *flags(config), "--out", str(run)]
    stays = agent(2, command, hosts=True, **alone)
    goes = agent(1, command, **lost)
    assert goes.wait(120) < 0
    assert (before := len(history(run))) < 12
    while len(history(run)) < 8:  # on two ranks
        assert stays.poll() is None, (tmp_path / "agent0").read_text()
        time.sleep(0.1)
    comes = agent(1, command)
    assert comes.wait(240) == 0, (tmp_path / "agent2").read_text()
    assert stays.wait(240) == 0, (tmp_path / "agent0").read_text()
    said = (tmp_path / "agent0").read_text() + (tmp_path / "agent2").read_text()
    assert before >= 3 and "on 2 x CPU" in said and said.count("on 3 x CPU") == 2, said
    assert len(history(run)) == 24 == read_metrics(run)[-1]["step"]
    for one, other in zip(history(run), history(whole), strict=True):
        assert one[:2] == other[:2] and one[5] == other[5]  # step, epoch, rate
        assert one[2:4] == pytest.approx(other[2:4], abs=1e-4)  # loss, std
