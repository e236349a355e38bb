"""Several machines: launchers that meet, lose one another and go on.

Always on this one, by its loopback; and as two network namespaces whose cable is pulled out.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fastsiam.config import TrainConfig
from fastsiam.config.nodes import NodesConfig
from fastsiam.distributed.gathering import Order, Word
from fastsiam.distributed.posts import answering, ask, free_port, interface_of, is_here
from fastsiam.errors import RANK_LOST
from tests.configs import flags, with_settings
from tests.conftest import ROOT
from tests.machines import Machine, two_machines
from tests.processes import command, fastsiam
from tests.ranks import fastsiam_on_ranks
from tests.training.runs import history

FAULTS = str(Path(__file__).parents[1] / "faults")


@pytest.fixture
def config(small: TrainConfig) -> TrainConfig:
    """A run on two machines with a rank each."""
    return with_settings(
        small, nodes=2, rendezvous=f"127.0.0.1:{free_port()}", save_every=2, knn_every=0
    )


def undisturbed(config: TrainConfig, out: Path) -> list[tuple[object, ...]]:
    """Train on two ranks of one machine; return the lines."""
    alone = flags(with_settings(config, nodes=1, rendezvous="", gpus=2, max_restarts=0))
    fastsiam_on_ranks(2, "train", *alone, "--out", str(out))
    return history(out)


def on_two(*arguments: str) -> list[subprocess.CompletedProcess[str]]:
    begun = [command(*arguments) for _ in range(2)]
    return [one.wait(300) for one in begun]


def test_two_machines_are_as_one(config: TrainConfig, tmp_path: Path) -> None:
    done = on_two("train", *flags(config))
    assert [one.returncode for one in done] == [0, 0], done
    assert any("on 2 x CPU" in one.stderr for one in done)
    assert history(tmp_path / "run") == undisturbed(config, tmp_path / "whole")
    assert len(history(tmp_path / "run")) == 12


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["knn", "linear"])
def test_an_evaluation_on_two_machines(measure: str, config: TrainConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fastsiam("train", *flags(with_settings(config, nodes=1, rendezvous="")))
    options = ["--device", "cpu", *(["--epochs", "2"] if measure == "linear" else [])]
    alone, together = tmp_path / "alone.json", tmp_path / "together.json"
    fastsiam("eval", measure, str(run), *options, "--json", str(alone))
    where = ["--nodes", "2", "--rendezvous", config.run.rendezvous, "--json", str(together)]
    done = on_two("eval", measure, str(run), *options, *where)
    assert [one.returncode for one in done] == [0, 0], done
    one, other = (json.loads(path.read_text()) for path in (alone, together))
    assert [x["top1"] for x in one["results"]] == [x["top1"] for x in other["results"]]
    assert one["results"]


def test_a_machine_that_never_comes_is_one_line(config: TrainConfig) -> None:
    config = with_settings(config, rendezvous_timeout=0.5)
    done = fastsiam("train", *flags(config), code=RANK_LOST)
    assert done.stderr.startswith("error: 1 of 2 machines came within 0.5 s (")
    assert done.stderr.count("\n") == 1
    done = fastsiam("train", *flags(with_settings(config, node_rank=1)), code=RANK_LOST)
    assert f"error: --rendezvous {config.run.rendezvous} did not answer for" in done.stderr
    assert "refused): is the same command running" in done.stderr and done.stderr.count("\n") == 1


def test_what_answers_is_something_else(config: TrainConfig) -> None:
    config = with_settings(config, rendezvous_timeout=0.5, node_rank=1)
    with socket.create_server(("127.0.0.1", int(config.run.rendezvous.split(":")[1]))) as server:
        waiting = command("train", *flags(config))
        server.settimeout(60)
        line, _ = server.accept()
        with line:
            line.sendall(b"SSH-2.0\n")
        assert waiting.wait().returncode == RANK_LOST
        taken = with_settings(config, node_rank=0)
        done = fastsiam("train", *flags(taken), code=1)
    assert done.stderr.startswith("error: --rendezvous: port ") and "is taken here" in done.stderr


def test_what_strangers_say_changes_nothing() -> None:
    heard: list[Word] = []

    def answer(word: Word, address: str) -> Order:
        heard.append(word)
        return Order(do="wait", lines=(address,))

    port = free_port()
    own = Word(id="1", host="node7", command=("train",), gpus=2)
    with answering(port, answer):
        wrong = '{"id": "1", "host": "x", "command": ["train"], "gpus": "many"}'
        for said in ("GET / HTTP/1.1", "[]", "{}", '{"id": 1}', wrong, "[" * 100_000, ""):
            with socket.create_connection(("127.0.0.1", port)) as line:
                line.sendall(f"{said}\n".encode())
                assert line.recv(1) == b""
        order, address = ask(("127.0.0.1", port), own)
    assert (order.do, order.lines, address) == ("wait", ("127.0.0.1",), "127.0.0.1")
    assert heard == [replace(own, host="node7 (127.0.0.1)")]
    with pytest.raises(OSError, match="refused"):
        ask(("127.0.0.1", port), own)


def test_the_same_command_is_wanted_on_each(config: TrainConfig) -> None:
    config = with_settings(config, rendezvous_timeout=60)
    first = command("train", *flags(config))
    done = fastsiam("train", *flags(config), "--seed", "7", "--node-rank", "1", code=2)
    assert "is another one than on" in done.stderr and done.stderr.count("\n") == 1
    first.send(signal.SIGTERM)
    assert first.wait().returncode == 143


@pytest.mark.slow
def test_a_machine_is_killed_and_the_same_command_goes_on(
    config: TrainConfig, tmp_path: Path
) -> None:
    """Without restarts the other says so, leaves, and the run is resumable: bit for bit."""
    config = with_settings(config, node_timeout=3.0)
    stays = command("train", *flags(config))
    path = os.pathsep.join([FAULTS, os.environ.get("PYTHONPATH", "")])
    lost = {"PYTHONPATH": path, "FAULT": "machine", "FAULT_RANK": "1", "FAULT_AT": "5"}
    command("train", *flags(config), "--node-rank", "1", environment=lost).wait(300)
    done = stays.wait(300)
    assert done.returncode == RANK_LOST, done.stderr
    assert "is lost: nothing was heard of it for 3 s; the same command goes on" in done.stderr
    assert [one.returncode for one in on_two("train", *flags(config))] == [0, 0]
    assert history(tmp_path / "run") == undisturbed(config, tmp_path / "whole")


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as both:
        yield both


@pytest.mark.slow
def test_a_cable_is_pulled_out_and_put_in_again(
    machines: tuple[Machine, Machine], config: TrainConfig, tmp_path: Path
) -> None:
    """Both notice, their ranks are stopped, they meet again, and the steps are the same."""
    here, there = machines
    run = tmp_path / "run"
    config = with_settings(
        config, epochs=20, node_timeout=3.0, rendezvous=f"{here.address}:29500", max_restarts=1
    )
    begun, logs = [], []
    path = os.pathsep.join([FAULTS, os.environ.get("PYTHONPATH", "")])
    waiting = {"PYTHONPATH": path, "FAULT": "wait", "FAULT_RANK": "0", "FAULT_AT": "9"}
    waiting["FAULT_ONCE"] = str(tmp_path / "once")
    for machine in machines:
        logs.append(tmp_path / f"{machine.name}.log")
        line = [*machine.inside, sys.executable, "-m", "fastsiam", "train", *flags(config)]
        with logs[-1].open("w") as log:
            begun.append(
                subprocess.Popen(
                    line, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, **waiting}
                )
            )
    try:
        wait_for((tmp_path / "once").exists, begun[0])  # there rank 0 waits
        there.plug("down")
        lost = "is lost: nothing was heard of it for 3 s"
        wait_for(lambda: lost in logs[0].read_text(), begun[0])
        wait_for(lambda: "did not answer for" in logs[1].read_text(), begun[1])
        there.plug("up")
        assert [one.wait(500) for one in begun] == [0, 0], [log.read_text() for log in logs]
    finally:
        for one in begun:
            one.kill()
            one.wait()
    said = logs[0].read_text()
    assert "restart 1 of 1, from the last checkpoint, on 2 ranks of 2 machines" in said
    whole = undisturbed(config, tmp_path / "whole")
    assert len(whole) == len(history(run)) == 60
    for ours, theirs in zip(history(run), whole, strict=True):
        assert ours[:2] == theirs[:2] and ours[5] == theirs[5]  # step, epoch, rate
        assert ours[2:4] == pytest.approx(theirs[2:4], abs=1e-3)  # loss, std


def wait_for(what: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 300
    while not what():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)


def test_addresses_and_interfaces_of_this_machine() -> None:
    assert is_here("127.0.0.1") and is_here("localhost")
    assert not is_here("192.0.2.1") and not is_here("nowhere.invalid")  # RFC 5737, RFC 2606
    assert interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.1") == ""


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("node1:1234", ("node1", 1234)),
        ("node1", ("node1", 29500)),
        ("[fe80::1]:1234", ("fe80::1", 1234)),
        ("[fe80::1]", ("fe80::1", 29500)),
    ],
)
def test_where_machines_meet(text: str, where: tuple[str, int]) -> None:
    assert NodesConfig(rendezvous=text).meeting == where


@pytest.mark.parametrize("text", ["node1:", ":1", "node1:x", "node1:70000"])
def test_where_they_cannot_meet(text: str) -> None:
    with pytest.raises(ValueError, match="rendezvous is HOST:PORT"):
        _ = NodesConfig(rendezvous=text).meeting
    with pytest.raises(ValueError, match="nodes 2 needs rendezvous"):
        NodesConfig(nodes=2).check_nodes()
    with pytest.raises(ValueError, match="node-rank must lie between"):
        NodesConfig(nodes=2, rendezvous="a", node_rank=2).check_nodes()
