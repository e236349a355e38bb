"""The cache of remote data: what it gives, what it keeps, and what it survives."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from fastsiam.config import DataConfig
from fastsiam.errors import DataError
from fastsiam.pipelines.remote import cache as caching
from fastsiam.pipelines.remote import pages
from fastsiam.pipelines.remote.cache import Cache, Range, cached, current_cache, object_key
from fastsiam.pipelines.remote.pages import PAGE, SLACK, runs
from tests.disks import fill, read_only, small_disk
from tests.processes import Forked

SIZE = 20 * PAGE + 1000
"""Bytes of the tests' objects, whose last page is short."""
OTHER = 12345
"""A user that nobody here is."""


@lru_cache
def content(key: str) -> bytes:
    """Return an object's bytes: others for each key."""
    seed = np.frombuffer(key.encode().ljust(8, b"_")[:8], np.uint8)
    return np.random.default_rng(seed.tolist()).integers(0, 256, SIZE, np.uint8).tobytes()


class Server:
    """Objects that are fetched, and what was asked for."""

    def __init__(self) -> None:
        self.asked: list[Range] = []

    def of(self, key: str) -> Callable[[Sequence[Range]], list[bytes]]:
        def fetch(ranges: Sequence[Range]) -> list[bytes]:
            self.asked += ranges
            return [content(key)[start:stop] for start, stop in ranges]

        return fetch

    @property
    def pages(self) -> list[int]:
        """Pages that were asked for since this was last looked at."""
        found = [
            page for start, stop in self.asked for page in range(start // PAGE, -(-stop // PAGE))
        ]
        self.asked.clear()
        return found


@pytest.fixture
def server() -> Server:
    return Server()


def down(ranges: Sequence[Range]) -> list[bytes]:
    raise ConnectionError("the server is down")


def cache_of(folder: Path, most: int) -> Cache:
    """Return a cache of so many pages."""
    return Cache(folder, gigabytes=most * (PAGE + pages.INDEX_BYTES) / 1e9)


def page(number: int) -> Range:
    return number * PAGE, min((number + 1) * PAGE, SIZE)


def read(cache: Cache, server: Server, *numbers: int, key: str = "a") -> list[int]:
    """Read whole pages, check them, and return which of them were fetched."""
    ranges = [page(number) for number in numbers]
    found = cache.get_many(key, SIZE, ranges, server.of(key))
    assert found == [content(key)[start:stop] for start, stop in ranges]
    return server.pages


def kept_bytes(folder: Path) -> int:
    """Return what the folder has on the disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


RANGES = [
    (0, 10),
    (PAGE - 5, PAGE + 5),
    (SIZE - 3, SIZE),
    (7, 7),
    (3 * PAGE + 1, 6 * PAGE),
    (0, SIZE),
]


def test_what_was_read_once_needs_no_server(tmp_path: Path, server: Server) -> None:
    cache = cache_of(tmp_path, 100)
    wanted = [content("a")[start:stop] for start, stop in RANGES]
    assert cache.get_many("a", SIZE, RANGES, server.of("a")) == wanted
    assert cache.get_many("a", SIZE, RANGES, down) == wanted
    assert cache_of(tmp_path, 100).get_many("a", SIZE, RANGES[::-1], down) == wanted[::-1]
    again: Cache = pickle.loads(pickle.dumps(cache))
    assert again.get_many("a", SIZE, RANGES, down) == wanted
    cache.close()
    assert cache.get_many("a", SIZE, RANGES, down) == wanted


def test_missing_pages_are_fetched_whole_and_neighbours_together(
    tmp_path: Path, server: Server
) -> None:
    cache = cache_of(tmp_path, 100)
    cache.get_many("a", SIZE, [(PAGE + 3, PAGE + 4), (2 * PAGE, 2 * PAGE + 1)], server.of("a"))
    cache.get_many("a", SIZE, [(0, 5 * PAGE), (SIZE - 1, SIZE)], server.of("a"))
    assert server.asked == [
        (PAGE, 3 * PAGE), (0, PAGE), (3 * PAGE, 5 * PAGE), (20 * PAGE, SIZE),
    ]  # fmt: skip
    assert list(runs([0, 1, 2, 5, 7, 8])) == [(0, 3), (5, 6), (7, 9)] and not list(runs([]))


def test_what_cannot_be_fetched_is_an_error_and_not_kept(tmp_path: Path, server: Server) -> None:
    cache = cache_of(tmp_path, 100)
    read(cache, server, 1)
    with pytest.raises(ConnectionError):
        cache.get_many("a", SIZE, [page(1), page(2)], down)
    assert read(cache, server, 1, 2) == [2]


def test_an_object_that_changed_is_another(tmp_path: Path, server: Server) -> None:
    keys = [
        object_key("s3://bucket/a.tar", tag=tag, size=size) for tag in ("x", "y") for size in (1, 2)
    ]
    keys.append(object_key("s3://bucket/b.tar", tag="x", size=1))
    assert len(set(keys)) == 5
    cache = cache_of(tmp_path, 100)
    assert [read(cache, server, 0, key=key) for key in keys] == [[0]] * 5
    assert [read(cache, server, 0, key=key) for key in keys] == [[]] * 5


def test_secrets_are_in_no_key_and_no_file(tmp_path: Path, server: Server) -> None:
    key = object_key("https://me:secret1@host/a.tar?sig=secret2", tag="x", size=SIZE)
    assert "secret" not in key
    assert key == object_key("https://host/a.tar?sig=another", tag="x", size=SIZE)
    read(cache_of(tmp_path, 10), server, 0, key="a secret3")
    assert all(b"secret" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_what_was_not_used_for_longest_makes_room(tmp_path: Path, server: Server) -> None:
    cache = cache_of(tmp_path, 4)
    for number in range(4):
        read(cache, server, number)
    assert read(cache, server, 0) == []  # so that 1 is the oldest
    assert read(cache, server, 4) == [4]
    assert read(cache, server, 0, 2, 3, 4) == []
    assert read(cache, server, 1) == [1]


def test_use_by_another_process_counts(tmp_path: Path, server: Server) -> None:
    """A reader that writes nothing tells what it reads too, if that is much."""
    cache, reader = cache_of(tmp_path, 16), cache_of(tmp_path, 16)
    read(cache, server, *range(16))
    assert read(reader, server, *range(8)) == []
    read(cache, server, 16, 17, 18)
    assert read(reader, server, *range(8)) == []


def test_it_never_holds_more_than_it_may(tmp_path: Path, server: Server) -> None:
    cache = cache_of(tmp_path, 5)
    for start in range(0, 20, 3):
        read(cache, server, *range(start, start + 3))
        assert kept_bytes(tmp_path) <= 5 * (PAGE + pages.INDEX_BYTES) + SLACK
        assert (tmp_path / "fastsiam-1" / next_pages(tmp_path)).stat().st_size <= 5 * PAGE
    assert len(read(cache, server, *range(21))) >= 16  # more at once than there is room for


def next_pages(folder: Path) -> str:
    (found,) = (path.name for path in (folder / "fastsiam-1").glob("pages-*"))
    return found


def test_two_runs_with_different_limits(tmp_path: Path, server: Server) -> None:
    """It grows up to the larger, and comes down when the smaller one writes or begins."""
    file, large, small = tmp_path / "fastsiam-1", cache_of(tmp_path, 12), cache_of(tmp_path, 5)
    file /= next_pages(tmp_path)
    read(large, server, *range(12))
    assert file.stat().st_size == 12 * PAGE
    read(small, server, 15)
    assert file.stat().st_size <= 5 * PAGE
    assert read(small, server, 15) == []
    read(large, server, *range(12))
    assert 5 * PAGE < file.stat().st_size <= 12 * PAGE
    assert read(large, server, *range(12)) == []
    cache_of(tmp_path, 4)
    assert file.stat().st_size <= 4 * PAGE
    assert read(large, server, *range(12)) and read(small, server, 2, 15)


def damaged(folder: Path, *, every: int = PAGE) -> None:
    """Change a byte of every page that is kept."""
    file = folder / "fastsiam-1" / next_pages(folder)
    data = bytearray(file.read_bytes())
    for place in range(100, len(data), every):
        data[place] ^= 1
    file.write_bytes(data)


def test_damaged_pages_are_fetched_again_and_said_once(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    cache, other = cache_of(tmp_path, 10), cache_of(tmp_path, 10)
    read(cache, server, 0, 1, 2, 3)
    damaged(tmp_path)
    assert read(cache, server, 0, 1) == [0, 1]
    assert read(other, server, 2, 3) == [2, 3]
    assert read(other, server, 0, 1, 2, 3) == []
    assert [record.message for record in caplog.records] == [
        f"the cache {tmp_path} holds damaged pages: they are fetched again"
    ]
    damaged(tmp_path)
    later = cache_of(tmp_path, 10)  # another run says it too
    assert read(later, server, 0) == [0]
    assert len(caplog.records) == 2


def test_a_file_that_lost_its_end_is_damage(tmp_path: Path, server: Server) -> None:
    cache = cache_of(tmp_path, 10)
    read(cache, server, 0, 1, 2)
    os.truncate(tmp_path / "fastsiam-1" / next_pages(tmp_path), PAGE + 10)
    assert read(cache, server, 0, 1, 2) == [1, 2]


def test_pages_that_changed_places_are_noticed(tmp_path: Path, server: Server) -> None:
    cache = cache_of(tmp_path, 10)
    read(cache, server, 0)
    read(cache, server, 1)
    file = tmp_path / "fastsiam-1" / next_pages(tmp_path)
    data = file.read_bytes()
    file.write_bytes(data[PAGE : 2 * PAGE] + data[:PAGE])
    assert read(cache, server, 0, 1) == [0, 1]


@pytest.mark.parametrize("size", [0, 3, 100, 10_000])
def test_a_damaged_index_is_begun_anew(
    size: int, tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    cache = cache_of(tmp_path, 10)
    read(cache, server, 0, 1)
    cache.close()
    (tmp_path / "fastsiam-1" / "index").write_bytes(bytes([7]) * size)
    cache = cache_of(tmp_path, 10)
    assert read(cache, server, 0, 1) == [0, 1] and read(cache, server, 0, 1) == []
    assert len(list((tmp_path / "fastsiam-1").glob("pages-*"))) == 1
    assert ("had a damaged index" in caplog.text) == (size > 0)


def test_an_index_that_is_damaged_in_its_midst(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Of which the first pages, that tell the tables, are whole."""
    cache = cache_of(tmp_path, 3000)
    small = content("a")[:PAGE]
    with cache._using(cache._writing) as opened:
        assert opened is not None
        opened.put([pages.Page(bytes(16), number, small[:10]) for number in range(2000)])
    cache.close()
    index = tmp_path / "fastsiam-1" / "index"
    data = bytearray(index.read_bytes())
    data[5 * 4096 :] = bytes([9]) * (len(data) - 5 * 4096)
    index.write_bytes(data)
    cache = cache_of(tmp_path, 3000)
    for _ in range(3):
        for number in range(4):
            read(cache, server, number)
    assert read(cache, server, 0, 1, 2, 3) == []
    assert caplog.text.count("had a damaged index") == 1


def test_a_full_disk_ends_keeping_and_not_the_run(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", 4) as disk:
        cache, other = cache_of(disk, 100), cache_of(disk, 100)
        assert read(cache, server, 0, 1) == [0, 1]
        filler = fill(disk)
        for _ in range(2):
            for one in (cache, other):
                assert read(one, server, 0, 1) == []
                assert read(one, server, *range(2, 20))
        assert caplog.text.count("No space left on device") == 1
        filler.unlink()
        later = cache_of(disk, 100)
        read(later, server, 5)
        assert read(later, server, 0, 1, 5) == []


def test_a_disk_that_is_full_from_the_start(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        (disk / "cache").mkdir()
        fill(disk)
        with contextlib.suppress(DataError):  # where there is no room for a folder
            cache = cache_of(disk / "cache", 100)
            assert read(cache, server, 1, 2) == [1, 2] == read(cache, server, 1, 2)
            again = pickle.loads(pickle.dumps(cache))
            assert read(again, server, 1) == [1]
            assert len(caplog.records) == 1


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    read(cache_of(tmp_path / "cache", 100), server, 1)
    with read_only(tmp_path / "cache"):
        cache = cache_of(tmp_path / "cache", 100)
        assert read(cache, server, 2) == [2]
        assert read(cache, server, 2) == [2]
        assert len(caplog.records) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    os.chown(folder, OTHER, OTHER)
    with pytest.raises(DataError, match=rf"{folder} belongs to user {OTHER}.*another --cache"):
        cache_of(folder, 4)


def test_a_folder_that_everybody_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(DataError, match=r"everybody can write into .*cache.* \(chmod o-w\)"):
        cache_of(folder, 4)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot make the cache .*file"):
        cache_of(tmp_path / "file", 4)


def test_settings(tmp_path: Path) -> None:
    settings = DataConfig(cache=str(tmp_path), cache_gb=2)
    with cached(settings) as cache, cached(DataConfig()) as none:
        assert cache is not None and cache.folder.parent == tmp_path
        assert none is None is current_cache()
    assert current_cache() is None
    with cached(settings) as again:
        assert again is cache is current_cache()
    with pytest.raises(ValueError, match="cache-gb must be above 0"):
        DataConfig(cache_gb=0)


def work(folder: Path, most: int, seed: int, rounds: int) -> None:
    """Read pages at random, as a loader worker; what is wrong ends the process."""
    logging.basicConfig()
    cache, server, drawn = cache_of(folder, most), Server(), np.random.default_rng(seed)
    for _ in range(rounds):
        read(cache, server, *sorted(set(drawn.integers(0, 21, 4).tolist())), key="ab"[seed % 2])
        folder.with_name(f"begun-{seed}").touch()
        server.asked.clear()


def test_processes_share_it(tmp_path: Path, server: Server) -> None:
    """What each reads is right, whoever evicts what meanwhile; nobody takes that for damage."""
    begun = [Forked(work, tmp_path, 12, seed, 60) for seed in range(3)]
    for done in [one.wait(120) for one in begun]:
        assert done.returncode == 0 and not done.stderr, done.stderr
    assert (tmp_path / "fastsiam-1" / next_pages(tmp_path)).stat().st_size <= 12 * PAGE


def test_processes_of_two_limits_share_it(tmp_path: Path) -> None:
    begun = [Forked(work, tmp_path, most, seed, 40) for seed, most in enumerate((6, 12))]
    for done in [one.wait(120) for one in begun]:
        assert done.returncode == 0 and not done.stderr, done.stderr
    assert (tmp_path / "fastsiam-1" / next_pages(tmp_path)).stat().st_size <= 12 * PAGE


def test_a_fork_takes_nothing_over(tmp_path: Path, server: Server) -> None:
    """A process that has the cache open forks, as for loader workers, and both go on."""
    cache = cache_of(tmp_path, 10)
    read(cache, server, 0)
    children = []
    for number in range(1, 4):
        if (child := os.fork()) == 0:
            code = 1
            with contextlib.suppress(BaseException):
                read(cache, server, 0, number)
                code = 0
            os._exit(code)
        children.append(child)
    read(cache, server, 5)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert read(cache, server, 0, 1, 2, 3, 5) == []


@pytest.mark.parametrize("waits", [0.0, 0.05, 0.15])
def test_a_process_that_is_killed_leaves_it_whole(
    waits: float, tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    begun = [Forked(work, folder, 10, seed, 10**6) for seed in range(2)]
    while not all((tmp_path / f"begun-{seed}").exists() for seed in range(2)):
        assert all(one.poll() is None for one in begun)
        time.sleep(0.01)
    time.sleep(waits)
    for one in begun:
        one.send(signal.SIGKILL)
        assert one.wait(60).returncode == -signal.SIGKILL
    cache = cache_of(folder, 10)
    for key in "ab":
        read(cache, server, *range(21), key=key)
    assert not caplog.records  # nor is anything damaged


@pytest.mark.parametrize("at", range(1, 7))
def test_killed_at_each_write(at: int, tmp_path: Path, server: Server) -> None:
    """Between all that a process writes into the pages, and before it commits that."""
    cache = cache_of(tmp_path, 4)
    read(cache, server, 0, 1, 2, 3)
    killed = Forked(_killed_writing, tmp_path, at).wait(60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not cache.get_many("a", SIZE, [], down)
    fetched = read(cache, server, 0, 1, 2, 3)
    assert set(fetched) <= {0, 1, 2, 3}
    assert read(cache, server, 0, 1, 2, 3) == []


def _killed_writing(folder: Path, at: int) -> None:
    """Read pages, and be killed in the midst of the write of one, or before their commit."""
    count, write = 0, os.pwrite

    def pwrite(file: int, data: memoryview, offset: int) -> int:
        nonlocal count
        count += 1
        if count == at:
            write(file, data[:1000], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(file, data, offset)

    os.pwrite = pwrite  # type: ignore[assignment]
    cache, server = cache_of(folder, 4), Server()
    for number in range(10, 20, 2):
        read(cache, server, number, number + 1)


def test_another_one_that_writes_for_long_is_not_waited_for(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_PATIENCE", 0.05)
    cache = cache_of(tmp_path, 10)
    read(cache, server, 0)
    with pages._locked(tmp_path / "fastsiam-1"):
        assert read(cache, server, 1, 2) == [1, 2]
    assert read(cache, server, 0, 1, 2) == [1, 2]  # for a while it does not even try
    monkeypatch.setattr(caching, "_PAUSE", 0.0)
    cache = cache_of(tmp_path, 10)
    with pages._locked(tmp_path / "fastsiam-1"):
        assert read(cache, server, 0, 1) == [1] == read(cache, server, 0, 1)
        new = cache_of(tmp_path, 10)  # which cannot be opened now, and is later
        assert read(new, server, 0) == [0]
    assert read(new, server, 0) == []
    assert read(cache, server, 1) == [1] and read(cache, server, 0, 1) == []
