"""Options: made of the settings alone; what beats what; files, runs that continue."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from PIL import Image
from typer.testing import CliRunner

from fastsiam import cli
from fastsiam.cli.options import with_options
from fastsiam.config import BYOLConfig, SimSiamConfig, TrainConfig
from fastsiam.config.recipes import RECIPES
from fastsiam.run import checkpoint as checkpoints
from fastsiam.train.command import train_here
from tests.config.strategies import configs
from tests.configs import flags, with_settings
from tests.conftest import ROOT
from tests.methods import everything
from tests.processes import fastsiam
from tests.ranks import fastsiam_on_ranks
from tests.train.runs import history


def invoke(*arguments: str, code: int = 0) -> tuple[list[tuple[str, TrainConfig]], str]:
    """Give arguments to a command of settings; return what it got, and what was said."""
    got: list[tuple[str, TrainConfig]] = []
    app = typer.Typer(rich_markup_mode=None)
    app.command()(with_options(lambda recipe, config: got.append((recipe, config))))
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return got, " ".join(result.output.split())


def parse(*arguments: str) -> tuple[str, TrainConfig]:
    return invoke(*arguments)[0][0]


def refused(*arguments: str) -> str:
    return invoke(*arguments, code=2)[1]


@settings(max_examples=30, deadline=None)
@given(configs())
def test_settings_survive_the_command_line(config: TrainConfig) -> None:
    assert parse(*flags(config)) == ("imagenet", config)


def test_flag_beats_recipe_beats_default_in_any_order() -> None:
    assert parse() == ("imagenet", RECIPES["imagenet"]())
    cifar10 = RECIPES["cifar10"]()
    expected = replace(cifar10, optim=replace(cifar10.optim, lr=0.5))
    for arguments in (
        ["--recipe", "cifar10", "--lr", "0.5"],
        ["--lr", "0.5", "--recipe", "cifar10"],
    ):
        assert parse(*arguments) == ("cifar10", expected)
    assert parse("--recipe", "cifar10")[1] == cifar10  # nothing leaked from the call before


def test_a_method_brings_its_own_options_and_defaults() -> None:
    """In whatever order; ``dim`` is a setting of both methods, with a default in each."""
    with everything.registered():
        chosen = ["--method", "everything", "--views", "3"]
        for arguments in ([*chosen, "--recipe", "cifar10"], ["--recipe", "cifar10", *chosen]):
            recipe, config = parse(*arguments, "--queue", "30")
            assert recipe == "cifar10" and config.model.backbone == "resnet18"
            assert config.model.method == everything.EverythingConfig(queue=30)
        assert parse(*chosen, "--dim", "9")[1].model.method == everything.EverythingConfig(dim=9)
        assert isinstance(parse("--dim", "9")[1].model.method, SimSiamConfig)
        said = refused(*chosen, "--predictor-dim", "4")
        assert "predictor-dim is no setting of everything" in said
        assert "queue is no setting of simsiam" in refused("--queue", "30")
        assert "three views, not 2" in refused("--method", "everything")
    assert "unknown method 'everything'; there are simsiam" in refused("--method", "everything")


def test_flag_beats_file_beats_recipe_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("recipe: cifar10\noptim:\n  lr: 0.5\n  batch: 64\n")
    expected = with_settings(RECIPES["cifar10"](), lr=0.25, batch=64)
    named = ["--config", str(file)]
    for arguments in ([*named, "--lr", "0.25"], ["--lr", "0.25", *named]):
        assert parse(*arguments) == ("cifar10", expected)
    other = with_settings(RECIPES["demo"](), lr=0.5, batch=64)
    for arguments in ([*named, "--recipe", "demo"], ["--recipe", "demo", *named]):
        assert parse(*arguments) == ("demo", other)
    assert parse() == ("imagenet", RECIPES["imagenet"]())


def test_set_gives_any_setting(tmp_path: Path) -> None:
    texts = ["lr-end=1e-3", "mean=[0.5, 0.5, 1]", "crop=96,64", "optimizer=lars", "tf32=false"]
    given = [word for text in texts for word in ("--set", text)]
    expected = with_settings(
        RECIPES["cifar10"](),
        **{"lr_end": 1e-3, "mean": (0.5, 0.5, 1.0), "crop": "96,64", "optimizer": "lars"},
        tf32=False,
    )
    assert parse("--recipe", "cifar10", *given)[1] == expected
    file = tmp_path / "my.toml"
    file.write_text("[optim]\nlr_end = 0.5\nlr = 0.5\n")
    found = parse("--config", str(file), "--set", "lr_end=0", "--set", "lr=3", "--lr", "4")[1]
    assert (found.optim.lr_end, found.optim.lr) == (0, 4)
    assert parse("--set", "method=byol")[1].model.method == BYOLConfig()
    assert "unknown setting lrr; did you mean lr?" in refused("--set", "lrr=1")
    assert "lr must be a number, not 'fast'" in refused("--set", "lr=fast")
    assert "--set takes NAME=VALUE, not 'lr'" in refused("--set", "lr")
    assert "No such option: --restarts; add --set restarts=VALUE" in refused_by_train("--restarts")


def refused_by_train(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["train", *arguments])
    assert result.exit_code == 2
    return " ".join(result.output.split())


def test_a_method_on_the_command_line_beats_the_files(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    with everything.registered():
        file.write_text('[model]\nmethod = "everything"\nqueue = 40\n[augment]\nviews = 3\n')
        assert parse("--config", str(file))[1].model.method == everything.EverythingConfig(queue=40)
        chosen = parse("--config", str(file), "--method", "simsiam", "--views", "2")[1]
        assert chosen == RECIPES["imagenet"]()
        file.write_text("[model]\nqueue = 40\n[augment]\nviews = 3\n")
        given = parse("--method", "everything", "--config", str(file))[1].model.method
        assert given == everything.EverythingConfig(queue=40)
        assert "queue is no setting of simsiam" in refused("--config", str(file))


def test_what_is_wrong_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("[optim]\nlrr = 1\n")
    assert f"{file}: unknown setting optim.lrr; did you mean optim.lr?" in refused(
        "--config", str(file)
    )
    file.write_text("[optim]\nlr = -1\n")
    assert f"lr must be above 0, not -1.0 (with the settings of {file})" in refused(
        "--config", str(file)
    )
    assert parse("--config", str(file), "--lr", "1")[1].optim.lr == 1


def test_config_prints_what_train_reads(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text(fastsiam("config", "--recipe", "byol", "--lr", "0.3").stdout)
    assert parse("--config", str(file)) == ("byol", with_settings(RECIPES["byol"](), lr=0.3))


@pytest.fixture
def begun(small: TrainConfig) -> TrainConfig:
    """A run of 12 steps that was stopped after 6."""
    config = with_settings(small, knn_every=0, lr=0.25)
    train_here(with_settings(config, max_steps=6), "demo")
    return config


def test_a_file_beats_the_run_that_goes_on_but_for_its_folder(
    begun: TrainConfig, tmp_path: Path
) -> None:
    run, file = str(tmp_path / "run"), tmp_path / "my.toml"
    file.write_text('[run]\nout = ""\nlog_every = 9\nresume = "auto"\n')
    config = parse("--config", str(file), "--resume", run)[1]
    assert config == with_settings(begun, max_steps=6, log_every=9, resume=run, out=run)
    file.write_text(f'[run]\nresume = "{run}"\n')
    config = parse("--config", str(file))[1]
    assert config == with_settings(begun, max_steps=6, resume=run, out=run)


def recorded(run: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((run / "config.json").read_text())
    return found


@pytest.mark.parametrize("name", ["run", "run/checkpoints/last.pt", "run/checkpoints/../"])
def test_resume_of_a_run_takes_its_settings_and_its_folder(
    name: str, begun: TrainConfig, tmp_path: Path
) -> None:
    recipe, config = parse("--resume", str(tmp_path / name), "--workers", "1")
    assert recipe == "demo"
    assert Path(config.run.out).resolve() == tmp_path / "run"
    expected = {"max_steps": 6, "workers": 1, "resume": config.run.resume, "out": config.run.out}
    assert config == with_settings(begun, **expected)


@pytest.mark.parametrize(
    ("here", "name"),
    [("run/checkpoints", "last.pt"), ("run/checkpoints/in", "../last.pt"), (".", "a link")],
)
def test_a_checkpoint_is_known_by_where_it_lies(
    here: str, name: str, begun: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a link").symlink_to(checkpoints.last(tmp_path / "run"))
    (tmp_path / here).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / here)
    config = parse("--resume", name)[1]
    assert Path(config.run.out).resolve() == tmp_path / "run" and config.optim.lr == 0.25


def test_a_run_goes_on_by_its_folder_alone(begun: TrainConfig, tmp_path: Path) -> None:
    run, branch = str(tmp_path / "run"), tmp_path / "branch"
    fastsiam("train", "--resume", run, "--out", str(branch), "--max-steps", "8")
    assert checkpoints.load(branch).step == 8 and checkpoints.load(tmp_path / "run").step == 6
    fastsiam("train", "--resume", run, "--extend", "5", "--max-steps", "9")
    said = fastsiam("train", "--resume", run).stderr
    assert f"{run}/checkpoints/last.pt is at step 9 of 15; --max-steps 0 continues\n" in said
    fastsiam("train", "--resume", run, "--max-steps", "0")
    assert checkpoints.load(tmp_path / "run").step == 15
    assert len(history(tmp_path / "run")) == 15 and recorded(tmp_path / "run")["recipe"] == "demo"
    said = fastsiam("train", "--resume", run, "--lr", "9", code=1).stderr
    assert "lr: 0.25 -> 9.0" in said
    said = fastsiam("train", "--resume", run, "--epochs", "7", code=1).stderr
    assert "epochs: 5 -> 7" in said and "train longer (--extend EPOCHS)" in said


def test_an_extension_that_was_killed_before_it_saved_goes_on(
    begun: TrainConfig, tmp_path: Path
) -> None:
    """config.json has the longer schedule then, and the checkpoint not yet."""
    run = tmp_path / "run"
    state = checkpoints.last(run).read_bytes()
    fastsiam("train", "--resume", str(run), "--extend", "5", "--max-steps", "9")
    expected = history(run)
    checkpoints.last(run).write_bytes(state)
    fastsiam("train", "--resume", str(run))
    assert history(run) == expected and checkpoints.load(run).config.optim.epochs == 5


def test_a_branch_of_a_longer_run_keeps_its_own_length(begun: TrainConfig, tmp_path: Path) -> None:
    """The run's --extend is not that of the branch, which was given another."""
    run, branch = str(tmp_path / "run"), str(tmp_path / "branch")
    fastsiam("train", "--resume", run, "--extend", "5", "--max-steps", "7")
    fastsiam("train", "--resume", run, "--out", branch, "--extend", "6", "--max-steps", "8")
    said = fastsiam("train", "--resume", run, "--out", branch).stderr
    assert "is at step 8 of 18; --max-steps 0 continues" in said
    assert parse("--resume", run, "--out", branch, "--extend", "7")[1].run.extend == 7
    said = fastsiam("train", "--resume", run, "--out", branch, "--lr", "9", code=1).stderr
    assert "lr: 0.25 -> 9.0" in said


