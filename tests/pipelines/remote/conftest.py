"""Fixtures for tests of remote data: an S3 server for the session, and a data set on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import import_or_skip, write_data
from tests.data_formats import write_shards
from tests.object_storage import connected, environment, s3_server, upload


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of an S3 server on loopback."""
    import_or_skip("obstore", "cloud")
    import_or_skip("moto.server", "dev")
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """WebDataset shards: three with 24 training images, and one with 12 validation images."""
    folder = tmp_path_factory.mktemp("shards")
    images = write_data(folder / "images")
    for split, count in (("train", 3), ("val", 1)):
        write_shards(images / split, folder / "tars", split=split, count=count)
    return folder / "tars"


@pytest.fixture
def cloud(s3: str, tmp_path: Path) -> Iterator[str]:
    """The address of the S3 server, which this process's environment points to."""
    with connected(environment(s3, tmp_path / "cache")):
        yield s3


@pytest.fixture
def data(cloud: str, shards: Path, request: pytest.FixtureRequest) -> str:
    """The address of the shards in S3, below a prefix for this test."""
    return upload(cloud, shards, request.node.name)
