"""Types of settings, as files hold them."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from fastsiam.config.plain import from_plain

CASES = [
    (bool | None, None, None),
    (bool | None, True, True),
    (float, 3, 3.0),
    (Literal["a", "b"] | None, "b", "b"),
    (tuple[float, float], [1, 2], (1.0, 2.0)),
    (tuple[str, ...], [], ()),
]


@pytest.mark.parametrize(("kind", "value", "expected"), CASES)
def test_what_fits_is_taken(kind: Any, value: Any, expected: Any) -> None:
    got = from_plain(kind, value, where="x")
    assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (bool | None, 1, "x must be true or false or nothing, not 1"),
        (int, True, "x must be a whole number, not True"),
        (int, 1.0, "x must be a whole number, not 1.0"),
        (str, None, "x must be text, not None"),
        (Literal["a", "b"] | None, "c", "x must be a or b or nothing, not 'c'"),
        (tuple[float, float], 1, "x must be a list, not 1"),
        (tuple[float, float], [1, "2"], "x must be a number, not '2'"),
    ],
)
def test_what_does_not_is_refused(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        from_plain(kind, value, where="x")
    assert str(caught.value) == message
