"""Settings files: reading, merging, writing, and errors that name the setting."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fastsiam.cli.options import merge_sources
from fastsiam.config import TrainConfig
from fastsiam.config.recipes import RECIPES
from fastsiam.config.settings_files import merge, read_settings, run_folder, to_toml
from fastsiam.config.train import train_settings
from fastsiam.errors import FastSiamError
from fastsiam.run import checkpoint as checkpoints
from fastsiam.train.image_list import ImageList
from tests.configs import with_settings
from tests.conversions import stub_raising
from tests.sources import put


def test_toml_contains_every_setting_with_help() -> None:
    config = RECIPES["cifar10"]()
    lines = to_toml(config, recipe="cifar10").splitlines()
    assert max(map(len, lines)) <= 100
    text = " ".join(line.removeprefix("# ") for line in lines)
    for name in config.to_flags():
        one = train_settings()[name]
        assert f" {name} = " in text and " ".join(one.help.split()) in text, name
        assert one.section in text


TOML = """
recipe = "cifar10"
weight-decay = 1e-4
[optim]
lr = 1
[augment]
crop = [24, 32]
mean = [0, 0.5, 1]
[step]
compile = "off"
"""
YAML = """
recipe: cifar10
weight_decay: 1e-4
optim: {lr: 1}
augment:
  crop: 24,32
  mean: [0, 0.5, 1]
step:
  compile: off
"""


@pytest.mark.parametrize(("name", "text"), [("a.toml", TOML), ("a.yaml", YAML)])
def test_toml_and_yaml_files_are_equivalent(name: str, text: str, tmp_path: Path) -> None:
    settings = merge(read_settings(put(tmp_path / name, f"\ufeff{text}")))  # Windows adds a BOM
    expected = with_settings(
        RECIPES["cifar10"](),
        lr=1.0,
        weight_decay=1e-4,
        crop="24,32",
        mean=(0.0, 0.5, 1.0),
        compile="off",
    )
    assert (settings.recipe, TrainConfig.from_flags(settings.flags)) == ("cifar10", expected)
    empty = merge(read_settings(put(tmp_path / name)))
    assert TrainConfig.from_flags(empty.flags) == RECIPES["imagenet"]()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "[optim]\nlrr = 1", r"unknown setting 'lrr'; did you mean lr\?"),
        ("a.toml", "[model]\nmethod = 'none'", r"unknown method 'none'; choose one of .*simsiam"),
        ("a.toml", "lr = = 1", "line 1"),
        ("a.yaml", "a: [1", "line 1"),
        ("a.yaml", "- 1", "it must be a table of settings"),
        ("a.json", '{"config": 3}', "settings must be a table of settings, not 3"),
        ("a.json", '{"config": {"optim": {"lr": "fast"}}}', r"optim\.lr must be a number"),
        (
            "a.txt",
            "",
            r"must be in a file ending in \.toml, \.yaml, \.yml, \.json, or in a run's folder",
        ),
        ("a.toml", "lr = 1\n[optim]\nlr = 2", "lr occurs twice"),
        ("a.yaml", "optim: {lr: 1}\noptim: {batch: 64}", "optim occurs twice"),
        ("a.yaml", "optim:\n  lr: 1\n  lr: 1", "lr occurs twice"),
        ("a.yaml", "? [lr]\n: 1", "line 1"),
        ("a.json", '{"recipe": "demo", "recipe": "byol"}', "recipe occurs twice"),
        ("a.json", '{"optim":' * 100_000, "nested too deeply"),
        ("a.toml", "recipe = 'resnet50'", "unknown recipe 'resnet50'; choose one of imagenet, "),
        ("a.yaml", "optim:\n  lr: ~", "lr has no value: leave it out"),
        ("a.json", '{"out": null}', "out has no value: leave it out"),
        ("a.toml", "[optim]\nrestarts = '2@6'", r"restarts was removed in version 0\.3"),
        ("a.toml", "lr = 1".encode("utf-16"), "not UTF-8; save it as UTF-8"),
    ],
)
def test_invalid_settings_file_is_one_line_error(
    name: str, text: str | bytes, message: str, tmp_path: Path
) -> None:
    path = put(tmp_path / name, text)
    with pytest.raises(ValueError, match=message) as caught:
        read_settings(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_removed_settings_of_0_2_are_ignored(tmp_path: Path) -> None:
    text = "[optim]\nlr = 0.1\nrestarts = ''\n[step]\nbatch_views = true\nbucket-mb = 25\n"
    assert read_settings(put(tmp_path / "a.toml", text)).flags == {"lr": 0.1}


def test_missing_settings_file_is_named_in_error(tmp_path: Path) -> None:
    for path in (tmp_path / "a.toml", tmp_path / "run", tmp_path):
        with pytest.raises(
            FastSiamError, match=r"cannot read .*(a\.toml|/run|config\.json): No such"
        ):
            read_settings(path)


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/last.pt"])
def test_run_folder_is_found_from_symlinked_checkpoint(name: str, tmp_path: Path) -> None:
    run, link, target = tmp_path / "run", tmp_path / "run" / name, tmp_path / "disk" / name
    link.parent.mkdir(parents=True)
    put(checkpoints.last(tmp_path / "disk"))
    link.symlink_to(target)
    assert run_folder(checkpoints.last(run)) == run
    (tmp_path / "disk" / "config.json").touch()  # the run is on that disk; the link is an alias
    assert run_folder(checkpoints.last(run)) == tmp_path / "disk"


@pytest.mark.parametrize(
    ("method", "read"),
    [
        ("is_file", read_settings),
        ("is_dir", run_folder),
        ("is_file", checkpoints.exists),
        ("is_file", ImageList.load),
        ("is_file", lambda run: merge_sources({"resume": run / "checkpoints" / "last.pt"})),
    ],
)
def test_unreadable_folder_is_reported(
    method: str, read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes Python 3.14 and newer, where ``Path`` methods hide the error."""
    if method == "is_file":
        for name in ("is_dir", "is_file"):
            monkeypatch.setattr(Path, name, lambda _: False)
        monkeypatch.setattr(os, "stat", stub_raising(errno.EACCES))
    else:
        monkeypatch.setattr(Path, method, stub_raising(errno.EACCES))
    with pytest.raises(FastSiamError, match=r"^cannot read \S+: Permission denied; check the perm"):
        read(tmp_path)
