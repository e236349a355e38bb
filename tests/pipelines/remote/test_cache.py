"""The cache of remote data: reads, eviction, and behaviour on errors."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from fastsiam.config import DataConfig
from fastsiam.config.urls import Url
from fastsiam.errors import FileLostError
from fastsiam.pipelines import open_split
from fastsiam.pipelines.remote import RemoteFile, RemotePath, cache, file, storage
from fastsiam.pipelines.remote.cache import Cache, Chunk
from fastsiam.pipelines.remote.storage import Facts
from tests.conftest import import_or_skip, write_images
from tests.disks import fill, read_only, small_disk
from tests.object_storage import connected, read_all, upload, web_server
from tests.pipelines.cases import batches, same
from tests.pipelines.conftest import Loaders
from tests.processes import Forked
from tests.sources import folder_members, imagenet, tar

import_or_skip("obstore", "cloud", allow_module_level=True)

CHUNK = 1 << 14
"""Bytes of a chunk in these tests."""
SIZE = 20 * CHUNK + 1000
"""Bytes of each test object, whose last chunk is short."""


@lru_cache
def content(key: str) -> bytes:
    """Return an object's bytes, which depend on its key."""
    seed = np.frombuffer(key.encode().ljust(8, b"_")[:8], np.uint8)
    return np.random.default_rng(seed.tolist()).integers(0, 256, SIZE, np.uint8).tobytes()


class Server:
    """A fake server that records the requested ranges; this process reads from it in small chunks.

    Args:
        patch: Undoes this; a process that ends with the test needs none.
    """

    def __init__(self, patch: pytest.MonkeyPatch | None = None) -> None:
        self.asked: list[tuple[int, int]] = []
        self.is_down = False
        patch = patch or pytest.MonkeyPatch()
        patch.setattr(storage, "get", self.get)
        patch.setattr(cache, "CHUNK", CHUNK)

    async def get(self, url: Url, facts: Facts, start: int, stop: int) -> memoryview:
        self.asked.append((start, stop))
        if self.is_down:
            raise FileLostError(f"{url} was deleted")
        return memoryview(content(url.key))[start:stop]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


def cache_of(folder: Path, most: int) -> Cache:
    return Cache(folder, gigabytes=most * CHUNK / 1e9)


def remote(disk_cache: Cache, key: str = "a", etag: str = "x") -> RemoteFile:
    return RemoteFile(RemotePath("s3", "bucket", key, cache=disk_cache), Facts(SIZE, 0, etag))


def files(folder: Path) -> list[Path]:
    """Return the chunk files, and the incomplete ones that a killed process left."""
    return sorted(path for path in (folder / "chunks-1").iterdir() if path.name != "lock")


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder) if not path.suffix)


def wait_for_fetches() -> None:
    """Wait until this process fetches no chunk."""
    while file._fetching:
        time.sleep(0.001)


def check(there: RemoteFile, *ranges: tuple[int, int]) -> None:
    """Read ranges and compare them with the object's bytes."""
    for start, stop in ranges:
        assert there.read(start, stop) == content(there.path.key)[start:stop]


