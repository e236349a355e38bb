"""Mapped files are watched over as long as they are mapped, and no longer.

``tests/train/test_faults.py`` truncates files while runs read them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastsiam.kernels import mappings
from fastsiam.pipelines.store.files import Mapped


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_a_mapping_leaves_the_table_before_its_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else the handler of SIGBUS could answer for another mapping at the same address."""
    path, drop = tmp_path / "data", mappings._drop
    path.write_bytes(b"x" * 10_000)
    still_mapped: list[bool] = []

    def observed(place: int) -> None:
        drop(place)
        still_mapped.append(is_mapped(path))

    monkeypatch.setattr(mappings, "_drop", observed)
    file = Mapped(path)
    users = [file.read(0, 5_000), np.frombuffer(file.read(5_000, 10_000), np.uint8)]
    del file
    places = [place for place, (own, _) in mappings._paths.items() if own == path]
    assert len(places) == 1 and is_mapped(path) and not still_mapped
    users.pop()
    assert not still_mapped
    users.pop()
    assert still_mapped == [True]
    assert not is_mapped(path) and places[0] not in mappings._paths
