"""Epochs from object storage and from local disk, for fastsiam and other libraries."""

from __future__ import annotations

import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from fastsiam.bench import object_storage
from fastsiam.bench.cases import CASES, storage
from fastsiam.bench.cases.storage import OPENERS, STREAMING, build_reading
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.measure import children
from fastsiam.bench.runner import Loading
from fastsiam.bench.session import session
from fastsiam.bench.tables import table
from fastsiam.config import DataConfig
from fastsiam.pipelines import open_split
from tests.conftest import import_or_skip, write_images
from tests.object_storage import read_all, reconnect
from tests.pipelines.cases import SMALL


def build_loading(shards: Path, cache: Path | str, **data: Any) -> Loading:
    settings: dict[str, Any] = {"pipeline": "memory", "workers": 0, "shuffle": "window:1024"} | data
    config = DataConfig(data=str(shards), cache=str(cache), **settings)
    return Loading(data=config, augment=SMALL, batch=8, images=24, device="cpu")


def test_cold_epochs_start_with_empty_cache(tmp_path: Path) -> None:
    storage.pack(sorted(write_images(tmp_path / "images").rglob("*.jpg")), tmp_path / "shards")
    cache = tmp_path / "cache"
    store = open_split(DataConfig(data=str(tmp_path / "shards")), "train")
    assert len(store) == 24 and sorted(store.labels.tolist()) == [0] * 8 + [1] * 8 + [2] * 8
    for cold in (False, True):
        loading = build_loading(tmp_path / "shards", cache)
        task = build_reading("memory", loading, cold=cold, environment={})
        for _ in range(2):
            task.before()
            task.run()
            (cache / "mark").touch()
        task.before()
        assert (cache / "mark").exists() != cold
    task = build_reading("memory", replace(loading, images=80), cold=True, environment={})
    task.before()
    with pytest.raises(RuntimeError, match="it yields 24 of 80 images"):
        task.run()


@pytest.mark.parametrize("reader", STREAMING)
def test_other_libraries_yield_every_image(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every worker has a shard, even with more workers than the default number of shards."""
    monkeypatch.setattr(storage, "_SHARDS", 2)
    if reason := STREAMING[reader].missing:
        pytest.skip(f"not installed: {reason}")
    files = sorted(write_images(tmp_path / "images").rglob("*.jpg"))
    if sample := storage._SAMPLES.get(reader):
        storage.convert_for_litdata(files, tmp_path / "shards", sample)
    else:
        storage.pack(files, tmp_path / "shards", storage.shard_count(3))
    if reader != "slipstream":  # it has threads and always a cache
        loader: Any = OPENERS[reader](build_loading(tmp_path / "shards", "", workers=3))
        assert loader.num_workers == 3
    loading = build_loading(tmp_path / "shards", tmp_path / "cache", workers=3)
    task = build_reading(reader, loading, cold=True, environment={})
    before = len(children())
    for _ in range(2):
        task.before()
        task.run()  # counts the images
        if reader != "slipstream":
            assert len(children()) == before + 3  # the memory of a repeat includes theirs
    assert task.facts()["version"]


def test_local_server_adds_latency_and_hides_other_files(tmp_path: Path) -> None:
    """Only those of the folder: other users of the machine can send requests, too."""
    content = bytes(range(256)) * 4000
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "one").write_bytes(content)
    with object_storage.serve(tmp_path, 0.2) as port:
        address = f"http://127.0.0.1:{port}/{object_storage.BUCKET}/there/one"
        for byte_range, expected in (("bytes=5-900000", content[5:900001]), ("", content)):
            began = time.monotonic()
            request = urllib.request.Request(address, headers={"Range": byte_range})
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert answer.read() == expected
            assert time.monotonic() - began > 0.2
        bucket = address.removesuffix("/there/one")
        for outside in (f"/../{tmp_path.name}/there/one", f"?prefix=../{tmp_path.name}/"):
            with pytest.raises(HTTPError, match="404"):
                urllib.request.urlopen(bucket + outside, timeout=60)


def test_s3_clients_find_objects_on_local_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fastsiam's client lists the objects and fetches them by ETag."""
    import_or_skip("obstore", "cloud")
    storage.pack(sorted(write_images(tmp_path / "images").rglob("*.jpg")), tmp_path / "shards")
    reconnect()
    with object_storage.serve(tmp_path, 0.0) as port:
        for name, value in object_storage.environment(port).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
        here = open_split(DataConfig(data=str(tmp_path / "shards")), "train")
        there = open_split(DataConfig(data=f"s3://{object_storage.BUCKET}/shards"), "train")
        assert read_all(there) == read_all(here) and len(here) == 24
        reconnect()


def test_runners_of_one_latency_are_interleaved(
    bench_config: BenchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runners of several latencies run one after the other: they need too much memory."""
    calls: list[tuple[int, bool]] = []

    def compare(_: object, rows: list[object], *, apart: bool) -> list[object]:
        calls.append((len(rows), apart))
        return []

    monkeypatch.setattr(storage, "compare", compare)
    monkeypatch.setattr(storage, "STREAMING", {})
    for latencies in ((3,), (0, 3)):
        with session(replace(bench_config, latencies=latencies)) as bench_session:
            CASES["storage"].measure(bench_session)
    assert calls == [(2 * 3, False), (2 * 5, True)]


def test_all_readers_make_views_on_the_cpu(
    bench_config: BenchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a machine with a GPU, so that they do the same work; the records say so."""
    devices: set[tuple[str, str]] = set()

    def compare(_: object, rows: list[Any], *, apart: bool) -> list[object]:
        devices.update((row.config["device"], row.build.args[1].device) for row in rows)
        return []

    monkeypatch.setattr(storage, "compare", compare)
    monkeypatch.setattr(storage, "STREAMING", {})
    with session(bench_config) as bench_session:
        CASES["storage"].measure(replace(bench_session, device="cuda"))
    assert devices == {("cpu", "cpu")} and "device" not in CASES["storage"].options


@pytest.mark.slow
def test_remote_storage_is_compared_with_local_disk(bench_config: BenchConfig) -> None:
    import_or_skip("obstore", "cloud")
    config = replace(bench_config, latencies=(3,), recipe="imagenet", crop=32)  # slipstream blurs
    with session(config) as bench_session:
        records = CASES["storage"].measure(bench_session)
    by_name = {one.name: one for one in records}
    places = ["local disk", "S3, 3 ms, cold cache", "S3, 3 ms, warm cache"]
    titles = ["fastsiam --pipeline torchvision", "fastsiam --pipeline native"]
    titles += [library.title for library in STREAMING.values() if library.missing is None]
    assert set(by_name) == {f"{title}, {place}" for title in titles for place in places}
    local = by_name["fastsiam --pipeline torchvision, local disk"]
    assert local.share_of_ceiling == 1 and "local disk" in table(records)
