"""Caches of compiled code are rejected if other users can write to them."""

from __future__ import annotations

import getpass
import os
import pwd
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from fastsiam import files
from fastsiam.config import TrainConfig
from fastsiam.errors import BackendError
from fastsiam.files import check_private_folder, others_can_write
from fastsiam.kernels import build, library
from fastsiam.pipelines.remote.cache import Cache
from fastsiam.train import compile
from fastsiam.train.compile import compile_settings

OTHER = 12345
"""A user ID and group ID that are not in use."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change file owners")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "parent" / "cache"
    folder.mkdir(parents=True, mode=0o755)
    return folder


def test_world_writable_cache_is_rejected(cache: Path, tmp_path: Path) -> None:
    """The user's own folder is accepted, even inside a sticky folder like /tmp."""
    link = tmp_path / "link"
    link.symlink_to(cache)
    for mode in (0o700, 0o755, 0o750):
        cache.chmod(mode)
        assert not others_can_write(cache) and not others_can_write(link)
    assert not others_can_write(cache / "not" / "there" / "yet")
    assert not others_can_write(Path("~/.cache"))
    for folder in (cache.parent, cache):
        folder.chmod(0o777)
        assert others_can_write(cache) == f"everybody can write to {folder} (`chmod o-w {folder}`)"
        folder.chmod(0o1777)
        # In a sticky cache, files of other users would be executed.
        assert bool(others_can_write(cache)) == (folder == cache)
    assert others_can_write(link)
    with pytest.raises(BackendError) as caught:
        check_private_folder(cache, what="compiled code", instead="name another by VARIABLE")
    assert re.fullmatch(
        r"compiled code in \S+ would be executed, but everybody can write to \S+ "
        r"\(`chmod o-w \S+`\); change its owner or permissions, or name another by VARIABLE",
        str(caught.value),
    )


@needs_root
def test_cache_writable_by_other_user_or_group_is_rejected(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not files._is_hidden(OTHER) and not files._is_hidden(0)
    os.chown(cache.parent, OTHER, -1)
    assert others_can_write(cache) == f"{cache.parent} belongs to user {OTHER}"
    with monkeypatch.context() as patch:  # a container may map the machine's root to nobody
        patch.setattr(files, "_is_hidden", lambda user: user == OTHER)
        assert not others_can_write(cache)
        os.chown(cache, OTHER, -1)
        assert others_can_write(cache) == f"{cache} belongs to user {OTHER}"
        os.chown(cache, 0, -1)
    os.chown(cache.parent, 0, OTHER)
    assert not others_can_write(cache)
    cache.parent.chmod(0o775)
    message = f"the group {OTHER} can write to {cache.parent} (`chmod g-w {cache.parent}`)"
    assert others_can_write(cache) == message
    os.chown(cache.parent, 0, 0)
    assert not others_can_write(cache)


def test_caches_are_created_for_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a umask that lets other users write would make the next start refuse them."""
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path / "kernels" / "stamp")
    monkeypatch.setattr(build, "build", lambda folder: None)
    monkeypatch.setattr(library, "_compiled", lambda: None)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(compile, "_CACHE", tmp_path / "cache" / "torchinductor")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    old = os.umask(0)
    try:
        library._folder.__wrapped__()
        compile._choose_cache()
        width = torch.backends.cpu.get_cpu_capability().lower()
        assert compile.cache_folder() == str(tmp_path / "cache" / "torchinductor" / width)
        for _ in range(2):
            Cache(tmp_path / "images" / "remote", 1.0)
    finally:
        os.umask(old)
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(folders) >= 6 and not any(map(others_can_write, folders))


def test_cpus_of_different_vector_width_share_no_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code for AVX-512 gives NaN or crashes if it is compiled again for AVX2."""
    monkeypatch.setattr(compile, "_CACHE", tmp_path)
    folders = []
    for capability in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        compile._choose_cache()
        folders.append(compile.cache_folder())
    assert folders == [str(tmp_path / "avx2"), str(tmp_path / "avx512")]


def test_compiling_without_user_name_uses_uid(
    cache: Path, small: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container. torch 2.11 looks up the user name to choose its cache folder."""
    for name in ("USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError("no such user")))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    with compile_settings(small):
        assert getpass.getuser() == f"uid_{os.getuid()}"


def test_world_writable_inductor_cache_is_rejected(
    cache: Path, small: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    with compile_settings(small):
        pass
    cache.chmod(0o777)
    with pytest.raises(BackendError, match="TORCHINDUCTOR_CACHE_DIR"), compile_settings(small):
        pytest.fail("the block was entered")


@pytest.mark.parametrize("is_there", [True, False])
def test_world_writable_kernel_cache_is_rejected(
    is_there: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check precedes both loading a library from the cache and building one there."""
    monkeypatch.setattr(build, "cache_folder", lambda: cache)
    monkeypatch.setattr(library, "_compiled", lambda: cache if is_there else None)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(build, "build", lambda folder: pytest.fail("the kernels were compiled"))
    cache.chmod(0o777)
    message = r"fastsiam's kernels in .* would be executed.*XDG_CACHE_HOME"
    with pytest.raises(BackendError, match=message):
        library._folder.__wrapped__()


def test_build_lock_rejects_symlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user could create such a link in /tmp, to a file of this user."""
    mine = tmp_path / "mine"
    mine.write_text("precious")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / f"fastsiam-build-{os.getuid()}").symlink_to(mine)
    with pytest.raises(OSError), library._build_lock():
        pytest.fail("the lock was acquired")
    assert mine.read_text() == "precious"
    (tmp_path / f"fastsiam-build-{os.getuid()}").unlink()
    with library._build_lock():
        pass
