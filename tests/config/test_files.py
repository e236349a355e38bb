"""Settings files: read, refused by name, and added up; written, and read back to the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastsiam.config import TrainConfig
from fastsiam.config.files import Settings, merge, read_settings, to_toml
from fastsiam.config.flags import from_flags, to_flags, train_settings
from fastsiam.config.recipes import RECIPES
from fastsiam.errors import FastSiamError
from tests.configs import with_settings
from tests.conftest import ROOT
from tests.methods import everything


def write(tmp_path: Path, text: str, name: str = "my.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_every_setting_is_written_with_a_comment() -> None:
    config = RECIPES["cifar10"]()
    lines = to_toml(config, recipe="cifar10").splitlines()
    assert max(map(len, lines)) <= 100
    text = " ".join(line.removeprefix("# ") for line in lines)
    for name in to_flags(config):
        one = train_settings()[name]
        assert f" {name} = " in text and " ".join(one.help.split()) in text, name
        assert one.section in text


TOML = """
recipe = "cifar10"
[optim]
lr = 1
weight-decay = 1e-4
[augment]
crop = [24, 32]
mean = [0, 0.5, 1]
[step]
compile = "off"
"""
YAML = """
recipe: cifar10
optim: {lr: 1, weight_decay: 1e-4}
augment:
  crop: 24,32
  mean: [0, 0.5, 1]
step:
  compile: off
