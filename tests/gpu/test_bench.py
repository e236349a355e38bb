"""Measurements on a GPU: each case runs, small, and tells what only a GPU has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fastsiam.bench.cases import CASES
from fastsiam.bench.cases.profile import profile
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.session import session
from tests.conftest import write_images

pytestmark = pytest.mark.gpu


@pytest.fixture
def little(tmp_path: Path) -> BenchConfig:
    """24 images of 40 pixels, views of 32, one repeat."""
    data = write_images(tmp_path / "data" / "train", classes=2, each=12, side=40)
    return BenchConfig(
        data=str(data.parent), images=24, recipe="demo", batch=8, workers=1, repeats=1,
        device="cuda",
    )  # fmt: skip


@pytest.mark.dali
@pytest.mark.ffcv
def test_loaders_training_and_the_machine(little: BenchConfig) -> None:
    with session(little) as own:
        loaded = {one.name: one for one in CASES["loader"].measure(own)}
        fed = {one.name: one for one in CASES["train"].measure(own)}
        most = {one.name for one in CASES["machine"].measure(own)}
    assert "DALI on the GPU" in loaded and "copy from host to device" in most
    assert all(one.gpu_bytes > 0 for one in loaded.values() if one.case == "loader")
    assert set(fed) == {"synthetic", "torchvision", "native", "ffcv", "dali", "memory"}
    assert fed["synthetic"].environment["driver"]


def test_every_way_to_take_a_step(little: BenchConfig) -> None:
    """One after the other; each says what it held at its peak."""
    with session(little) as own:
        records = {one.name: one for one in CASES["step"].measure(own)}
    wanted = {"default", "eager", "fp32", "fp16", "nchw", "recompute"}
    wanted |= {"cuda-graphs", "plain", "plain-bf16", "plain-compiled", "authors"}
    assert wanted <= set(records)
    for one in records.values():
        assert one.facts["apart"] and one.facts["peak_gpu_bytes"] > 0 and one.ratio
    assert records["cuda-graphs"].config["step"]["cuda_graphs"]


def test_the_photometric_stage(little: BenchConfig) -> None:
    with session(replace(little, batch=64)) as own:
        records = {one.name: one for one in CASES["photometric"].measure(own)}
    assert records["fastsiam"].images == 51200 and records["fastsiam"].ratio


@pytest.mark.dali
def test_a_profile_finds_the_longest_gap(little: BenchConfig, tmp_path: Path) -> None:
    with session(replace(little, batch=4)) as own:
        text, record = profile(own, "dali", 2, tmp_path / "trace.json")
    assert 0 < record.facts["gpu_busy"] <= 1 and record.facts["longest_gap"] > 0
    assert "the GPU was busy for" in text and (tmp_path / "trace.json").stat().st_size > 0


@pytest.mark.dali
def test_a_sweep_of_the_jpeg_engine(little: BenchConfig) -> None:
    with session(replace(little, over="jpeg-engine", values=(0, 100), pipelines=("dali",))) as own:
        records = CASES["sweep"].measure(own)
    assert [one.facts["value"] for one in records] == [0, 100]
    assert all(one.gpu_bytes > 0 for one in records)
