"""The process that makes requests: what it tries again, and what becomes of its reader."""

from __future__ import annotations

import signal
from itertools import pairwise
from typing import Any

import pytest

from fastsiam.errors import WorkerError
from fastsiam.pipelines import open_store
from fastsiam.pipelines.remote import client, server
from fastsiam.urls import place

WHERE = ("s3", "bucket", "photos.tar")


class Fails:
    """A request that fails some times, and then gives a value."""

    def __init__(self, error: Exception, times: int) -> None:
        self.error, self.times, self.calls = error, times, 0

    def __call__(self, *_: Any) -> str:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return "made"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made; none takes a while."""
    made: list[float] = []
    monkeypatch.setattr("fastsiam.pipelines.remote.server.time.sleep", made.append)
    return made


def test_pauses_grow_and_differ(pauses: list[float]) -> None:
    request = Fails(RuntimeError("Server returned non-2xx status code: 503"), 9)
    assert server.patiently(request, WHERE) == "made" and request.calls == 10
    assert max(pauses) <= 1.5 * 8 and all(two <= 6 * one for one, two in pairwise(pauses))
    assert 0.05 <= pauses[0] <= 0.15 < pauses[3]
    server.patiently(Fails(request.error, 9), WHERE)
    assert len(pauses) == 18 and pauses[:9] != pauses[9:]


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("Server returned non-2xx status code: 403 Forbidden: SIGNATURE", "refused", ""),
        ("Server returned non-2xx status code: 400: SIGNATURE", "refused", "400"),
        ("http://169.254.169.254/latest: SIGNATURE", "refused", "no credentials were found"),
        ("MissingAccount", "refused", "no credentials were found"),
        ("Received redirect without LOCATION, status: 301 SIGNATURE", "refused", "AWS_REGION"),
        ("status: 416", "changed", ""),
    ],
)
def test_what_is_not_tried_again(text: str, kind: str, reason: str, pauses: list[float]) -> None:
    """And nothing of the library's own words is told: they may hold a signature."""
    request = Fails(RuntimeError(text), 1)
    with pytest.raises(server.Failure) as caught:
        server.patiently(request, ("s3", text, "a.tar"))
    assert caught.value.kind == kind and reason in caught.value.reason
    assert "SIGNATURE" not in caught.value.reason and not pauses


def test_credentials_that_were_there_may_come_back(pauses: list[float]) -> None:
    where = ("s3", "renewed", "a.tar")
    server.patiently(Fails(RuntimeError(), 0), where)
    request = Fails(RuntimeError("http://169.254.169.254/latest"), 2)
    assert server.patiently(request, where) == "made" and len(pauses) == 2


def test_versions_are_told_by_etag_or_by_time() -> None:
    same = server._are_of_one
    assert same((5, 1, "a"), (5, 2, "a")) and not same((5, 1, "a"), (5, 1, "b"))
    assert same((5, 1, ""), (5, 1, "a")) and not same((5, 1, ""), (5, 2, ""))
    assert not same((5, 1, "a"), (6, 1, "a"))


def test_the_process_is_killed(data: str) -> None:
    store = open_store(place(data), "train")
    client._process()._process.send_signal(signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(WorkerError, match=r"was killed.*the same command goes on"):
            store.read_many(range(24))


def test_the_process_ends_with_its_reader(data: str) -> None:
    own = client._process()
    own.forget()
    assert own._process.poll() == 0 or own._process.wait(60) == 0
