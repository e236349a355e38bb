"""Requests to object storage: which are retried, which are rejected, and what ends them."""

from __future__ import annotations

import contextlib
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fastsiam.config import DataConfig
from fastsiam.config.urls import Url, place
from fastsiam.errors import DataError, FastSiamError, FileLostError, NoSplitError
from fastsiam.pipelines import open_store
from fastsiam.pipelines.remote import storage
from fastsiam.pipelines.remote.storage import Facts
from tests.conftest import import_or_skip
from tests.object_storage import KEY, SECRET, connected, faulty_proxy, read_all, upload, web_server
from tests.processes import Forked, python, wait_until
from tests.sources import folder_members, tar
from tests.tables import write_parquet


@pytest.mark.parametrize(
    ("text", "kind", "message"),
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
def test_permanent_errors_are_not_retried(
    text: str, kind: type[FastSiamError], message: str
) -> None:
    """The error message leaves out the library's text, which may contain a signature."""
    requested_keys: list[str] = []

    async def fails(store: Any, key: str) -> None:
        requested_keys.append(key)
        raise RuntimeError(text)

    with pytest.raises(kind, match=message) as caught:
        storage.results([lambda: storage._request(Url("http", "nowhere", "a.tar"), fails)])
    assert "SIGNATURE" not in str(caught.value) and requested_keys == ["a.tar"]


def test_truncated_answers_are_retried(data: str, cloud: str, shards: Path, tmp_path: Path) -> None:
    """Half of the listings, and of the objects of a server without ETags, are truncated."""
    with (
        web_server(shards, etags=False) as web,
        faulty_proxy(web, tmp_path / "log", cuts=0.5) as at,
    ):
        (facts,) = storage.heads([place(f"{at}/train-0000.tar")])  # type: ignore[list-item]
        assert facts is not None and not facts.etag
        original = (shards / "train-0000.tar").read_bytes()
        for start in range(8):
            byte_range = (start, len(original) - start)
            content = storage.read(place(f"{at}/train-0000.tar"), facts, *byte_range)  # type: ignore[arg-type]
            assert content == original[slice(*byte_range)]
    expected = storage.level(place(data))  # type: ignore[arg-type]
    with (
        faulty_proxy(cloud, tmp_path / "lists", cuts=0.5) as address,
        connected({"AWS_ENDPOINT_URL": address}),
    ):
        assert [storage.level(place(data)) for _ in range(8)] == [expected] * 8  # type: ignore[arg-type]
    assert len(expected[0]) == 4
    for log in ("log", "lists"):
        assert {"cuts", "whole"} <= set((tmp_path / log).read_text().split())


def test_versions_are_compared_by_etag_or_time() -> None:
    def same(one: tuple[int, int, str], other: tuple[int, int, str]) -> bool:
        return storage.is_same(Facts(*one), Facts(*other))

    assert same((5, 1, "a"), (5, 2, "a")) and not same((5, 1, "a"), (5, 1, "b"))
    assert same((5, 1, ""), (5, 1, "a")) and not same((5, 1, ""), (5, 2, ""))
    assert not same((5, 1, "a"), (6, 1, "a"))


def wait_for_ever(address: str) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        open_store(place(address), "train").read(0)


def test_sigint_ends_pending_requests(cloud: str, data: str, tmp_path: Path) -> None:
    """At once, although pending requests would be retried for two minutes."""
    with faulty_proxy(cloud, tmp_path / "log", stalls=1) as address:
        environment = {"AWS_ENDPOINT_URL": address, "FASTSIAM_CLOUD_STALL": "60"}
        process = Forked(wait_for_ever, data, environment=environment)
        wait_until(process, (tmp_path / "log").exists)
        process.send(signal.SIGINT)
        result = process.wait(30)
    assert result.returncode == 0 and not result.stderr, result.stderr


def test_program_exits_with_pending_requests(cloud: str, shards: Path, tmp_path: Path) -> None:
    """Otherwise obstore's threads would use the interpreter while it shuts down."""
    program = (
        "import sys; from fastsiam.pipelines.remote import RemoteFile, RemotePath\n"
        "file = RemoteFile(RemotePath('http', sys.argv[1], 'train-0000.tar'))\n"
        "file.prefetch([(0, 5), (10**6, 10**6 + 5)])"
    )
    with web_server(shards) as web, faulty_proxy(web, tmp_path / "log", delay=(0.5, 0.6)) as slow:
        result = python(program, slow.removeprefix("http://"))
    assert result.returncode == 0 and not result.stderr, result.stderr


# Errors are one line that says what to do, without secrets.


def error_of(address: str) -> str:
    with pytest.raises(DataError) as caught:
        read_all(open_store(place(address), "train"))
    assert "\n" not in str(caught.value) and SECRET not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def web(cloud: str, images: Path, tmp_path: Path) -> Path:
    return tar(tmp_path / "web" / "photos.tar", folder_members(images / "train")).parent


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("s3://user:PASSWORD@bucket/photos", "s3://bucket/... contains a password, a signature"),
        ("https://u:PASSWORD@host/a.tar", "https://host/... contains a password, a signature"),
        ("https://host/a.tar?X-Amz-Signature=PASSWORD", "https://host/... contains a password"),
        ("https://host?sig=PASSWORD", "https://host/... contains a password"),
        ("ftp://host/a.tar", "cannot read data at ftp://; pass a path or a URL with s3://, gs://"),
        ("s3:///a", "s3:// has no bucket"),
        ("s3://bucket/a/../b", "s3://bucket/a/../b contains . or .., which URLs do not"),
    ],
)
def test_invalid_addresses_are_rejected(address: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        DataConfig(data=address)
    assert message in str(caught.value) and "PASSWORD" not in str(caught.value)


def test_percent_encoded_addresses_are_parsed() -> None:
    """Characters that would change the address stay encoded: a run's address is parsed again."""
    for text, key in (("a%20b/%c3%A9.tar", "a b/é.tar"), ("a%3fb%25%23c.tar", "a%3fb%25%23c.tar")):
        address = place(f"https://host/{text}")
        assert isinstance(address, Url) and address.key == key and place(str(address)) == address
    assert str(place("s3://bucket/a%20b.tar")) == "s3://bucket/a%20b.tar"


def test_missing_objects_and_buckets_are_reported(cloud: str, data: str, web: Path) -> None:
    assert f"no data at {data}/none: name a folder" in error_of(f"{data}/none")
    assert "s3://no-such-bucket/x does not exist: check" in error_of("s3://no-such-bucket/x")
    assert f"{data}/train-0003.tar does not exist" in error_of(f"{data}/train-{{0000..0003}}.tar")
    tar(web / "a folder.2" / "train.tar", [("0.jpg", b"")])
    with web_server(web) as address:
        assert len(open_store(place(f"{address}/a%20folder.2/{{train}}.tar"), "train")) == 1
        with pytest.raises(NoSplitError):  # not that access to val.beton is denied
            open_store(place(f"{address}/a folder.2/train.tar"), "val")
        assert "train-{0000..0012}.tar" in error_of(f"{address}/none")
        message = error_of(f"{address}/forbidden.tar")
    assert "forbidden.tar: access denied" in message and "carry no credentials" in message
    with web_server(web, ranges=False) as address:
        assert "does not support range requests" in error_of(f"{address}/photos.tar")


@pytest.mark.parametrize(
    ("what", "message"), [("stalls", "the connection failed"), ("errors", "the server answers 503")]
)
def test_retries_end_after_time_limit(
    what: str,
    message: str,
    cloud: str,
    web: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With a server that always fails. A warning says what a run waits for at startup."""
    limits = {"FASTSIAM_CLOUD_PATIENCE": "0.5", "FASTSIAM_CLOUD_STALL": "0.3"}
    with web_server(web) as address:
        store = open_store(place(f"{address}/photos.tar"), "train")
        with (
            faulty_proxy(address, tmp_path / "log", **{what: 1.0}) as broken,  # type: ignore[arg-type]
            connected(limits),
        ):
            monkeypatch.setattr(storage, "_SECONDS_TO_REPORT", 0.1)
            there = store.files[0]
            url = place(f"{broken}/photos.tar")
            with pytest.raises(DataError, match=r"for 0\.5 s \(\$FASTSIAM_CLOUD") as caught:
                storage.read(url, there.facts, 0, 3000)  # type: ignore[arg-type, union-attr]
            assert not caplog.messages
            with pytest.raises(DataError, match=message):
                storage.heads([url])  # type: ignore[list-item]
            warning = (
                f"no answer yet about {url}; trying for up to 0.5 s ($FASTSIAM_CLOUD_PATIENCE)"
            )
            assert caplog.messages == [warning]
    assert message in str(caught.value)


def test_slow_answers_are_not_cut_off(
    cloud: str, web: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only stalls end a request: without a limit on them, an answer may take longer than all."""
    from obstore import store as stores

    def from_url(url: str, *, client_options: dict[str, Any], **options: Any) -> Any:
        del client_options["read_timeout"]
        return open_stores(url, client_options=client_options, **options)

    open_stores: Any = stores.from_url
    monkeypatch.setattr(stores, "from_url", from_url)
    limits = {"FASTSIAM_CLOUD_PATIENCE": "0.5", "FASTSIAM_CLOUD_STALL": "0.1"}
    with (
        web_server(web) as address,
        faulty_proxy(address, tmp_path / "log", delay=(1, 1)) as slow,
        connected(limits),
    ):
        url = place(f"{slow}/photos.tar")
        (facts,) = storage.heads([url])  # type: ignore[list-item]
        assert facts is not None and len(storage.read(url, facts, 0, 3000)) == 3000  # type: ignore[arg-type]
    assert (tmp_path / "log").read_text().split() == ["whole"] * 2


def test_object_overwritten_during_reading_is_error(cloud: str, web: Path) -> None:
    with web_server(web) as address:
        store = open_store(place(f"{address}/photos.tar"), "train")
        first = bytes(store.read(0))
        members = [(name, first) for name in "abc"]
        tar(web / "photos.tar", members)
        with pytest.raises(FileLostError, match=r"photos\.tar was overwritten while it was read"):
            store.read(1)
        (web / "photos.tar").unlink()
        with pytest.raises(FileLostError, match=r"photos\.tar was deleted while it was read"):
            store.read(2)


def test_formats_read_only_from_local_disks_are_rejected(
    cloud: str, images: Path, tmp_path: Path
) -> None:
    message = "the only remote data that are read in place: copy it to a local disk"
    assert message in error_of(upload(cloud, images, "loose"))
    rows = [(data, name, 0) for name, data in folder_members(images / "train")]
    write_parquet(tmp_path / "table" / "train.parquet", rows, ["a"])
    data = upload(cloud, tmp_path / "table", "table")
    assert f"fastsiam convert parquet --source {data} --out DIR" in error_of(data)


def test_missing_obstore_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "find_spec", lambda name: None)
    with connected({}):
        assert "pip install 'fastsiam[cloud]'" in error_of("s3://bucket/photos")


def test_aws_profiles_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_or_skip("boto3", "cloud")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_REGION", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert storage.aws_profile() == {}
    (tmp_path / "config").write_text("[default]\nregion = r\n[profile other]\nregion = o\n")
    (tmp_path / "credentials").write_text(
        f"[other]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    )
    assert storage.aws_profile() == {"region": "r"}  # obstore finds the machine's keys
    monkeypatch.setenv("AWS_PROFILE", "other")
    options = storage.aws_profile()
    provider = options.pop("credential_provider")
    assert provider.ttl <= timedelta(minutes=15)  # a role's keys expire: obstore asks again
    keys = provider()
    assert (keys["access_key_id"], keys["secret_access_key"]) == (KEY, SECRET)
    assert options == {"region": "o"}
    monkeypatch.setenv("AWS_PROFILE", "none")
    with pytest.raises(DataError, match=r"from profile none: .*none.* could not be found"):
        storage.aws_profile()
