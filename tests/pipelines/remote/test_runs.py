"""Runs from object storage over a bad connection: bit-identical losses and no leaked secrets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastsiam.config import TrainConfig
from fastsiam.pipelines.remote import cache
from fastsiam.run import checkpoint as checkpoints
from tests.configs import flags, with_settings
from tests.object_storage import KEY, SECRET, connected, environment, faulty_proxy, upload
from tests.processes import fastsiam
from tests.tiers import rest_slow
from tests.train.runs import (
    history,
    make_worker_kill_hook,
    resume_after,
    train_run,
    train_until_kill,
)

BAD_LINE = {"errors": 0.1, "cuts": 0.1, "stalls": 0.02}
"""Much worse than one failure in 100 requests, as on a busy day: a short run meets every fault."""


def assert_no_secret(*folders: Path) -> None:
    """Check that no file contains a credential."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        data = path.read_bytes()
        assert KEY.encode() not in data and SECRET.encode() not in data, path


@pytest.fixture
def bad_line(s3: str, tmp_path: Path) -> Iterator[None]:
    """S3 behind a faulty proxy, to which this process's environment points."""
    with (
        faulty_proxy(s3, tmp_path / "log", delay=(0.02, 0.06), **BAD_LINE) as address,
        connected(environment(address, tmp_path / "cache")),
    ):
        yield


LOADERS = [("native", 2, 70), ("torchvision", 2, 0), ("native", 2, 0), ("torchvision", 0, 0)]
"""Pipeline, workers and kB of the cache, which is smaller than the data; 0 means no cache."""


@pytest.mark.usefixtures("bad_line")
@pytest.mark.parametrize(("pipeline", "workers", "kilobytes"), rest_slow(LOADERS))
def test_run_over_faulty_connection_equals_local_run(
    pipeline: str,
    workers: int,
    kilobytes: int,
    s3: str,
    shards: Path,
    small: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run is killed in its second epoch, and resumed."""
    monkeypatch.setattr(cache, "CHUNK", 2**12)
    config = with_settings(small, pipeline=pipeline, workers=workers, epochs=3, save_every=2)
    config = with_settings(config, shuffle="window:8" if kilobytes else "full")
    expected = history(train_run(config, data=shards, out=tmp_path / "here"))
    config = with_settings(config, data=upload(s3, shards, f"bad-line-{pipeline}-{workers}"))
    if kilobytes:
        config = with_settings(config, cache=tmp_path / "chunks", cache_gb=kilobytes / 1e6)
    assert checkpoints.load(train_until_kill(config, 5)).step == 4
    assert len(expected) == 9 and history(train_run(config)) == expected
    assert set(BAD_LINE) <= set((tmp_path / "log").read_text().split())
    assert bool(kilobytes) == (tmp_path / "chunks").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("bad_line")
@pytest.mark.parametrize("pipeline", ["torchvision", "memory"])
def test_commands_over_faulty_connection(
    pipeline: str,
    s3: str,
    shards: Path,
    small: TrainConfig,
    tmp_path: Path,
) -> None:
    """A run is stopped mid-epoch, resumed and evaluated, and nothing leaks a secret.

    The run's folder contains the address, and the losses equal those of a run from a disk.
    """
    data = upload(s3, shards, f"commands-{pipeline}")
    config = with_settings(small, pipeline=pipeline, workers=1, epochs=3, save_every=5)
    here = with_settings(config, data=str(shards), out=str(tmp_path / "here"))
    there = with_settings(config, data=data, out=str(tmp_path / "there"))
    fastsiam("train", *flags(here))
    results = [
        fastsiam("train", *flags(there), "--max-steps", "5"),
        fastsiam("train", *flags(there)),
        fastsiam("eval", "knn", str(tmp_path / "there"), "--json", str(tmp_path / "there/k.json")),
        fastsiam("views", "--data", data, "--out", str(tmp_path / "there" / "views.png")),
        fastsiam("convert", "folder", "--source", data, "--out", str(tmp_path / "there" / "made")),
    ]
    assert set(BAD_LINE) <= set((tmp_path / "log").read_text().split())
    assert len(history(tmp_path / "here")) == 9
    assert history(tmp_path / "there") == history(tmp_path / "here")
    assert data in (tmp_path / "there" / "config.json").read_text()
    (tmp_path / "there" / "said").write_text("".join(one.stdout + one.stderr for one in results))
    assert_no_secret(tmp_path / "there", tmp_path / "cache")


def test_killed_loader_process_of_remote_data(
    data: str, small: TrainConfig, tmp_path: Path
) -> None:
    """A fork server started it. The error is still one line, and the run resumes."""
    config = with_settings(small, pipeline="torchvision", workers=2, knn_every=0, data=data)
    error = resume_after(config, tmp_path, make_worker_kill_hook())
    assert str(error).startswith("a worker process died (")
