"""Digests are added up over steps and ranks, and continue where a checkpoint left them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastsiam.run import checkpoint as checkpoints
from fastsiam.train.data_digest import DataDigest
from fastsiam.views.digest import hex_digest

OLD = Path(__file__).parents[1] / "data" / "run-0.1"


def test_sums_over_ranks_are_modulo_2_to_the_64(ranks: Callable[[str, int], list[Any]]) -> None:
    world = 3
    first = sum(2**64 - 1 - rank + 2**63 + 5 for rank in range(world)) % 2**64
    rest = hex_digest(sum(range(world)))
    assert ranks("seen_by_ranks", world) == world * [
        {
            "first": {"since": 0, "seen": hex_digest(first)},
            "state": {"since": 7, "digest": rest},
            "second": {"since": 7, "seen": rest},
        }
    ]


def test_a_checkpoint_goes_on_with_the_stretch() -> None:
    start = checkpoints.load(OLD)
    parts = 2**63 + 1, 2**63 + 2, 40
    whole = DataDigest(None, world=1)
    for part in parts:
        whole.add(part)
    before = DataDigest(None, world=1)
    before.add(parts[0])
    before.share()
    after = DataDigest(replace(start, seen=before.state()), world=1)
    for part in parts[1:]:
        after.add(part)
    for digest in (whole, after):
        digest.share()
    assert after.line(start.step + 2) == whole.line(start.step + 2)
