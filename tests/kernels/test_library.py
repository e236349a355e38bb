"""The compiled kernels: which library is loaded, and that all kinds of them make the same views."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fastsiam.config import AugmentConfig
from fastsiam.errors import BackendError
from fastsiam.kernels import build, library
from fastsiam.pipelines.geometric.cpu import Images, make_views
from fastsiam.views.draws import draw_views


@pytest.fixture
def nothing_loaded() -> Iterator[None]:
    """Forget where the libraries are, before and after."""
    for cached in (library._folder, library._load, library.jpeg):
        cached.cache_clear()
    yield
    for cached in (library._folder, library._load, library.jpeg):
        cached.cache_clear()


def views(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return views of sixteen images of odd sizes, with every operation among them."""
    generator = np.random.default_rng(0)
    size = generator.integers(20, 90, (16, 2))
    pixels = [generator.integers(0, 256, (h, w, 3), np.uint8) for h, w in size]
    address = np.array([own.ctypes.data for own in pixels])
    config = AugmentConfig.alike(crop=37, gray_p=0.4, solarise_p=0.3, blur_sigma_max=4.0)
    params = draw_views(config, seed=0, epoch=0, index=np.arange(16), size=size)
    return make_views(Images.of_pixels(address, size), params, config, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", library.kinds())
def test_all_kinds_make_the_same_views(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = views(dtype)
    monkeypatch.setenv(library.CHOICE, kind)
    made = views(dtype)
    assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))
    assert len({float(view.float().mean()) for view in made}) == 2


def test_the_newest_kind_that_can_run_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.CHOICE, raising=False)
    assert library.kind() == library.kinds()[0]
    assert library.kinds() == tuple(k for k in (*build.KINDS, build.OTHER) if k in library.kinds())
    monkeypatch.setenv(library.CHOICE, library.kinds()[-1])
    assert library.kind() == library.kinds()[-1]


def test_a_kind_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.CHOICE, "z80")
    with pytest.raises(BackendError, match=r"FASTSIAM_CPU is z80; this processor can run "):
        library.kernels()


def test_without_a_compiler(
    nothing_loaded: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Libraries of other sources are as good as none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "stamp", lambda: "other sources")
    monkeypatch.setattr(build, "compiler", lambda: None)
    with pytest.raises(BackendError, match=r"no C\+\+ compiler found: install g\+\+, or pip"):
        library.jpeg()


def test_a_compiler_that_fails_is_quoted(
    nothing_loaded: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "sh -c 'echo it is broken >&2; exit 1'")
    assert build.compiler() == shlex.split("sh -c 'echo it is broken >&2; exit 1'")
    with pytest.raises(RuntimeError, match=r"(?s)sh .*failed:\nit is broken"):
        build.build(tmp_path)
    assert not build.is_current(tmp_path)
    assert not list(tmp_path.glob("*.so"))


@pytest.mark.slow
def test_what_was_compiled_is_current_until_the_sources_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "KINDS", {"x86-64-v2": ()})
    made = build.build(tmp_path)
    assert build.library("x86-64-v2") in [path.name for path in made]
    assert build.is_current(tmp_path)
    monkeypatch.setattr(build, "stamp", lambda: "other sources")
    assert not build.is_current(tmp_path)


def test_a_folder_that_cannot_be_written_has_the_cache_in_its_place(
    nothing_loaded: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders: list[Path] = []

    def compiled(folder: Path) -> list[Path]:
        folders.append(folder)
        return []

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "is_current", lambda folder: False)
    monkeypatch.setattr(build, "build", compiled)
    monkeypatch.setattr("os.access", lambda *_: False)
    assert library.jpeg() is None
    assert folders == [build.cache_folder()]
    assert folders[0].is_relative_to(tmp_path)


def test_libraries_that_cannot_be_loaded(
    nothing_loaded: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As those of a wheel for another system; crops are made without the one for JPEGs too."""
    for name in (build.JPEG, *map(build.library, library.kinds())):
        (tmp_path / name).write_bytes(b"no library")
    monkeypatch.setattr(library, "_folder", lambda: tmp_path)
    monkeypatch.setattr(library._folder, "cache_clear", lambda: None, raising=False)
    assert library.jpeg() is None
    assert "python -m fastsiam.kernels.build" in caplog.text
    with pytest.raises(BackendError, match=r"to compile it anew: python -m fastsiam\.kernels"):
        library.kernels()


def test_libraries_of_another_kind_of_processor(
    nothing_loaded: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a folder that two machines share: this one's are compiled too."""
    made: list[Path] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "is_current", lambda folder: True)
    monkeypatch.setattr(build, "library", lambda kind: f"kernels-of-another-than-{kind}.so")
    monkeypatch.setattr(build, "build", made.append)
    assert library._folder() == made[0]


def test_where_nothing_can_be_written(
    nothing_loaded: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(build, "is_current", lambda folder: False)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(BackendError, match="are not compiled"):
        library._folder()


def test_the_libjpeg_at_hand_is_one_that_this_was_compiled_for() -> None:
    jpeg = library.jpeg()
    assert jpeg is None or jpeg.fastsiam_jpeg_fits() == 1