def test_ranks_go_on_by_the_folder_alone(begun: TrainConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fastsiam_on_ranks(2, "train", "--resume", str(run), "--extend", "5", "--max-steps", "8")
    assert checkpoints.load(run).step == 8


def test_a_checkpoint_without_its_record_goes_on_too(begun: TrainConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "config.json").unlink()
    config = parse("--resume", str(run))[1]
    assert config == with_settings(begun, max_steps=6, resume=str(run), out=str(run))
    alone = Path(shutil.copy(checkpoints.last(run), tmp_path / "alone.pt"))
    config = parse("--resume", str(alone))[1]
    assert config == with_settings(begun, max_steps=6, resume=str(alone), out="")


def test_what_is_no_run_is_one_line(begun: TrainConfig, tmp_path: Path) -> None:
    said = fastsiam("train", "--resume", str(tmp_path / "none"), code=1).stderr
    assert said == f"error: no checkpoint at {tmp_path / 'none'}\n"
    (tmp_path / "photos").mkdir()
    said = fastsiam("train", "--resume", str(tmp_path / "photos"), code=1).stderr
    assert said == (
        f"error: {tmp_path / 'photos'} is not a run folder: it has neither config.json nor "
        "checkpoints/last.pt\n"
    )
    (tmp_path / "run" / "config.json").write_text("{")
    assert "run/config.json cannot be read as JSON" in refused("--resume", str(tmp_path / "run"))


def test_another_run_with_a_runs_settings_is_elsewhere(begun: TrainConfig, tmp_path: Path) -> None:
    for path in (tmp_path / "run", tmp_path / "run" / "config.json"):
        recipe, config = parse("--config", str(path), "--lr", "0.125")
        assert (recipe, config) == ("demo", with_settings(begun, max_steps=6, lr=0.125, out=""))
    extended = json.loads(path.read_text())
    extended["config"]["optim"] |= {"epochs": 40, "restarts": "20@4"}
    path.write_text(json.dumps(extended))
    assert not parse("--config", str(path))[1].optim.restarts  # its schedule is one cosine
    old = parse("--config", str(ROOT / "tests" / "data" / "run-0.1"))[1]
    assert (old.augment.crop, old.model.width, old.run.out) == (16, 4, "")


def test_views_shows_what_a_run_sees(begun: TrainConfig, tmp_path: Path) -> None:
    draws = tmp_path / "draws.json"
    shown = ["views", "--images", "2", "--out", str(tmp_path / "v.png"), "--json", str(draws)]
    done = fastsiam(*shown, "--run", str(tmp_path / "run"))
    assert "2 views of 2 images, pipeline memory, epoch 0, seed 0" in done.stdout
    of_run = json.loads(draws.read_text())
    file = tmp_path / "my.toml"
    file.write_text(f'[data]\ndata = "{begun.data.data}"\n[augment]\ncrop = 16\n')
    done = fastsiam(*shown, "--config", str(file))
    assert "pipeline auto" not in done.stdout and json.loads(draws.read_text()) == of_run
    done = fastsiam(*shown, "--run", str(tmp_path / "run"), "--flip-p", "1,0", "--seed", "5")
    assert "seed 5" in done.stdout
    flips = [[view["flip"] for view in image["views"]] for image in json.loads(draws.read_text())]
    assert flips == [[True, False]] * 2
    fastsiam(*shown, "--run", str(tmp_path / "run"), "--views", "3", "--crop", "300")
    with Image.open(tmp_path / "v.png") as sheet:
        assert sheet.width > 300
    done = fastsiam(*shown, "--config", str(file), "--hue", "3", code=2)
    assert "hue must be from 0 to 0.5, not 3.0" in done.stderr
