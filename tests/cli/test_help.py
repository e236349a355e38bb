"""``--help``: sections, defaults of recipe and method, whole summaries."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from fastsiam import cli
from fastsiam.cli.help import COMMON
from fastsiam.config.flags import to_flags, train_settings
from fastsiam.config.recipes import RECIPES


def help_of(*command: str, option: str = "--help") -> str:
    done = CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, [*command, option])
    assert done.exit_code == 0
    return done.output


def test_the_help_of_train_stands_in_sections() -> None:
    text = help_of("train", option="--help-all")
    assert max(map(len, text.splitlines())) <= 80
    titles = re.findall(r"^(\w+)[: ](?!.*OPTIONS)", text, re.MULTILINE)
    options = [one for one in train_settings().values() if one.option]
    methods = {one.section for one in options if one.section.startswith("Method ")}
    assert titles == [
        *("Options", "Data", "Views", "Model", *["Method"] * len(methods)),
        *("Optimiser", "Numerics", "Step", "Monitoring", "Run"),
    ]
    for flag in options:
        section = text[text.index(f"\n{flag.section}\n") :].split("\n\n")[0]
        assert re.search(rf"^  --{flag.name.replace('_', '-')}\b", section, re.MULTILINE), flag.name


def test_help_is_short() -> None:
    """What people use most; the commands with few settings show them all."""
    shown = set(re.findall(r"^  --([\w-]+)", help_of("train"), re.MULTILINE))
    assert shown == {name.replace("_", "-") for name in COMMON} | {
        "recipe", "config", "set", "help-all", "help",
    }  # fmt: skip
    assert len(COMMON) == 25 and "--help-all" not in help_of("eval", "knn")


def test_every_default_stands_in_the_help() -> None:
    """Those of the views, which may be several, and of what a recipe turns off, too."""
    said = "".join(help_of("train", option="--help-all").split())
    for option, default in (("crop", "224"), ("sync-bn", "sync-bn"), ("knn-every", "10")):
        found = re.search(rf"--{option}.*?\[default:([^\];]+)[\];]", said)
        assert found and found.group(1) == default
    values = to_flags(RECIPES["imagenet"]())
    options = [one.name for one in train_settings().values() if one.option]
    others = [name for name in options if name not in values]  # of other methods
    there = sum(values.get(name, "") != "" for name in options)
    assert said.count("[default:") == 1 + there + len(others)  # 1: --recipe


def test_options_are_of_their_settings_types() -> None:
    for command in (["bench", "sweep"], ["train"], ["eval", "detect"], ["study", "run"]):
        assert "Any" not in help_of(*command)


def test_evaluations_have_sections_too() -> None:
    text = help_of("eval", "linear")
    titles = "Images and network", "Training with labels", "Classifier"
    first, second, third = (text.index(f"\n{title}: ") for title in titles)
    assert first < text.index("--data") < second < text.index("--percent") < third
    assert third < text.index("--lrs")


@pytest.mark.parametrize("group", [(), ("convert",), ("eval",), ("bench",)])
def test_no_summary_of_a_command_is_cut(group: tuple[str, ...]) -> None:
    _, _, commands = help_of(*group).partition("Commands:\n")
    assert commands and "..." not in commands
    assert max(map(len, commands.splitlines())) <= 80


def test_help_shows_the_recipes_defaults() -> None:
    for options, defaults in (
        ([], {"epochs": "100", "backbone": "resnet50"}),
        (["--recipe", "cifar10"], {"epochs": "800", "backbone": "resnet18"}),
    ):
        text = " ".join(help_of("train", *options).split())
        for option, default in defaults.items():
            found = re.search(rf"--{option} .*?\[default: ([^\];]+)[\];]", text)
            assert found and found.group(1) == default
