"""The finding: what limits training, and how many threads ``--workers auto`` would choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastsiam.bench.finding import finding
from fastsiam.bench.measurements import Record
from tests.bench.sample_records import build_record


def build_speed_record(case: str, name: str, speed: int, **more: Any) -> Record:
    return build_record(name, case, 1.0, images=speed, cpu=1.0, config={"workers": 8}, **more)


def build_rows(loads: int, takes: int, trained: dict[str, int]) -> list[Record]:
    ceiling = ("ready tensors", takes)
    return [
        build_speed_record("decode", "PIL", 2 * loads),
        build_speed_record(
            "loader", "torchvision views", loads, pipeline="torchvision", facts={"what": "views"}
        ),
        *(
            build_speed_record(
                "train", name, speed, pipeline=name.partition(",")[0], ceiling=ceiling
            )
            for name, speed in ({"synthetic": takes} | trained).items()
        ),
    ]


def test_finding_names_bottleneck_and_advice() -> None:
    text = finding(build_rows(400, 1600, {"torchvision": 400, "ffcv": 900, "dali": 1568}))
    assert "delivers 400 images/s, the model can take 1,600" in text
    assert "data-bound, training reaches 25%" in text and "decoding is 50%" in text
    assert text.endswith("--pipeline dali would help most and reaches 98%.")
    text = finding(build_rows(400, 1600, {"torchvision": 400, "ffcv": 900}))
    assert "--pipeline ffcv would help most and reaches 56%, then more CPU cores" in text
    text = finding(build_rows(400, 1600, {"torchvision": 400, "ffcv, short256": 900}))
    assert "--pipeline ffcv (short256) would help most and reaches 56%" in text
    text = finding(build_rows(4000, 1000, {"torchvision": 800, "ffcv": 990}))
    assert "the model is the bottleneck, but loading takes CPU time from it" in text
    assert "a GPU would help most, then a smaller --backbone or --crop; --pipeline ffcv" in text
    assert text.endswith("would reach 99%.")
    text = finding(build_rows(4000, 1000, {"torchvision": 800}))
    assert text.endswith("a GPU would help most, then a smaller --backbone or --crop.")
    text = finding(build_rows(400, 10, {"torchvision": 10, "ffcv": 10}))
    assert "the model is the bottleneck, and training reaches 100%" in text
    assert text.endswith("a GPU would help most, then a smaller --backbone or --crop.")
    text = finding(build_rows(400, 1600, {"torchvision": 400, "ffcv": 300}))
    assert "; more CPU cores would help most, then smaller images (fastsiam convert" in text
    assert "decoding is 50% of the loader's work; more CPU" in text
    assert "No finding" in finding([])


def test_finding_with_zero_cpu_time() -> None:
    """A repeat shorter than the clock's tick has a processor time of zero."""
    records = build_rows(400, 1600, {"torchvision": 400, "ffcv": 300})
    records[1] = replace(records[1], cpu_seconds_per_image=0.0)
    assert "25% of what it could; more CPU cores would help most" in finding(records)


@pytest.mark.parametrize(("takes", "threads"), [(10, 1), (1000, 3), (10_000, 8)])
def test_finding_predicts_workers_auto(takes: int, threads: int) -> None:
    """The fewest threads, among those the tuner tries with 8, that keep up with the model."""
    native = build_speed_record("loader", "native views", 400)  # 2.5 ms of CPU time per image
    records = [*build_rows(200, takes, {"torchvision": 1}), native]
    text = finding(records)
    assert f"--workers auto would choose about {threads} of 8 loader threads" in text
    assert text.index("torchvision's loader delivers") > text.index("--workers auto")
