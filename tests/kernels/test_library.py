"""The compiled kernels: which library is loaded; all kinds give the same views."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from fastsiam.config import AugmentConfig
from fastsiam.errors import BackendError
from fastsiam.kernels import build, library
from fastsiam.kernels.jpeg import decoder
from fastsiam.pipelines.cuts import cut_views
from fastsiam.pipelines.job import Images, Job, run_in_threads, stages_of
from fastsiam.views.draws import draw_views
from fastsiam.views.photometric.operations import split_by_view


@pytest.fixture
def empty_library_cache() -> Iterator[None]:
    """Clear the cached library paths and handles before and after a test."""
    for cached in (library._folder, library._load, library.jpeg):
        cached.cache_clear()
    yield
    for cached in (library._folder, library._load, library.jpeg):
        cached.cache_clear()


def views(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return views of sixteen images of odd sizes that use every operation."""
    generator = np.random.default_rng(0)
    size = generator.integers(20, 90, (16, 2))
    pixels = [generator.integers(0, 256, (h, w, 3), np.uint8) for h, w in size]
    config = AugmentConfig.alike(crop=37, gray_p=0.4, solarise_p=0.3, blur_sigma_max=4.0)
    params = draw_views(config, seed=0, epoch=0, index=np.arange(16), size=size)
    stages = stages_of(params, config, dtype)
    run_in_threads(Job(Images.of_arrays(pixels), cut_views(params, config), None, stages))
    return split_by_view([stage.views() for stage in stages], config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_all_kinds_produce_equal_views(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = views(dtype)
    assert len({float(view.float().mean()) for view in expected}) == 2
    for kind in library.kinds():
        monkeypatch.setenv(library.CHOICE, kind)
        assert all(map(torch.equal, views(dtype), expected))


def test_newest_kind_is_default_and_environment_overrides_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(library.CHOICE, raising=False)
    assert library.kind() == library.kinds()[0]
    assert library.kinds() == tuple(k for k in (*build.KINDS, build.OTHER) if k in library.kinds())
    monkeypatch.setenv(library.CHOICE, library.kinds()[-1])
    assert library.kind() == library.kinds()[-1]
    monkeypatch.setenv(library.CHOICE, "z80")
    with pytest.raises(BackendError, match=r"FASTSIAM_CPU=z80 is not supported by this processor"):
        library.kernels()


def test_library_file_names_differ_by_architecture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = set[str]()
    for machine in ("x86_64", "aarch64", "riscv64"):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        built = runpy.run_path(build.__file__)
        names |= {built["JPEG"], built["STAMP"], built["library"](built["OTHER"])}
    assert len(names) == 9


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (None, r"no C\+\+ compiler found: install g\+\+ 11 or newer, or pip"),
        ("sh -c 'echo it is broken >&2; exit 1'", r"(?s)sh .*failed:\nit is broken"),
    ],
)
def test_missing_or_failing_compiler_raises(
    command: str | None,
    message: str,
    empty_library_cache: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Libraries built from other sources are not used."""
    monkeypatch.setenv(build.FOLDER, str(tmp_path))
    (tmp_path / build.STAMP).write_text("other sources")
    if command:
        monkeypatch.setenv("CXX", command)
        assert build.compiler() == shlex.split(command)
    else:
        monkeypatch.setattr(build, "compiler", lambda: None)
    with pytest.raises(BackendError, match=message):
        library.jpeg()
    assert not build.is_current(tmp_path)
    assert not list(tmp_path.glob("*.so"))


def test_compiler_with_unbalanced_quote_raises(
    empty_library_cache: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(build.FOLDER, str(tmp_path))
    monkeypatch.setenv("CXX", "'g++")
    with pytest.raises(BackendError, match=r"CXX='g\+\+ is not a command: No closing quotation"):
        library.jpeg()


FAKE_COMPILER = """
import os, sys
log, *options = sys.argv[1:]
with open(log, "a") as lines:
    print(os.environ["ZIG_GLOBAL_CACHE_DIR"], *options, file=lines)
open(options[options.index("-o") + 1], "w").close()
"""


def test_zig_build_sets_mcpu_and_removes_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without -mcpu, zig would compile for this machine, and wheels would fail on others."""
    (tmp_path / "pretends.py").write_text(FAKE_COMPILER)
    command = [sys.executable, str(tmp_path / "pretends.py"), str(tmp_path / "log"), "ziglang"]
    monkeypatch.setenv("CXX", shlex.join(command))
    libraries = build.build(tmp_path / "made")
    lines = (tmp_path / "log").read_text().splitlines()
    processors = [line.split(" -mcpu=")[1].split()[0] for line in lines]
    expected = [build.OTHER, build.JPEG]
    if build.OTHER not in library.kinds():
        expected = ["x86_64_v4+avx512vbmi+avx512vnni", "x86_64_v3", "x86_64_v2", build.JPEG]
        assert processors[:3] == expected[:3]
    assert processors[len(expected) - 1 :] == ["baseline"] * 2  # libjpeg check, decoder
    assert len(libraries) == len(expected)
    assert not any(Path(line.split()[0]).exists() for line in lines)


def test_old_library_exists_until_new_one_replaces_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another machine may load it from a shared folder meanwhile."""

    def compile(command: list[str], target: Path) -> Path:
        assert target.name != build.JPEG or target.read_text() == "old"
        return target

    (tmp_path / build.JPEG).write_text("old")
    monkeypatch.setattr(build, "_compile", compile)
    monkeypatch.setattr(build, "_can_link", lambda command, options: options == build._DYNAMIC)
    assert tmp_path / build.JPEG in build.build(tmp_path)
    monkeypatch.setattr(build, "_can_link", lambda command, options: False)
    build.build(tmp_path)
    assert not (tmp_path / build.JPEG).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs ldd of Linux")
@pytest.mark.skipif(build.FOLDER in os.environ, reason="sanitized libraries have more dependencies")
def test_libraries_are_self_contained_and_hide_symbols() -> None:
    """They run with any libstdc++, and hide their libjpeg from Pillow's and torchvision's."""

    def output_of(*command: str | Path) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    folder = library._folder()
    for kind in library.kinds():
        needs = output_of("ldd", folder / build.library(kind))
        assert "libc." in needs and "libstdc++" not in needs and "libgcc" not in needs
    if list(Path("/usr/lib").glob("*/libjpeg.a")):
        assert "libjpeg" not in output_of("ldd", folder / build.JPEG)
        symbols = output_of("nm", "--dynamic", "--defined-only", folder / build.JPEG).splitlines()
        names = [line.split()[-1] for line in symbols]
        assert names and all(name.startswith("fastsiam_") for name in names)
        assert re.match(r"built-in libjpeg-turbo [23]\.\d+\.\d+, ", library.decoder_name())


def test_unloadable_kernels_raise_and_decoder_falls_back(
    empty_library_cache: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """For the kernels it is an error. Without the JPEG decoder, Pillow decodes."""
    monkeypatch.setattr(library, "_folder", lambda: tmp_path)
    assert decoder() == 0
    (tmp_path / build.library(library.kind())).write_text("no library")
    (tmp_path / build.JPEG).touch()
    old, too_short = Mock(fastsiam_jpeg_fits=lambda: 0), OSError("file too short")
    for loaded in (old, too_short):
        library.jpeg.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr("ctypes.CDLL", Mock(side_effect=[loaded]))
            assert decoder() == 0
    problems = "compiled without libjpeg-turbo's header", "libjpeg-turbo is older", "file too short"
    for problem, message in zip(problems, caplog.messages, strict=True):
        assert problem in message and ": Pillow decodes JPEGs, which is slower; inst" in message
    assert library.decoder_name().startswith("Pillow")
    with pytest.raises(BackendError, match=rf"cannot load .* `rm {tmp_path}/{build.STAMP}"):
        library.kernels()


def test_read_only_folder_falls_back_to_cache(
    empty_library_cache: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled = Mock(return_value=[])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "is_current", lambda folder: False)
    monkeypatch.setattr(build, "build", compiled)
    monkeypatch.setattr("os.access", lambda *_: False)
    assert library.jpeg() is None
    compiled.assert_called_once_with(build.cache_folder())
    assert build.cache_folder().is_relative_to(tmp_path)


def test_kernels_without_home_directory(
    empty_library_cache: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are compiled into a folder that is writable; otherwise the error gives advice."""
    compiled = Mock(return_value=[])
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("No home directory.")))
    monkeypatch.setattr(build, "is_current", lambda folder: False)
    monkeypatch.setattr(build, "build", compiled)
    monkeypatch.setenv(build.FOLDER, str(tmp_path))
    assert library.jpeg() is None
    compiled.assert_called_once_with(tmp_path)
    library._folder.cache_clear()
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(BackendError, match=r"No home directory\. Set XDG_CACHE_HOME"):
        library._folder()
