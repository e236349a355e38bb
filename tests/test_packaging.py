"""The wheel contains every module, the kernels, templates and licences."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fastsiam.child_process import add_package_to_path
from fastsiam.kernels import build, library
from tests.conftest import ROOT
from tests.modules import MODULES


def test_wheel_contains_modules_kernels_and_licence(tmp_path: Path) -> None:
    """Build a copy of the source: setuptools leaves a build/ folder, and packs it the next time."""
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "kernels-*.so", "*.stamp")
    for folder in ("fastsiam", "pipelines", "bench", "tests", "docs"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignored)
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode:
        pip = ["python3", "-m", "pip"]  # the environment has no pip
    settings = ["--quiet", "--no-deps", "--wheel-dir", str(tmp_path)]
    quickly = ["sh", "-c", 'exec "$@" -O0', "sh", *(build.compiler() or [])]
    environment = {**os.environ, "CXX": shlex.join(quickly)}
    command = [*pip, "wheel", *settings, str(source)]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"fastsiam"}
    files = [
        path for folder in ("fastsiam", "pipelines", "bench") for path in (ROOT / folder).rglob("*")
    ]
    data = [path for path in files if path.suffix in (".toml", ".jinja", ".cpp", ".h")]
    packaged = (path.relative_to(ROOT).as_posix() for path in (*MODULES.values(), *data))
    for name in (
        *(path.removeprefix("fastsiam/") for path in packaged),
        "py.typed",
        f"kernels/{build.STAMP}",
        *(f"kernels/{build.library(kind)}" for kind in library.kinds()),
    ):
        assert f"fastsiam/{name}" in names
    assert "-py3-none-linux_" in wheel.name  # any Python version, this platform
    for name in (name for name in names if name.endswith(".so")):
        content = zipfile.ZipFile(wheel).read(name)
        newest = max(map(int, re.findall(rb"\bGLIBC_2\.(\d+)", content)))
        assert newest <= 24, f"{name} does not load with glibc older than 2.{newest}"
    licence = "LICENSE.libjpeg-turbo"
    inside = library.jpeg() is not None and library.jpeg().fastsiam_jpeg_version() > 0
    (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    assert (f"{info}/licenses/{licence}" in names) == inside
    metadata = zipfile.ZipFile(wheel).read(f"{info}/METADATA").decode()
    assert (f"\nLicense-File: {licence}\n" in metadata) == inside


def test_child_processes_ignore_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have files named like modules, or another copy of the sources."""
    for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
        monkeypatch.setenv(name, "")  # restored afterwards
    (tmp_path / "fastsiam").mkdir()
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong module')")
    command = [sys.executable, "-m", "fastsiam", "--version"]
    add_package_to_path()
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
