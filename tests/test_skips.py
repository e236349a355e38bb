"""A test that needs a missing package is skipped, or fails if ``$FASTSIAM_NO_SKIP`` is set."""

from __future__ import annotations

import json

import pytest

from tests.conftest import import_or_skip


@pytest.mark.parametrize(
    ("no_skip", "outcome"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)]
)
def test_missing_package_skips_or_fails(
    no_skip: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTSIAM_NO_SKIP", no_skip)
    assert import_or_skip("json", "timm") is json
    for extra, install in (("", "missing_package"), ("timm", r"'fastsiam\[timm\]'")):
        with pytest.raises(outcome, match=rf"needs missing_package: pip install {install}$"):
            import_or_skip("missing_package.part", extra)
