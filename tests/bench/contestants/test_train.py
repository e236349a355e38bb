"""What is timed of an epoch is no batch that was made ahead."""

from __future__ import annotations

import pytest

from fastsiam.bench.contestants.train import window


@pytest.mark.parametrize(
    ("wanted", "there", "ahead", "whole", "expected"),
    [
        (2, 128, 4, False, (2, 2)),
        (7, 64, 32, True, (32, 32)),
        (7, 8, 32, True, (4, 4)),
        (7, 2502, 0, True, (2, 12)),  # ready tensors: an epoch of ImageNet's length
        (50, 20, 3, False, (3, 17)),
    ],
)
def test_what_is_timed_of_an_epoch(
    wanted: int, there: int, ahead: int, whole: bool, expected: tuple[int, int]
) -> None:
    assert window(wanted, there, ahead, whole=whole) == expected
