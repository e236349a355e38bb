"""Fixtures of DALI's tests: loaders that are closed, and a DALI that gets every image."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.pipelines.dali_cases import Loaders, load, trust


@pytest.fixture
def loaders() -> Iterator[Loaders]:
    """Open DALI's loaders, as ``dali_cases.load`` does, and close them at the end."""
    opened = []

    def keep(*arguments: Any, **settings: Any) -> Any:
        opened.append(load(*arguments, **settings))
        return opened[-1]

    yield keep
    for loader in opened:
        loader.close()


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let DALI have whatever PIL can open, GIFs too, which it refuses."""
    trust(monkeypatch)
