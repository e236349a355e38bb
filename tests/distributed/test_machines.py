"""Runs on several machines: launchers meet, lose each other, fail together, and join later.

The launchers run on this machine over loopback. One test uses two network namespaces.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
)

from fastsiam.config import TrainConfig
from fastsiam.config.run import NodesConfig
from fastsiam.distributed import launch
from fastsiam.distributed.launch import (
    _settings,
    _silence_torch,
    address_towards,
    interface_of,
    is_own,
    wait_for_host,
)
from fastsiam.errors import RANK_LOST
from tests.configs import flags, with_settings
from tests.conftest import ROOT
from tests.machines import Machine, two_machines
from tests.processes import (
    Forked,
    command,
    fastsiam,
    fault_environment,
    fork_programs,
    free_port,
    listens,
    run_program,
    wait_until,
)
from tests.ranks import fastsiam_on_ranks
from tests.train.runs import history


@pytest.fixture
def config(small: TrainConfig) -> TrainConfig:
    """A run on two machines with one rank each."""
    return with_settings(
        small, nodes=2, rendezvous=f"127.0.0.1:{free_port()}", save_every=2, knn_every=0
    )


def train_undisturbed(config: TrainConfig, out: Path) -> list[tuple[object, ...]]:
    """Train on two ranks of one machine and return the log lines."""
    alone = flags(with_settings(config, nodes=1, rendezvous="", gpus=2, max_restarts=0))
    fastsiam_on_ranks(2, "train", *alone, "--out", str(out))
    return history(out)


def run_on_two_machines(*arguments: str, codes: Sequence[int] = (0, 0), **environment: str) -> str:
    """Run a command with two launchers; check their sorted exit codes and return their stderr."""
    launchers = [command(*arguments, environment=environment) for _ in range(2)]
    results = [one.wait(300) for one in launchers]
    assert sorted(one.returncode for one in results) == [*codes], results
    return "".join(one.stderr for one in results)


def test_two_machines_match_one(config: TrainConfig, tmp_path: Path) -> None:
    assert "on 2 x CPU" in run_on_two_machines("train", *flags(config))
    assert history(tmp_path / "run") == train_undisturbed(config, tmp_path / "whole")
    assert len(history(tmp_path / "run")) == 12


@pytest.mark.slow
def test_knn_evaluation_on_two_machines_matches_one(config: TrainConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fastsiam("train", *flags(with_settings(config, nodes=1, rendezvous="")))
    alone, together = tmp_path / "alone.json", tmp_path / "together.json"
    fastsiam("eval", "knn", str(run), "--device", "cpu", "--json", str(alone))
    where = ["--nodes", "2", "--rendezvous", config.run.rendezvous, "--json", str(together)]
    run_on_two_machines("eval", "knn", str(run), "--device", "cpu", *where)
    one, other = (json.loads(path.read_text()) for path in (alone, together))
    assert [x["top1"] for x in one["results"]] == [x["top1"] for x in other["results"]]
    assert one["results"]


def test_error_on_one_machine_ends_run(config: TrainConfig) -> None:
    fault = fault_environment(FAULT="error", FAULT_RANK="1")
    stderr = run_on_two_machines("train", *flags(config), codes=[1, RANK_LOST], **fault)
    assert stderr.count("ZeroDivisionError") == 1 and "ChildFailedError" not in stderr


def _run_apart(*arguments: str) -> None:
    """Run a command; the host of the rendezvous is another machine, whatever its address."""
    vars(launch)["is_own"] = lambda host: False
    run_program(*arguments)


def test_missing_machine_is_announced_and_one_line_error(config: TrainConfig) -> None:
    config = with_settings(config, rendezvous_timeout=5.0)
    result = fastsiam("train", *flags(config), code=RANK_LOST)
    assert result.stderr == (
        "waiting up to 5 s for 2 machines, this one included, at --rendezvous "
        f"{config.run.rendezvous}\n"
        f"error: fewer than 2 machines joined --rendezvous {config.run.rendezvous} within 5 s; "
        "run the same command on each machine, or pass a longer --rendezvous-timeout\n"
    )
    config = with_settings(config, rendezvous_timeout=1.0)  # nobody listens at its address
    result = Forked(_run_apart, "train", *flags(config)).wait()
    address = re.escape(config.run.rendezvous)
    assert result.returncode == RANK_LOST and re.fullmatch(
        rf"waiting up to 1 s for 2 .* {address}\n"
        rf"error: no connection to --rendezvous {address} \([^()]+\); check that .*\n",
        result.stderr,
    ), result.stderr


def test_host_is_awaited_until_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would try for twice the timeout."""
    with socket.socket() as host:
        host.bind(("127.0.0.1", 0))  # refuses connections until it listens
        port, now, listens_at = host.getsockname()[1], 0.0, math.inf

        def sleep(seconds: float) -> None:
            nonlocal now
            now += seconds
            if now >= listens_at:
                host.listen()

        clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
        monkeypatch.setattr(launch, "time", clock)
        with pytest.raises(RendezvousConnectionError):
            wait_for_host("127.0.0.1", port, 20)
        assert now == pytest.approx(20)
        listens_at = 30.0
        wait_for_host("127.0.0.1", port, 60)
        assert now == pytest.approx(30)


