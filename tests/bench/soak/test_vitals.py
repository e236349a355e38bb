"""What a run holds: seen as it is, and growth told from noise."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from fastsiam.bench.soak.vitals import NAMES, Vitals, growth, look, processes_of
from tests.processes import Forked

Stretches = list[list[tuple[float, Vitals]]]


def stretches(slope: float, *, noise: float = 5.0, seed: int = 0) -> Stretches:
    """Twenty minutes, each from a level of its own; memory grows by so much an hour."""
    chance = np.random.default_rng(seed)
    found = []
    for number in range(20):
        level = chance.normal(500, 50)
        looks = [
            (
                1000.0 * number + second,
                Vitals(
                    memory=level + slope * second / 3600 + chance.normal(0, noise),
                    descriptors=40,
                    threads=9,
                    shared=0,
                ),
            )
            for second in range(60)
        ]
        found.append(looks)
    return found


def test_growth_is_found_with_its_interval() -> None:
    found = growth(stretches(2000.0), seed=1)["memory"]
    assert found.low < 2000 < found.high and not found.is_flat
    assert (found.stretches, found.samples) == (20, 1200) and 300 < found.level < 700


def test_noise_and_levels_of_their_own_are_no_growth() -> None:
    """The interval leaves 0 below it in one of forty."""
    found = [growth(stretches(0.0, seed=seed), seed=1) for seed in range(40)]
    assert sum(not one["memory"].is_flat for one in found) <= 4
    assert tuple(found[0]) == NAMES and found[0]["descriptors"].is_flat
    assert found[0]["descriptors"].slope == found[0]["descriptors"].high == 0


def test_stretches_of_one_look_tell_nothing() -> None:
    assert growth([one[:1] for one in stretches(0.0)], seed=0) == {}


def hold(path: str) -> None:
    """Open files until somebody says to end."""
    files = [open(path) for _ in range(50)]  # noqa: SIM115
    Path(path).with_name("ready").touch()
    while Path(path).exists():
        os.sched_yield()
    del files


def test_a_process_is_found_by_its_mark_and_looked_at(tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    mark = f"FASTSIAM_MARK={tmp_path}"
    process = Forked(hold, str(held))
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
    assert process.pid not in processes_of(mark)  # its environment is its parent's
    seen = look([process.pid])
    assert seen.descriptors >= 50 and seen.threads >= 1 and seen.memory > 1
    held.unlink()
    assert process.wait(60).returncode == 0
    assert look([process.pid]).memory == 0


def test_marks_are_read_from_the_environment_that_a_program_began_with() -> None:
    import subprocess
    import sys

    mark = f"FASTSIAM_MARK={os.getpid()}"
    name, _, value = mark.partition("=")
    process = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, name: value}
    )
    try:
        assert processes_of(mark) == [process.pid]
    finally:
        process.kill()
        process.wait()
