"""Digests are added up over ranks; how they continue in a resumed run is in ``test_resume``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastsiam.views.digest import hex_digest


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