def _launch_in_vain() -> None:
    launching = Mock(return_value=Mock(side_effect=RendezvousClosedError))
    launch.elastic_launch = launching  # type: ignore[attr-defined]
    sys.exit(launch.launch([], NodesConfig()))


def test_run_ended_by_another_machine_counts_as_lost_rank() -> None:
    """For example by one that gave up waiting for others a moment earlier."""
    result = Forked(_launch_in_vain).wait(60)
    assert result.stderr == "error: another machine ended the run; see its messages\n"
    assert result.returncode == RANK_LOST


def _launch_as_spare() -> None:
    ending = Mock(side_effect=RendezvousGracefulExitError)
    SimpleElasticAgent._invoke_run = ending  # type: ignore[method-assign]
    sys.exit(launch.launch(["train"], NodesConfig()))


def test_machine_that_run_does_not_need_is_told_so() -> None:
    result = Forked(_launch_as_spare).wait(60)
    assert result.returncode == RANK_LOST
    assert "had 1 machine without this one, and has ended" in result.stderr


def _connect_in_vain() -> None:
    _silence_torch()
    with contextlib.suppress(DistError):
        TCPStore("127.0.0.1", free_port(), is_master=False, timeout=timedelta(seconds=1))


@pytest.mark.parametrize(
    ("level", "is_silent"), [({}, True), ({"TORCH_CPP_LOG_LEVEL": "1"}, False)]
)
def test_launcher_prints_stack_traces_of_torch_only_on_request(
    level: Mapping[str, str], is_silent: bool
) -> None:
    result = Forked(_connect_in_vain, environment=level).wait(60)
    assert ("frame #" not in result.stderr) == is_silent, result.stderr


def test_different_settings_or_images_are_rejected(small: TrainConfig, tmp_path: Path) -> None:
    shutil.copytree(str(small.data.root), tmp_path / "fewer")
    (tmp_path / "fewer" / "train" / "class1" / "003.jpg").unlink()
    for change, message in (
        (
            {"lr": 0.7, "max_steps": 2, "knn_every": 1},
            "settings differ between ranks (rank 0 -> this rank): lr: 0.5 -> 0.7; knn-every: 2 -> "
            "1; max-steps: 0 -> 2; start the same command on each machine",
        ),
        ({"data": tmp_path / "fewer"}, "different images than rank 0, or another order (23 here, "),
    ):
        of_rank = [flags(with_settings(small, **x)) for x in ({}, change)]

        def begin(*_: str, environment: Mapping[str, str], of_rank: Any = of_rank) -> Forked:
            arguments = of_rank[int(environment["RANK"])]
            return command("train", *arguments, environment=environment)

        results = fastsiam_on_ranks(2, code=RANK_LOST, begin=begin)
        assert (results[1].returncode, message in results[1].stderr) == (1, True), results


def test_invalid_settings_for_several_machines_are_rejected(
    config: TrainConfig, small: TrainConfig
) -> None:
    result = fastsiam("train", *flags(with_settings(config, out="")), code=2)
    assert "several machines need --out" in result.stderr
    result = fastsiam("train", *flags(with_settings(config, nodes="1:3")), code=2)
    assert "batch 8 is not divisible by 3 ranks" in result.stderr


@pytest.mark.slow
def test_same_command_resumes_after_machine_is_killed(config: TrainConfig, tmp_path: Path) -> None:
    """Without restarts the other launcher exits with 75, and the next start resumes exactly."""
    lost = fault_environment(FAULT="machine", FAULT_RANK="1", FAULT_AT="5")
    run_on_two_machines("train", *flags(config), codes=[-signal.SIGKILL, RANK_LOST], **lost)
    run_on_two_machines("train", *flags(config))
    assert history(tmp_path / "run") == train_undisturbed(config, tmp_path / "whole")


