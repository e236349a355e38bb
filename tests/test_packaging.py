"""What an installation holds: every package, the link that tools expect, the back-ends."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_package_is_listed() -> None:
    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    found = {
        ".".join(["fastsiam", *init.parent.relative_to(base).parts])
        for folder, base in (
            (ROOT / "fastsiam", ROOT / "fastsiam"),
            (ROOT / "pipelines", ROOT),
            (ROOT / "bench", ROOT),
        )
        for init in folder.rglob("__init__.py")
    }
    assert listed == found


@pytest.mark.parametrize("name", ["bench", "pipelines"])
def test_the_link_is_a_link(name: str) -> None:
    assert (ROOT / "fastsiam" / name).is_symlink()
    assert (ROOT / "fastsiam" / name).resolve() == ROOT / name


def test_the_wheel_owns_one_name(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(tmp_path),
        str(ROOT),
    ]
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        command = ["python3", *command[1:]]  # the environment was made without pip
    subprocess.run(command, check=True, capture_output=True)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"fastsiam"}
    for name in (
        "pipelines/order.py",
        "pipelines/convert/writer.py",
        "bench/measure.py",
        "methods/simsiam.py",
        "evaluate/knn.py",
        "py.typed",
        "cli/__init__.py",
        "jobs/train.py",
    ):
        assert f"fastsiam/{name}" in names


@pytest.mark.dali
def test_dali_is_installed_and_imports() -> None:
    """No pipeline uses it yet; the next ones rest on its importing without a GPU."""
    from nvidia import dali

    assert dali.__version__


@pytest.mark.ffcv
def test_ffcv_is_installed_and_imports() -> None:
    from ffcv.loader import Loader

    assert Loader
