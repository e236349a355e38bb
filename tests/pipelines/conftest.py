"""Fixtures of the pipelines' tests: loaders that are closed, and a DALI that gets every image."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.pipelines.cases import opened
from tests.pipelines.dali_cases import trust

Loaders = Callable[..., Any]


@pytest.fixture
def loaders() -> Iterator[Loaders]:
    """Opens loaders, as ``cases.opened`` does, and closes them at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda *a, **k: stack.enter_context(contextlib.closing(opened(*a, **k)))


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let DALI have whatever PIL can open, GIFs too, which it refuses."""
    trust(monkeypatch)
