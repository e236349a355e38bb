"""Training is fed by each pipeline, from each form of the images that matters to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastsiam.bench.cases import CASES
from fastsiam.bench.cases.train import window
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.contest import Build, Contest
from fastsiam.bench.session import Session, session
from fastsiam.config import TrainConfig


class Announced(Contest):
    """A contest in which nobody is measured."""

    def __init__(self) -> None:
        super().__init__(print)
        self.entered: dict[str, TrainConfig] = {}

    def enter(self, name: str, build: Build, /, *, ranks: int = 1, **settings: Any) -> bool:
        self.entered[name] = settings["config"]
        return False


def test_a_pipeline_that_reads_converted_images_has_each_form_of_them(
    little: BenchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    contest = Announced()
    monkeypatch.setattr(Session, "contest", lambda _: contest)
    config = replace(little, pipelines="ffcv,memory", stored="original,pixels256")
    with session(config) as own:
        assert CASES["train"].measure(own) == []
    names = ["synthetic", "torchvision", "ffcv", "ffcv, pixels256", "memory"]
    assert list(contest.entered) == names
    assert [one.data.pipeline for one in contest.entered.values()] == [
        name.partition(",")[0] for name in names
    ]
    first, second = (contest.entered[name].data.data for name in names[2:4])
    assert first.endswith("-original") and second.endswith("-pixels256")


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
def test_what_is_timed_of_an_epoch_was_not_made_ahead(
    wanted: int, there: int, ahead: int, whole: bool, expected: tuple[int, int]
) -> None:
    assert window(wanted, there, ahead, whole=whole) == expected
