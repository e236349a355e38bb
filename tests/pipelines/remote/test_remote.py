"""Data sets in object storage equal those on a disk: images, names, order and views."""

from __future__ import annotations

import contextlib
import os
import signal
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch

from fastsiam.config.urls import place
from fastsiam.errors import WorkerError
from fastsiam.pipelines import Store, open_store
from fastsiam.pipelines.remote import file, storage
from fastsiam.train.image_list import names_of
from tests.conversions import assert_same_images, run
from tests.data_formats import FORMS
from tests.object_storage import BUCKET, connected, read_all, upload, web_server
from tests.pipelines.cases import batches, central, marked, same
from tests.sources import folder_members, put, tar
from tests.tables import write_parquet


def opened(address: str) -> Store:
    return open_store(place(address), "train")


def assert_same(one: Store, other: Store) -> None:
    one.prefetch(range(len(one)))
    assert_same_images(one, other)
    assert names_of(one) == names_of(other)
    assert np.array_equal(one.sizes(), other.sizes())
    assert np.array_equal(one.dimensions(), other.dimensions())  # type: ignore[arg-type]


PLACED = ("shards", "tar of tars", "tar", "converted", "parts")
"""Forms that are read in place from remote storage."""


@pytest.mark.parametrize(
    ("form", "at"), [*((form, "s3") for form in PLACED), ("shards", "web"), ("parts", "web")]
)
def test_remote_data_equal_local_data(
    form: str, at: str, cloud: str, images: Path, tmp_path: Path
) -> None:
    """In a bucket, and on a web server, which has no listings, so the address names the files."""
    here = FORMS[form](images / "train", tmp_path / "made")
    with contextlib.ExitStack() as stack:
        if at == "s3":
            address = upload(cloud, tmp_path / "made", f"form {form}")
        else:
            address = stack.enter_context(web_server(tmp_path)) + "/made"
            names = {"parts": "-{00001..00002}-of-00002.beton", "shards": "-{0000,0001}.tar"}
            if form in names:
                address += "/{train}" + names[form]
        if here.is_file():
            address += f"/{here.name}"
        there = opened(address)
        assert there.is_remote and isinstance(there, type(opened(str(here))))
        assert_same(there, opened(str(here)))
        assert all(there.is_intact(i, there.read(i)) for i in range(len(there)))


@pytest.mark.parametrize("name", marked("torchvision", "native", "dali"))
def test_remote_views_equal_local_views(name: str, data: str, shards: Path) -> None:
    """Two epochs, the first from its second step, and central crops."""
    epochs, crops = [], []
    for address in (str(shards), data):
        epochs.append(batches(name, address, 1, 0, skip=1, workers=2))
        central_crops = central(name, address, split="val", resize=16, batch=5, workers=2)
        crops.append([(batch.image, batch.label, batch.index) for batch in central_crops])
    assert len(epochs[0]) == 5 and same(*epochs)
    for one, other in zip(*crops, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("begun", [False, True])
def test_reading_after_fork_is_rejected(
    begun: bool, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """obstore would wait forever in it and in its child, also for a request of the parent."""
    store = opened(data)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "submit", lambda _: Future[memoryview]())
        store.prefetch([0] * begun)
    if not (child := os.fork()):
        if child := os.fork():
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        signal.alarm(60)  # ends the child if it waits
        try:
            store.read(0)
        except WorkerError as error:
            os._exit(3 if "was forked from one that reads from object storage" in str(error) else 4)
        finally:
            os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    for request in [*file._ahead._requests]:
        file._ahead._drop(request)
    assert all(read_all(store))


def test_index_is_rebuilt_when_object_changes(
    cloud: str, data: str, shards: Path, tmp_path: Path
) -> None:
    first = opened(data)
    index_files = list((tmp_path / "cache" / "fastsiam").glob("*.index"))
    assert len(index_files) == 1 and opened(data).stamp() == first.stamp()
    other = (shards / "train-0002.tar").read_bytes()
    changed = put(tmp_path / "changed" / "train-0001.tar", other).parent
    upload(cloud, changed, data.rpartition("/")[2])
    assert opened(data).stamp() != first.stamp()


def test_remote_parquet_is_converted(cloud: str, images: Path, tmp_path: Path) -> None:
    """pyarrow reads it in order, by row groups."""
    rows = [(d, name, int(name[5])) for name, d in folder_members(images / "train")]
    write_parquet(tmp_path / "table" / "data" / "train-0.parquet", rows, ["a", "b", "c"])
    data = upload(cloud, tmp_path / "table", "parquet")
    for source, out in ((tmp_path / "table", "here"), (data, "there")):
        run("parquet", source, tmp_path / out, workers=2)
    assert_same(opened(str(tmp_path / "there")), opened(str(tmp_path / "here")))


def test_tar_on_web_server_is_converted(images: Path, tmp_path: Path) -> None:
    """Its name has a split, but the server does not list its files."""
    tar(tmp_path / "train.tar", [(name, data) for name, data in folder_members(images / "train")])
    with web_server(tmp_path) as address:
        run("folder", f"{address}/train.tar", tmp_path / "there")
    run("folder", images / "train", tmp_path / "here")
    assert_same(opened(str(tmp_path / "there")), opened(str(tmp_path / "here")))


def test_prefetched_bytes_are_bounded(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest prefetched images are dropped, and read when they are needed."""
    store = opened(data)
    monkeypatch.setattr(file, "MOST_AHEAD", int(store.sizes()[:4].sum()))
    store.prefetch(range(24))
    assert 0 < file._ahead.bytes <= file.MOST_AHEAD
    assert all(read_all(store))


OTHERS = {
    "gs": {"GOOGLE_SERVICE_ACCOUNT_KEY": '{{"gcs_base_url": "{at}", "disable_oauth": true, '
           '"client_email": "", "private_key": "", "private_key_id": ""}}'},
    "az": {"AZURE_STORAGE_ENDPOINT": "{at}", "AZURE_STORAGE_ACCOUNT_NAME": "someone",
           "AZURE_SKIP_SIGNATURE": "true"},
}  # fmt: skip
"""Environment variables that point clients of Google's and Azure's storage at a local server."""


@pytest.mark.parametrize("scheme", OTHERS)
def test_azure_and_gcs_objects_are_read(
    scheme: str, cloud: str, shards: Path, tmp_path: Path
) -> None:
    """A web server stands in for them: it answers like they do, but has no listings."""
    (tmp_path / BUCKET).symlink_to(shards)
    with (
        web_server(tmp_path) as at,
        connected({name: value.format(at=at) for name, value in OTHERS[scheme].items()}),
    ):
        there = opened(f"{scheme}://{BUCKET}/train-{{0002..0000}}.tar")
        assert_same(there, opened(str(shards)))
