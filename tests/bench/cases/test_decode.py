"""Decoders take part if they are there, and those that are not are named."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fastsiam.bench.cases import decode
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.session import session
from fastsiam.bench.timing import Timing
from tests.bench.made import sample


def test_every_decoder_goes_through_all_images(images: Path) -> None:
    works = decode.build_decoding(path=str(images / "train"), workers=2, batch=8, device="cpu")
    expected = {"PIL", "torchvision.io", decode.OURS, decode.OUR_PART}
    assert expected <= set(works)
    for work in works.values():
        work.run()
        assert work.images == 24


def test_what_refuses_an_image_takes_no_part(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that PIL alone can open; and a library that is not there."""
    from fastsiam.kernels import library

    monkeypatch.setattr(decode, "find_library", lambda _: None)
    monkeypatch.setattr(library, "jpeg", lambda: None)
    monkeypatch.setitem(sys.modules, "spdl", None)
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    works = decode.build_decoding(path=str(images / "train"), workers=1, batch=8, device="cpu")
    assert set(works) == {"PIL", "torchvision.io"}


def test_torchvision_decodes_on_the_gpu_after_all_other_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It writes into memory that queued work may still read (pytorch/vision pull request 9606)."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr("torchvision.io.decode_jpeg", lambda *_, **__: calls.append("decode"))
    decode._by_nvjpeg([torch.zeros(1)] * 3, 2)()
    assert calls == ["synchronize", "decode"] * 2


def test_those_that_are_missing_are_named_with_how_to_get_them(
    little: BenchConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    timing = Timing([sample(1.0)], 8)
    timings = {("decode, original", name): timing for name in ("PIL", "DALI", decode.OURS)}
    with session(little) as own:
        decode.decode_records(own, own.images(8), timings)
    said = capsys.readouterr().err
    assert "SPDL: left out" in said and "pip install spdl-io" in said
    assert "libjpeg-turbo: left out" in said and "DALI:" not in said


def test_bare_decoding_is_of_whole_images_by_others() -> None:
    names = {"PIL": 4.0, "libjpeg-turbo": 2.0, decode.OURS: 1.0, decode.OUR_PART: 0.5}
    timings = {
        ("decode, original", name): Timing([sample(wall)], 8) for name, wall in names.items()
    }
    found = decode.fastest(timings, "original", on_gpu=False)
    assert found is not None and found.wall == [2.0]
    assert np.isclose(found.rate, 4.0)
