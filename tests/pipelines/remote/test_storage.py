"""Requests to object storage: what is repeated, what is refused, and what ends them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastsiam.config.urls import Url, place
from fastsiam.errors import DataError, FastSiamError, FileLostError
from fastsiam.pipelines import open_store
from fastsiam.pipelines.remote import storage
from fastsiam.pipelines.remote.storage import Facts
from tests.clouds import broken_proxy, reconnect, web_server
from tests.processes import ROOT, Forked
from tests.train.test_signals import until

WHERE = Url("s3", "bucket", "photos.tar")


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("Server returned non-2xx status code: 403 Forbidden: SIGNATURE", DataError, "denied"),
        ("Server returned non-2xx status code: 400: SIGNATURE", DataError, "answers 400"),
        ("http://169.254.169.254/latest: SIGNATURE", DataError, "no credentials found"),
        ("MissingAccount", DataError, "no credentials found"),
        ("Received redirect without LOCATION, status: 301 SIGNATURE", DataError, "AWS_REGION"),
        ("status: 416", FileLostError, "overwritten"),
        ("status: 412", FileLostError, "overwritten"),
    ],
)
def test_what_is_not_repeated(text: str, kind: type[FastSiamError], said: str) -> None:
    """And nothing of the library's own words is in the message: they may hold a signature."""
    asked: list[str] = []

    async def fails(store: Any, key: str) -> None:
        asked.append(key)
        raise RuntimeError(text)

    with pytest.raises(kind, match=said) as caught:
        storage.results([lambda: storage._request(Url("http", "nowhere", "a.tar"), fails)])
    assert "SIGNATURE" not in str(caught.value) and asked == ["a.tar"]


def test_what_obstore_does_not_repeat(cloud: str, shards: Path, tmp_path: Path) -> None:
    """Half of the lists, and of the objects of a server without ETags, are cut off."""
    with (
        web_server(shards, etags=False) as web,
        broken_proxy(web, tmp_path / "log", cuts=0.5) as at,
    ):
        (facts,) = storage.heads([place(f"{at}/train-0000.tar")])  # type: ignore[list-item]
        assert facts is not None and not facts.etag
        whole = (shards / "train-0000.tar").read_bytes()
        for start in range(8):
            own = (start, len(whole) - start)
            (data,) = storage.fetch(place(f"{at}/train-0000.tar"), facts, [own])  # type: ignore[arg-type]
            assert data == whole[slice(*own)]
    assert {"cut", "whole"} <= set((tmp_path / "log").read_text().split())


def test_lists_that_are_cut_off(
    cloud: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = storage.level(place(data))  # type: ignore[arg-type]
    with broken_proxy(cloud, tmp_path / "log", cuts=0.5) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        reconnect()
        for _ in range(8):
            assert storage.level(place(data)) == expected  # type: ignore[arg-type]
    assert len(expected[0]) == 4 and "cut" in (tmp_path / "log").read_text()


def test_versions_are_told_by_etag_or_by_time() -> None:
    def same(one: tuple[int, int, str], other: tuple[int, int, str]) -> bool:
        return storage.is_same(Facts(*one), Facts(*other))

    assert same((5, 1, "a"), (5, 2, "a")) and not same((5, 1, "a"), (5, 1, "b"))
    assert same((5, 1, ""), (5, 1, "a")) and not same((5, 1, ""), (5, 2, ""))
    assert not same((5, 1, "a"), (6, 1, "a"))


def wait_for_ever(address: str) -> None:
    """Read from a server that does not answer."""
    with contextlib.suppress(KeyboardInterrupt):
        open_store(place(address), "train").read(0)


def test_ctrl_c_ends_a_program_that_waits(cloud: str, data: str, tmp_path: Path) -> None:
    """At once, though the requests under way would be repeated for two minutes."""
    with broken_proxy(cloud, tmp_path / "log", stalls=1) as address:
        environment = {"AWS_ENDPOINT_URL": address, "FASTSIAM_CLOUD_STALL": "60"}
        process = Forked(wait_for_ever, data, environment=environment)
        until(process, (tmp_path / "log").exists)
        process.send(signal.SIGINT)
        done = process.wait(30)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_a_program_ends_with_requests_under_way(cloud: str, shards: Path, tmp_path: Path) -> None:
    """obstore's threads would use the interpreter while it is taken apart."""
    program = (
        "import sys; from fastsiam.pipelines.remote import RemoteFile, RemotePath\n"
        "file = RemoteFile(RemotePath('http', sys.argv[1], 'train-0000.tar'))\n"
        "file.ahead([(0, 5), (10**6, 10**6 + 5)])"
    )
    with web_server(shards) as web, broken_proxy(web, tmp_path / "log", delay=(0.5, 0.6)) as slow:
        done = subprocess.run(
            [sys.executable, "-c", program, slow.removeprefix("http://")],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
        )
    assert done.returncode == 0 and not done.stderr, done.stderr