"""
JSON = """{"recipe": "cifar10", "optim": {"lr": 1, "weight_decay": 1e-4}, "step":
{"compile": "off"}, "augment": {"crop": "24,32", "mean": [0, 0.5, 1]}}"""


@pytest.mark.parametrize(
    ("name", "text"), [("a.toml", TOML), ("a.yaml", YAML), ("a.yml", YAML), ("a.json", JSON)]
)
def test_the_same_settings_in_every_format(name: str, text: str, tmp_path: Path) -> None:
    settings = merge(files=[read_settings(write(tmp_path, text, name))])
    expected = with_settings(
        RECIPES["cifar10"](),
        lr=1.0,
        weight_decay=1e-4,
        crop="24,32",
        mean=(0.0, 0.5, 1.0),
        compile="off",
    )
    assert (settings.recipe, from_flags(settings.flags)) == ("cifar10", expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optim]\nlrr = 1", "unknown setting optim.lrr; did you mean optim.lr?"),
        ("[data]\nlr = 1", "unknown setting data.lr; did you mean optim.lr?"),
        ("lr = 1", "unknown setting lr; did you mean optim.lr?"),
        ("[optimm]\nlr = 1", "unknown section 'optimm'; there are data, augment, model, "),
        ("recipe = 'imagnet'", "unknown recipe 'imagnet'; there are imagenet, "),
        ("[model]\nmethod = 'none'", "unknown method 'none'; there are simsiam"),
        ("[optim]\nlr = 'fast'", "optim.lr must be a number, not 'fast'"),
        ("[optim]\nepochs = 2.5", "optim.epochs must be a whole number, not 2.5"),
        ("[optim]\nepochs = true", "optim.epochs must be a whole number, not True"),
        ("[numerics]\ntf32 = 1", "numerics.tf32 must be true or false, not 1"),
        ("[data]\ndata = 3", "data.data must be text, not 3"),
        ("[optim]\noptimizer = 'adam'", "optim.optimizer must be sgd or lars, not 'adam'"),
        ("[augment]\nmean = [1, 2]", "augment.mean must be 3 numbers, not [1, 2]"),
        ("[augment]\ncrop = 1.5", "augment.crop must be a whole number, not 1.5"),
        ("[optim]\nweight-decay = 1\nweight_decay = 2", "optim.weight_decay is there twice"),
        ("optim = 3", "optim must be a table of settings, not 3"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as caught:
        read_settings(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: {message}") and "\n" not in said


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "lr = = 1", r"a\.toml cannot be read as TOML: .*line 1"),
        ("a.yaml", "a: [1", r"a\.yaml cannot be read as YAML: .*line 1"),
        ("a.json", "{", r"a\.json cannot be read as JSON: .*line 1"),
        ("a.yaml", "- 1", "settings must be a table of sections"),
        ("a.yaml", "7:\n  lr: 1", r"a\.yaml: unknown section '7'; there are data, "),
        ("a.yaml", '"o\\np": {}', r"a\.yaml: unknown section 'o\\np'; there are data, "),
        ("a.json", '{"optim": {"l\\nr": 1}}', r"a\.json: unknown setting optim\.'l\\nr'"),
        ("a.json", '{"config": 3}', r"a\.json: config must be a table of sections, not 3"),
        ("a.txt", "", r"a\.txt: settings are in files \.toml, \.yaml, \.yml, \.json"),
    ],
)
def test_what_holds_no_settings_is_one_line(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_settings(write(tmp_path, text, name))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "a.toml", tmp_path):
        with pytest.raises(FastSiamError, match=r"cannot read .*(a\.toml|config\.json): No such"):
            read_settings(path)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    for name in ("a.toml", "a.yaml"):
        read = merge(files=[read_settings(write(tmp_path, "", name))])
        assert from_flags(read.flags) == RECIPES["imagenet"]()


def test_a_run_of_0_1_is_read_but_for_where_it_is() -> None:
    old = ROOT / "tests" / "data" / "run-0.1"
    settings = read_settings(old)
    assert settings.recipe == "imagenet" and settings.flags["predictor_dim"] == 4
    record: dict[str, Any] = json.loads((old / "config.json").read_text())["config"]
    config = TrainConfig.from_dict(record)
    expected = {name: x for name, x in to_flags(config).items() if name in settings.flags}
    assert settings.flags == expected and not {"out", "resume"} & settings.flags.keys()
    assert from_flags(merge(files=[settings]).flags) == with_settings(config, out="", resume="auto")


def test_a_run_with_a_wrong_value_is_one_line(tmp_path: Path) -> None:
    record = {"recipe": "demo", "config": TrainConfig().to_dict()}
    record["config"]["optim"]["lr"] = "fast"  # type: ignore[index]
    with pytest.raises(ValueError, match=r"config\.json: optim\.lr must be a number, not 'fast'"):
        read_settings(write(tmp_path, json.dumps(record), "config.json"))


def test_files_add_up_and_a_chosen_method_drops_the_others_settings() -> None:
    weak = Settings(recipe="cifar10", flags={"lr": 1.0, "batch": 64, "predictor_dim": 7})
    strong = Settings(flags={"lr": 2.0})
    both = merge(files=[weak, strong])
    assert (both.recipe, both.flags["lr"], both.flags["batch"]) == ("cifar10", 2.0, 64)
    assert merge(recipe="demo", files=[weak]).recipe == "demo"
    with everything.registered():
        other = merge(method="everything", files=[weak, Settings(flags={"queue": 5})]).flags
        assert "predictor_dim" not in other and other["queue"] == 5 and other["lr"] == 1.0
        from_flags({**other, "views": 3})
        with pytest.raises(ValueError, match="queue is no setting of simsiam"):
            from_flags(merge(files=[Settings(flags={"queue": 5})]).flags)


def test_a_name_that_methods_share_takes_the_values_of_each(tmp_path: Path) -> None:
    """SimSiam's predictor may be fixed; SwAV, which has one by the same name, refuses that."""
    text = '[model]\nmethod = "simsiam"\npredictor = "fixed"\n'
    flags = merge(files=[read_settings(write(tmp_path, text))]).flags
    assert from_flags(flags).model.method.described()["predictor"].endswith("not trained")
    swav = merge(files=[read_settings(write(tmp_path, text.replace("simsiam", "swav")))]).flags
    with pytest.raises(ValueError, match="predictor must be trained or none, not 'fixed'"):
        from_flags(swav)