def _launch_with_short_last_call(*arguments: str) -> None:
    """Run a launcher that waits only 6 seconds, not 30, for more machines to join."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

    from fastsiam.cli import main

    RendezvousTimeout._DEFAULT_TIMEOUTS["last_call"] = timedelta(seconds=6)
    sys.argv = ["fastsiam", *arguments]
    fork_programs()
    main()


@pytest.mark.slow
def test_run_continues_when_machines_leave_and_join(config: TrainConfig, tmp_path: Path) -> None:
    """With two, one, then two ranks, steps, rates and images are equal, and losses up to rounding.

    Losing a machine uses the only restart; joining uses none.
    """
    run, reference = tmp_path / "run", tmp_path / "whole"
    config = with_settings(config, nodes="1:2", max_restarts=1, epochs=8, lr=0.1)  # 24 steps
    arguments = ["train", *flags(config)]
    alone = fault_environment(FAULT="wait", FAULT_RANK="0", FAULT_WORLD="1", FAULT_AT="6")
    stays = Forked(_launch_with_short_last_call, *arguments, environment=alone)
    wait_until(stays, lambda: listens(config.run.meeting[1]))
    lost = fault_environment(FAULT="machine", FAULT_RANK="any", FAULT_AT="5")
    goes = Forked(_launch_with_short_last_call, *arguments, environment=lost)
    assert goes.wait(120).returncode < 0
    before = len(history(run))
    wait_until(stays, lambda: len(history(run)) >= 8)  # on one rank
    comes = Forked(_launch_with_short_last_call, *arguments)
    results = [one.wait(240) for one in (stays, comes)]
    assert [one.returncode for one in results] == [0, 0], results
    assert 3 <= before < 12 and "restart 1 of 1" in results[0].stderr, results
    stderr = results[0].stderr + results[1].stderr
    assert "on 1 x CPU" in stderr and stderr.count("on 2 x CPU") == 2, stderr
    assert len(history(run)) == len(train_undisturbed(config, reference)) == 24
    assert history(run)[:3] == history(reference)[:3]
    for one, other in zip(history(run), history(reference), strict=True):
        assert one[:2] == other[:2] and one[5] == other[5]  # step, epoch, learning rate
        assert one[2:4] == pytest.approx(other[2:4], abs=1e-3)  # loss, std


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as both:
        yield both


@pytest.mark.slow
def test_run_continues_after_network_cable_is_pulled(
    machines: tuple[Machine, Machine], config: TrainConfig, tmp_path: Path
) -> None:
    """Ranks notice after the rank timeout. The machine with the rendezvous continues alone.

    The other launcher finds out with the first packet after the cable is back.
    """
    here, there = machines
    config = with_settings(
        config,
        nodes="1:2",
        rank_timeout=30.0,
        rendezvous=f"{here.address}:29500",
        max_restarts=1,
        rendezvous_timeout=100.0,
    )
    once, out = tmp_path / "once", tmp_path / "out"
    paused = fault_environment(FAULT="pause", FAULT_RANK="0", FAULT_AT="5")
    paused |= {"FAULT_ONCE": str(once), "FAULT_UNTIL": str(out)}
    launchers, logs = [], []
    for machine in machines:
        logs.append(tmp_path / f"{machine.name}.log")
        line = [*machine.inside, sys.executable, "-m", "fastsiam", "train", *flags(config)]
        environment = {**os.environ, **paused}
        with logs[-1].open("w") as log:
            launchers.append(
                subprocess.Popen(line, cwd=ROOT, stdout=log, stderr=log, env=environment)
            )
    try:
        wait_until(launchers[0], once.exists)
        there.plug("down")
        out.touch()
        codes = [launchers[0].wait(300)]
        there.plug("up")
        codes.append(launchers[1].wait(100))
    finally:
        for one in launchers:
            one.kill()
            one.wait()
    messages = [log.read_text() for log in logs]
    assert codes == [0, RANK_LOST], messages
    assert "restart 1 of 1, from the last checkpoint" in messages[0], messages
    assert f"error: no connection to --rendezvous {here.address}:29500" in messages[1], messages
    assert len(history(tmp_path / "run")) == 12


def test_local_addresses_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.1") == ""
    assert is_own("localhost") and is_own(socket.gethostname())
    assert not is_own("192.0.2.1") and not is_own("nowhere.invalid")  # RFC 5737, RFC 2606
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    assert is_own("nowhere.invalid")


def test_shutdown_timeout_follows_rank_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would kill the ranks after 30 seconds, but slow disks take longer."""
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    settings = _settings(NodesConfig(rank_timeout=100), 0, "a")
    if not hasattr(settings, "shutdown_timeout"):
        pytest.skip("this version of torch always waits for 30 seconds")
    assert settings.shutdown_timeout == 160
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5")
    assert _settings(NodesConfig(), 0, "a").shutdown_timeout == 5


def test_nodes_and_rendezvous_are_parsed() -> None:
    for text, where in (
        ("node1:1234", ("node1", 1234)),
        ("node1", ("node1", 29500)),
        ("[fe80::1]:1234", ("fe80::1", 1234)),
        ("[fe80::1]", ("fe80::1", 29500)),
    ):
        assert NodesConfig(rendezvous=text).meeting == where
    for text in ("node1:", ":1", "node1:x", "node1:0", "node1:70000", "a@b:5", "fe80::1"):
        with pytest.raises(ValueError, match="rendezvous must be HOST:PORT"):
            _ = NodesConfig(rendezvous=text).meeting
    with pytest.raises(ValueError, match="nodes 2 needs rendezvous"):
        NodesConfig(nodes=2)
    for nodes in ("2:1", "0:4", "two"):
        with pytest.raises(ValueError, match="nodes must be a number of machines"):
            NodesConfig(nodes=nodes)
    config = NodesConfig(nodes="1:4", rendezvous="node1")
    assert (config.min_nodes, config.max_nodes) == (1, 4)