def read(
    disk_cache: Cache,
    server: Server,
    *numbers: int,
    key: str = "a",
    etag: str = "x",
    ahead: bool = True,
) -> list[int]:
    """Read and check a range of each given chunk; return the chunks that were fetched."""
    remote_file = remote(disk_cache, key, etag)
    ranges = [(n * CHUNK + 5, min((n + 1) * CHUNK - 5, SIZE)) for n in numbers]
    if ahead:
        remote_file.prefetch(ranges)
    check(remote_file, *ranges)
    wait_for_fetches()
    fetched = [start // CHUNK for start, stop in server.asked if stop - start in (CHUNK, 1000)]
    server.asked.clear()
    return sorted(fetched)


def test_cached_ranges_need_no_server(tmp_path: Path, server: Server) -> None:
    disk_cache = cache_of(tmp_path, 100)
    ranges = [(0, 10), (CHUNK - 5, CHUNK + 5), (SIZE - 3, SIZE), (7, 7), (3 * CHUNK, SIZE + 9)]
    for one in (disk_cache, cache_of(tmp_path, 100), pickle.loads(pickle.dumps(disk_cache))):
        check(remote(one), *ranges)
        server.is_down = True
    assert sorted(server.asked) == [(n * CHUNK, min((n + 1) * CHUNK, SIZE)) for n in range(21)
                                    if n != 2]  # fmt: skip
    with pytest.raises(FileLostError):
        remote(disk_cache).read(2 * CHUNK, 2 * CHUNK + 5)
    server.is_down = False
    server.asked.clear()
    assert read(disk_cache, server, 1, 2) == [2]  # a chunk that could not be fetched was not kept


def test_object_versions_are_cached_separately(tmp_path: Path, server: Server) -> None:
    disk_cache = cache_of(tmp_path, 100)
    versions = [RemoteFile(RemotePath("s3", "b", key), Facts(size, time, etag))._version
                for key in "ab" for size in (1, 2) for time in (1, 2) for etag in "xy"]  # fmt: skip
    assert len({*versions}) == 16
    for etag in ("x", "y"):
        assert read(disk_cache, server, 0, etag=etag) == [0]
        assert read(disk_cache, server, 0, etag=etag) == []


def test_least_recently_used_chunk_is_evicted(tmp_path: Path, server: Server) -> None:
    disk_cache = cache_of(tmp_path, 5)
    for number in range(4):
        read(disk_cache, server, number)
    assert read(disk_cache, server, 0) == []  # so 1 is the oldest
    assert read(disk_cache, server, 4, 5) == [4, 5]
    assert read(disk_cache, server, 0, 4, 5) == [] and read(disk_cache, server, 1) == [1]


def test_cache_never_exceeds_its_limit(tmp_path: Path, server: Server) -> None:
    disk_cache = cache_of(tmp_path, 5)
    for start in range(0, 20, 3):
        read(disk_cache, server, *range(start, start + 3))
        assert bytes_of(tmp_path) <= 5 * CHUNK
    read(disk_cache, server, *range(21))  # more at once than it holds
    read(cache_of(tmp_path, 3), server, 20, 0)
    assert bytes_of(tmp_path) <= 3 * CHUNK
    assert read(Cache(tmp_path / "tiny", 1e-9), server, 0, 0)  # less than a chunk
    assert not files(tmp_path / "tiny")


def test_truncated_chunk_is_fetched_again(tmp_path: Path, server: Server) -> None:
    disk_cache = cache_of(tmp_path, 10)
    read(disk_cache, server, 0, 1)
    os.truncate(files(tmp_path)[0], 100)
    assert read(disk_cache, server, 0, 1) == [0] and read(disk_cache, server, 0, 1) == []


def test_full_disk_disables_caching_with_one_warning(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        disk_cache = cache_of(disk, 100)
        assert read(disk_cache, server, 0, 1) == [0, 1]
        filler = fill(disk)
        for _ in range(2):
            assert read(disk_cache, server, 0, 1) == []
            read(disk_cache, server, *range(2, 20))
        assert caplog.text.count("No space left on device") == 1
        filler.unlink()
        later = cache_of(disk, 100)
        read(later, server, 5)
        assert read(later, server, 0, 1, 5) == []


def test_read_only_cache_is_read_with_one_warning(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    read(cache_of(tmp_path / "cache", 100), server, 1)
    with read_only(tmp_path / "cache"):
        disk_cache = cache_of(tmp_path / "cache", 100)
        check(remote(disk_cache), (CHUNK, CHUNK + 9))
        assert not server.asked
        for _ in range(2):
            read(disk_cache, server, 1, 2)
        assert len(caplog.records) == 1 and "cannot write to the cache" in caplog.text
        check(remote(disk_cache), (CHUNK, CHUNK + 9))
        assert not server.asked


def work(folder: Path, most: int, seed: int, rounds: int) -> None:
    """Read random chunks like a loader process; fail if a byte is wrong."""
    logging.basicConfig()
    disk_cache, server, generator = cache_of(folder, most), Server(), np.random.default_rng(seed)
    for _ in range(rounds):
        numbers = sorted(set(generator.integers(0, 21, 4).tolist()))
        read(disk_cache, server, *numbers, key="ab"[seed % 2])


def test_processes_share_cache(tmp_path: Path) -> None:
    """Each reads the right bytes, whatever the others evict meanwhile under different limits."""
    processes = [
        Forked(work, tmp_path / "cache", 6 + 6 * (seed % 2), seed, 15) for seed in range(3)
    ]
    for result in [one.wait(120) for one in processes]:
        assert result.returncode == 0 and not result.stderr, result.stderr
    assert bytes_of(tmp_path / "cache") <= 12 * CHUNK


def fetch_all(folder: Path) -> None:
    """Fetch all chunks one at a time."""
    storage.PARALLEL = 1
    disk_cache, server = cache_of(folder, 100), Server()
    get = server.get

    async def slow(*arguments: object) -> memoryview:
        async with storage.client().limit:
            await asyncio.sleep(0.1)
        return await get(*arguments)  # type: ignore[arg-type]

    storage.get = slow  # type: ignore[assignment]
    print(len(read(disk_cache, server, *range(21))))


def test_processes_fetch_each_chunk_once(tmp_path: Path) -> None:
    """The process that comes second waits for the first."""
    processes = [Forked(fetch_all, tmp_path) for _ in range(2)]
    assert sum(int(one.wait(120).stdout) for one in processes) == 21


def test_claim_is_renewed_while_chunk_is_fetched(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes then wait, however long the fetch takes."""
    monkeypatch.setattr(cache, "_LONGEST_WAIT", 0.03)

    async def get_after_renewal(*arguments: Any) -> memoryview:
        (claim,) = files(tmp_path)
        start = claim.stat().st_mtime_ns
        for _ in range(6000):
            if claim.stat().st_mtime_ns > start:
                return await server.get(*arguments)
            await asyncio.sleep(0.01)
        raise AssertionError("the claim is not renewed")

    monkeypatch.setattr(storage, "get", get_after_renewal)
    assert read(cache_of(tmp_path, 10), server, 1) == [1]
    assert not [path for path in files(tmp_path) if path.suffix]


def test_chunk_that_another_process_just_cached_is_not_fetched(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_cache, take = cache_of(tmp_path, 10), Cache._take
    assert read(disk_cache, server, 1) == [1]
    (cached,) = files(tmp_path)
    hidden = cached.rename(tmp_path / "hidden")

    def take_late(self: Cache, claim: Path) -> bool:
        hidden.rename(cached)
        return take(self, claim)

    monkeypatch.setattr(Cache, "_take", take_late)
    assert read(disk_cache, server, 1) == []


def killed_writing(folder: Path) -> None:
    disk_cache, server = cache_of(folder, 4), Server()

    def write_half(path: Path, data: memoryview) -> None:
        with path.open("wb") as file:
            file.write(data[:1000])
        os.kill(os.getpid(), signal.SIGKILL)

    Path.write_bytes = write_half  # type: ignore[assignment, method-assign]
    read(disk_cache, server, 1)


def test_partial_chunk_of_killed_process_is_not_read(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a chunk, and a claim to it, which other processes respect for a while."""
    killed = Forked(killed_writing, tmp_path).wait(60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert sorted(path.suffix for path in files(tmp_path)) == [".claim", ".part"]
    monkeypatch.setattr(cache, "_LONGEST_WAIT", 0.1)
    disk_cache = cache_of(tmp_path, 4)
    assert read(disk_cache, server, 1) == [1] and read(disk_cache, server, 1) == []
    assert not [path for path in files(tmp_path) if path.suffix == ".part"]


def test_lock_of_stopped_process_does_not_block_reads(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_PATIENCE", 0.1)
    disk_cache = cache_of(tmp_path, 10)
    with FileLock(disk_cache.folder / "lock"):
        for _ in range(2):
            assert read(disk_cache, server, 1, ahead=False) == [1]
    assert read(disk_cache, server, 1) == [1] and read(disk_cache, server, 1) == []


def test_memory_is_bounded_if_disk_is_slower_than_network(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that have been fetched but not yet written to disk are in memory."""
    disk_cache, keys, keep = cache_of(tmp_path, 400), "abcdefghijklmnop", Cache._keep
    in_memory, written_chunks = list[int](), list[str]()

    def slow(self: Cache, chunk: Chunk, data: memoryview) -> None:
        in_memory.append(len(server.asked) - len(written_chunks))
        time.sleep(0.005)
        keep(self, chunk, data)
        written_chunks.append(chunk.name)

    monkeypatch.setattr(Cache, "_keep", slow)
    for key in keys:
        remote(disk_cache, key).prefetch([(0, SIZE)])
    for key in keys:
        check(remote(disk_cache, key), (0, SIZE))
    assert len(server.asked) == 21 * len(keys) and max(in_memory) <= storage.PARALLEL


class CachedReads(RuleBasedStateMachine):
    """Reads return the object's bytes while the cache's limit changes and its files are damaged."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.server, self.folder = Server(self.patch), Path(tempfile.mkdtemp())
        self.reopen(8)

    @rule(most=st.integers(1, 30))
    def reopen(self, most: int) -> None:
        self.most, self.cache = most, cache_of(self.folder, most)

    @rule(is_down=st.booleans())
    def switch_server(self, is_down: bool) -> None:
        self.server.is_down = is_down

    @rule(
        key=st.sampled_from("ab"),
        start=st.integers(0, SIZE - 1),
        length=st.integers(1, 3 * CHUNK),
        ahead=st.booleans(),
    )
    def read(self, key: str, start: int, length: int, ahead: bool) -> None:
        stop, asked = min(start + length, SIZE), len(self.server.asked)
        one = remote(self.cache, key)
        if ahead:
            one.prefetch([(start, stop)])
        try:
            data = one.read(start, stop)
        except FileLostError:
            assert self.server.is_down
            return
        finally:
            wait_for_fetches()  # so that the next rule always finds the same files
        assert data == content(key)[start:stop]
        if len(self.server.asked) == asked:
            return  # nothing was added
        assert bytes_of(self.folder) <= max(self.most * CHUNK, CHUNK)

    @rule(share=st.floats(0, 1, exclude_max=True), keep=st.floats(0, 1, exclude_max=True))
    def truncate_file(self, share: float, keep: float) -> None:
        if paths := files(self.folder):
            path = paths[int(share * len(paths))]
            path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])

    @rule(share=st.floats(0, 1, exclude_max=True))
    def delete_file(self, share: float) -> None:
        if paths := files(self.folder):
            paths[int(share * len(paths))].unlink()

    @rule(name=st.sampled_from(["0-000001.ab.part", "note.txt"]))
    def leave_other_file(self, name: str) -> None:
        (self.folder / "chunks-1" / name).write_bytes(b"left")

    def teardown(self) -> None:
        self.server.is_down = False
        for key in "ab":
            check(remote(self.cache, key), (0, SIZE))
        self.patch.undo()
        shutil.rmtree(self.folder)


TestCachedReads: Any = CachedReads.TestCase
TestCachedReads.settings = settings(max_examples=25, stateful_step_count=25)


# Ranges that the cache does not keep.


def test_failed_prefetch_is_requested_again(server: Server) -> None:
    path, ranges = RemotePath("s3", "bucket", "a"), [(0, 9), (5, CHUNK)]
    server.is_down = True
    there = RemoteFile(path, Facts(SIZE, 0, "x"))
    there.prefetch(ranges)
    with pytest.raises(FileLostError):
        there.read(*ranges[0])
    failed = file._ahead._requests[path, there.facts, ranges[1]]
    assert failed.exception()  # it stays until it is read
    server.is_down = False
    there.prefetch(ranges)
    check(there, *ranges)
    assert not file._ahead.bytes


def test_uncached_prefetched_range_is_fetched_once(tmp_path: Path, server: Server) -> None:
    """Also across the boundary of two chunks, one of which may be cached."""
    disk_cache = cache_of(tmp_path, 100)
    assert read(disk_cache, server, 4) == [4]
    disk_cache.keeps = False
    ranges = [(n * CHUNK - 9, n * CHUNK + 9) for n in (1, 2, 4, 5)]
    there = remote(disk_cache)
    there.prefetch(ranges)
    check(there, *ranges)
    check(there, (4 * CHUNK, 4 * CHUNK + 9))
    assert sorted(server.asked) == ranges and not file._ahead.bytes


def test_prefetched_range_of_older_version_is_not_read(server: Server) -> None:
    """A later loader of the same process must not get bytes that an earlier one prefetched."""
    older, newer = (RemoteFile(RemotePath("s3", "bucket", "a"), Facts(SIZE, 0, x)) for x in "xy")
    older.prefetch([(0, 9)])
    check(newer, (0, 9))
    assert file._ahead.bytes == 9
    check(older, (0, 9))
    assert not file._ahead.bytes
    assert server.asked == [(0, 9)] * 2


# Data sets that are read through the cache.


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Path]:
    """The folder for a web server that tests stop. Requests then give up quickly."""
    tar(tmp_path / "web" / "train.tar", folder_members(write_images(tmp_path / "images")))
    with connected({"FASTSIAM_CLOUD_PATIENCE": "0.5", "XDG_CACHE_HOME": str(tmp_path / "home")}):
        yield tmp_path / "web"


def test_second_epoch_needs_no_server(web: Path, loaders: Loaders) -> None:
    """The first epoch reads all full batches. Batches equal those of data on a disk."""
    expected = batches("torchvision", str(web / "train.tar"), 0, 1)
    with web_server(web) as address:
        cache: Any = {"cache": str(web.parent / "cache"), "cache_gb": 0.1}
        loader = loaders("torchvision", f"{address}/train.tar", workers=2, **cache)
        first_epoch = list(loader.epoch(0))
    assert same([*first_epoch, *loader.epoch(1)], expected)


def test_full_shuffle_larger_than_cache_caches_nothing(
    web: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even while the tar is indexed. With a window, the cache holds a chunk."""
    monkeypatch.setattr(cache, "CHUNK", CHUNK)
    here = open_split(DataConfig(data=str(web / "train.tar")), "train")
    folder = tmp_path / "cache"
    with web_server(web) as address:
        for shuffle in ("full", "window:8"):
            settings = DataConfig(
                data=f"{address}/train.tar",
                cache=str(folder),
                cache_gb=1.5 * CHUNK / 1e9,
                shuffle=shuffle,
            )
            for split in (open_split(settings, "train"), open_split(settings, "train")):
                assert read_all(split) == read_all(here)
            assert bool(bytes_of(folder)) == (shuffle != "full")
    message = "a full shuffle or an evaluation reads it at random; train with --shuffle window:"
    assert caplog.text.count(message) == 1


def test_cache_on_full_disk_is_not_called_too_small(
    web: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", 1) as disk, web_server(web) as address:
        Cache(disk, gigabytes=0.1)
        fill(disk)
        settings = DataConfig(data=f"{address}/train.tar", cache=str(disk), cache_gb=0.1)
        assert len(open_split(settings, "train"))
    assert "cannot write to the cache" in caplog.text and "stores nothing" not in caplog.text


def test_cache_larger_than_validation_tar_keeps_it(
    cloud: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The training tar, which is opened for the names of the classes, need not fit."""
    monkeypatch.setattr(cache, "CHUNK", CHUNK)
    folder, root = tmp_path / "cache", imagenet(tmp_path / "imagenet")
    sizes = {path.name: path.stat().st_size for path in root.glob("*.tar")}
    limit = sizes["ILSVRC2012_img_val.tar"] + CHUNK
    assert limit < sizes["ILSVRC2012_img_train.tar"]
    settings = DataConfig(
        data=upload(cloud, root, "imagenet"), cache=str(folder), cache_gb=limit / 1e9
    )
    read_all(open_split(settings, "val"))
    assert bytes_of(folder) == sizes["ILSVRC2012_img_val.tar"] and not caplog.text
