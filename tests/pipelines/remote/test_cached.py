"""Data on other machines with a cache between: fetched once by all, and the same images."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastsiam.config import DataConfig
from fastsiam.pipelines import build_loader, open_split
from fastsiam.pipelines.remote import storage
from tests.clouds import read_all, reconnect, web_server
from tests.conftest import write_images
from tests.pipelines.cases import SMALL, build_at, equal
from tests.processes import Forked
from tests.sources import folder_members, tar


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a web server that the tests end: a request without an answer gives up soon."""
    pytest.importorskip("obstore", reason="needs obstore: pip install 'fastsiam[cloud]'")
    monkeypatch.setenv("FASTSIAM_CLOUD_PATIENCE", "0.5")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    reconnect()
    tar(tmp_path / "web" / "train.tar", folder_members(write_images(tmp_path / "images")))
    yield tmp_path / "web"
    reconnect()


def test_a_second_epoch_needs_no_server(web: Path) -> None:
    """All of it is read in the first, as far as whole batches go, and is the same as on a disk."""
    here = build_at("torchvision", str(web / "train.tar"), workers=2)
    expected = [list(here.epoch(0)), list(here.epoch(1))]
    here.close()
    with web_server(web) as address:
        settings = DataConfig(
            data=f"{address}/train.tar",
            pipeline="torchvision",
            workers=2,
            cache=str(web.parent / "cache"),
            cache_gb=0.1,
        )
        there = build_loader(settings, SMALL, batch=8)
        made = [list(there.epoch(0))]
    made.append(list(there.epoch(1)))
    there.close()
    for one, other in zip(expected, made, strict=True):
        assert len(one) == len(other) == 3
        assert all(equal(a, b) for a, b in zip(one, other, strict=True))


def expect(address: str, folder: str, cache: str) -> None:
    """Read all images of an address, by a cache that has them: nothing may be fetched."""
    here = open_split(DataConfig(data=folder), "train")

    def refused(*arguments: object) -> None:
        raise AssertionError(f"fetched {arguments}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "get", refused)
        there = open_split(DataConfig(data=address, cache=cache, cache_gb=0.1), "train")
        assert read_all(there) == read_all(here)


def test_another_process_fetches_nothing_anew(web: Path, tmp_path: Path) -> None:
    """Nor does a forked one, which could not."""
    with web_server(web) as address:
        data, cache = f"{address}/train.tar", str(tmp_path / "cache")
        there = open_split(DataConfig(data=data, cache=cache, cache_gb=0.1), "train")
        wanted = read_all(there)
        others = [Forked(expect, data, str(web / "train.tar"), cache) for _ in range(2)]
        assert read_all(there) == wanted
        for done in [other.wait(120) for other in others]:
            assert done.returncode == 0, done.stderr
    if (child := os.fork()) == 0:
        os._exit(0 if read_all(there) == wanted else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_full_shuffle_of_more_than_fits_keeps_nothing(
    web: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = open_split(DataConfig(data=str(web / "train.tar")), "train")
    folder = tmp_path / "cache"
    with web_server(web) as address:
        for shuffle in ("full", "window:8"):
            settings = DataConfig(
                data=f"{address}/train.tar", cache=str(folder), cache_gb=1e-6, shuffle=shuffle
            )
            for split in (open_split(settings, "train"), open_split(settings, "train")):
                assert read_all(split) == read_all(here)
            assert not [path for path in (folder / "chunks-1").iterdir() if "-" in path.name]
    assert caplog.text.count("--shuffle full reads it at random; pass --shuffle window:16384") == 1
