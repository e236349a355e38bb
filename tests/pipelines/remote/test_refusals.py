"""What cannot be read is one line that says what to do, and holds no secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastsiam.config import DataConfig
from fastsiam.config.urls import place
from fastsiam.errors import DataError, FastSiamError, FileLostError
from fastsiam.pipelines import open_store
from fastsiam.pipelines.remote import path, storage
from tests.clouds import (
    KEY,
    SECRET,
    broken_proxy,
    read_all,
    reconnect,
    upload,
    web_server,
)
from tests.sources import folder_members, parquet, tar


def refusal(address: str, kind: type[FastSiamError] = DataError, split: str = "train") -> str:
    """Return the one line that says why data cannot be opened and read."""
    with pytest.raises(kind) as caught:
        store = open_store(place(address), "train")
        read_all(store)
    assert "\n" not in str(caught.value) and SECRET not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def web(cloud: str, images: Path, tmp_path: Path) -> Path:
    """A web server's folder with a tar of images."""
    return tar(tmp_path / "web" / "photos.tar", folder_members(images / "train")).parent


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://user:PASSWORD@bucket/photos", "s3://bucket/... holds a password, a signature"),
        ("https://u:PASSWORD@host/a.tar", "https://host/... holds a password, a signature"),
        ("https://host/a.tar?X-Amz-Signature=PASSWORD", "https://host/... holds a password"),
        ("https://host?sig=PASSWORD", "https://host/... holds a password"),
        ("ftp://host/a.tar", "data at ftp:// cannot be read: only at s3://, gs://, az://"),
        ("s3:///a", "s3:// names no bucket"),
    ],
)
def test_addresses_that_are_refused(address: str, said: str) -> None:
    with pytest.raises(DataError) as caught:
        DataConfig(data=address)
    assert said in str(caught.value) and "PASSWORD" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a-{08..11}.tar", ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]),
        ("{x,yz}-{0..1}", ["x-0", "x-1", "yz-0", "yz-1"]),
        ("plain.tar", ["plain.tar"]),
    ],
)
def test_braces(text: str, names: list[str]) -> None:
    assert path.expanded(text) == names


def test_what_is_not_there(cloud: str, data: str, web: Path) -> None:
    assert f"no data at {data}/none: name a folder" in refusal(f"{data}/none")
    assert "s3://no-such-bucket/x does not exist: check" in refusal("s3://no-such-bucket/x")
    assert f"{data}/train-0003.tar does not exist" in refusal(f"{data}/train-{{0000..0003}}.tar")
    with web_server(web) as address:
        assert "train-{0000..0012}.tar" in refusal(f"{address}/none")


def test_a_server_that_refuses(cloud: str, web: Path) -> None:
    with web_server(web) as address:
        said = refusal(f"{address}/forbidden.tar")
    assert "forbidden.tar: access denied" in said and "carry no credentials" in said


def test_a_server_without_ranges(cloud: str, web: Path) -> None:
    with web_server(web, ranges=False) as address:
        assert "does not support range requests" in refusal(f"{address}/photos.tar")


@pytest.mark.parametrize(
    ("what", "said"), [("stalls", "the connection failed"), ("errors", "the server answers 503")]
)
def test_patience_ends(
    what: str, said: str, cloud: str, web: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a server that fails always."""
    monkeypatch.setenv("FASTSIAM_CLOUD_PATIENCE", "0.5")
    monkeypatch.setenv("FASTSIAM_CLOUD_STALL", "0.3")
    with web_server(web) as address:
        store = open_store(place(f"{address}/photos.tar"), "train")
        shares = {"errors": 0.0, "cuts": 0.0, "stalls": 0.0} | {what: 1.0}
        with broken_proxy(address, tmp_path / "log", **shares) as broken:  # type: ignore[arg-type]
            reconnect()
            there = store.files[0]
            url = place(f"{broken}/photos.tar")
            with pytest.raises(DataError, match=r"for 0\.5 s \(\$FASTSIAM_CLOUD") as caught:
                storage.fetch(url, there.facts, [(0, 3000)])  # type: ignore[arg-type, union-attr]
    assert said in str(caught.value)


def test_an_object_that_changes_while_it_is_read(cloud: str, web: Path) -> None:
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


def test_what_is_read_from_disks_alone(cloud: str, images: Path, tmp_path: Path) -> None:
    said = "alone are read in place on another machine: copy it to a disk"
    pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'fastsiam[convert]'")
    assert said in refusal(upload(cloud, images, "loose"))
    rows = [(data, name, 0) for name, data in folder_members(images / "train")]
    parquet(tmp_path / "table" / "train.parquet", rows, ["a"])
    data = upload(cloud, tmp_path / "table", "table")
    assert f"fastsiam convert parquet --source {data} --out DIR" in refusal(data)


def test_without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    reconnect()
    monkeypatch.setattr(storage, "find_spec", lambda name: None)
    assert "pip install 'fastsiam[cloud]'" in refusal("s3://bucket/photos")


def test_profiles_of_aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3", reason="needs boto3: pip install 'fastsiam[cloud]'")
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
    assert storage.aws_profile() == {"region": "r"}  # obstore looks for the machine's keys
    monkeypatch.setenv("AWS_PROFILE", "other")
    found = storage.aws_profile()
    keys = found.pop("credential_provider")()
    assert (keys["access_key_id"], keys["secret_access_key"]) == (KEY, SECRET)
    assert found == {"region": "o"}
    monkeypatch.setenv("AWS_PROFILE", "none")
    with pytest.raises(DataError, match=r"from profile none: .*none.* could not be found"):
        storage.aws_profile()
