"""Options: help texts, precedence of flags, files and recipes, and resumed runs."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from fastsiam import cli
from fastsiam.cli.options import Commands
from fastsiam.config import METHOD_CONFIGS, SimSiamConfig, TrainConfig
from fastsiam.config.methods.byol import BYOLConfig
from fastsiam.config.recipes import RECIPES
from fastsiam.config.setting import Setting, setting, settings_of
from fastsiam.config.settings_files import merge, read_settings, to_toml
from fastsiam.config.train import train_settings
from fastsiam.run import checkpoint as checkpoints
from fastsiam.views.batch import Batch
from tests.commands import invoke, parse
from tests.configs import flags, with_settings
from tests.conftest import ROOT, write_images
from tests.methods.barlow_twins import BarlowTwinsConfig
from tests.processes import fastsiam
from tests.ranks import fastsiam_on_ranks
from tests.sources import put
from tests.train.runs import OLD_RUN, history, train_run


def usage_error(*arguments: str) -> str:
    return invoke(*arguments, code=2)[1]


def help_of(*command: str) -> str:
    arguments = command if "--help-all" in command else [*command, "--help"]
    result = CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, arguments)
    assert result.exit_code == 0
    return result.output


def test_command_callback_has_no_type_hints() -> None:
    """They look up option types in the function's annotations; ``bench`` has an option "values"."""
    app = Commands()
    app.command("test")(lambda recipe: None)
    assert not get_type_hints(app.registered_commands[0].callback)


def test_train_help_lists_options_by_section_with_defaults() -> None:
    text = help_of("train", "--help-all")
    assert max(map(len, text.splitlines())) <= 80
    assert len(set(re.findall(r"^  --[\w-]+", text, re.MULTILINE))) <= 80
    for one in (one for one in train_settings().values() if one.option):
        section = text[text.index(f"\n{one.section}\n") :].split("\n\n")[0]
        assert re.search(rf"^  --{one.flag}\b", section, re.MULTILINE), one.name
    help_text = "".join(text.split())
    for option, default in (("crop", "224"), ("sync-bn", "sync-bn"), ("knn-every", "10")):
        match = re.search(rf"--{option}.*?\[default:([^\]]+)\]", help_text)
        assert match and match.group(1) == default
    assert "[default:0.1;atleast0andatmost0.5]" in help_text
    short = help_of("train", "--recipe", "cifar10", "--method", "byol")
    assert len(re.findall(r"^  --[\w-]+ ", short, re.MULTILINE)) == 30
    help_text = "".join(short.split())
    assert "--crop" in help_text and "[default:32]" in help_text and "--hue" not in help_text


def test_help_describes_shared_options_per_method() -> None:
    """The chosen method's text, or one text per method if the chosen one lacks the option."""
    help_text = "".join(help_of("train", "--help-all").split())
    assert "--cropINTEGER[,...]Sideofaview" in help_text and "--viewsINTEGERNumber" in help_text
    for text in ("tokeepasnegatives.[default:65536]", "tobalancesmallbatches;0:none.[default:0]"):
        assert text in help_text
    assert help_text.count("--symmetric/--no-symmetric") == 1
    help_text = "".join(help_of("train", "--method", "mocov2", "--help-all").split())
    assert (
        help_text.count("--queueINTEGER") == 1 and "tokeepasnegatives.[default:65536]" in help_text
    )
    assert "Usebothviewsasqueries" in help_text and "Predicteachviewfromtheother" not in help_text


def test_eval_linear_help_states_defaults_once() -> None:
    help_text = "".join(help_of("eval", "linear").split())
    assert "[default:90;" in help_text or "[default:90]" in help_text
    assert not re.search(r"Default:[^\[-]*\[default:", help_text)


@pytest.mark.parametrize("group", [(), ("convert",), ("eval",), ("bench",)])
def test_command_summaries_are_not_truncated(group: tuple[str, ...]) -> None:
    _, _, commands = help_of(*group).partition("Commands:\n")
    assert commands and "..." not in commands
    assert max(map(len, commands.splitlines())) <= 80


TEXTS = {
    "data": ["", 's3://a/b"', 'a "b"\\c\té'],
    "holdout": ["", "10%"],
    "shuffle": ["full", "window:8"],
    "backbone": ["resnet18", "convnext_tiny", "timm/x"],
    "rendezvous": ["", "node1:29500"],
    "resume": ["auto", "never"],
    "tracker": ["none", "wandb,mlflow"],
}
"""Values of settings that do not accept any text."""


def values(one: Setting) -> st.SearchStrategy[Any]:
    """Return any value of a setting's type and range."""
    kind, ends = one.kind, one.bounds
    least = ends.get("at_least", ends.get("above", 0))
    most = ends.get("at_most", ends.get("below", least + 1e6))
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if kind is bool:
        return st.booleans()
    if kind is str:
        return st.sampled_from(TEXTS[one.name]) if one.name in TEXTS else st.text()
    if kind == tuple[str, ...]:
        return st.lists(st.text(min_size=1), max_size=2).map(tuple)
    if kind in (int, int | str):
        return st.integers(int(least), int(most))
    number = st.floats(
        least, most, exclude_min="above" in ends, exclude_max="below" in ends, allow_nan=False
    )
    return number if kind is float else st.tuples(*[number] * 3)


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, TrainConfig]:
    """Return a recipe, and its settings with up to four changed."""
    recipe = draw(st.sampled_from([*RECIPES]))
    changed = RECIPES[recipe]().to_flags()
    known = train_settings() | settings_of(METHOD_CONFIGS[changed["method"]])
    names = sorted(changed.keys() - {"views", "method", "nodes", "weights"})
    for name in draw(st.lists(st.sampled_from(names), max_size=4, unique=True)):
        changed[name] = draw(values(known[name]))
    try:
        config = TrainConfig.from_flags(changed)
        config.check_given(changed)
    except ValueError:  # settings that contradict each other or have no effect
        reject()
    return recipe, config


@settings(max_examples=30)
@given(configs())
def test_settings_round_trip_through_flags_and_files(named: tuple[str, TrainConfig]) -> None:
    recipe, config = named
    assert parse(*flags(config, recipe)) == (recipe, config)
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(to_toml(config, recipe=recipe))
        file.flush()
        merged = merge(read_settings(Path(file.name)))
    assert (merged.recipe, TrainConfig.from_flags(merged.flags)) == (recipe, config)


@dataclass(frozen=True, slots=True, kw_only=True)
class OddConfig(BarlowTwinsConfig):
    """Settings of a user's method whose types are unusual, or that another method has."""

    name: ClassVar[str] = "odd"

    memory: int | None = setting(None, "Size of the memory.")
    bits: Literal[1, 2] = setting(1, "Bits.")
    epsilon: float = setting(0.1, "An option, unlike that of SwAV.")


def test_settings_of_user_method_may_have_unusual_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHOD_CONFIGS, "odd", OddConfig)
    _, config = parse("--method", "odd", "--bits", "2", "--epsilon", "0.5")
    assert (config.model.method.bits, config.model.method.epsilon) == (2, 0.5)  # type: ignore[attr-defined]
    (tmp_path / "s.toml").write_text(to_toml(config, recipe="imagenet"))
    assert parse("--config", str(tmp_path / "s.toml"))[1] == config
    assert "bits must be one of 1, 2, not '3'" in usage_error("--method", "odd", "--bits", "3")


def test_method_adds_its_options_and_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of options is free; ``dim`` has a different default in each method."""
    monkeypatch.setitem(METHOD_CONFIGS, BarlowTwinsConfig.name, BarlowTwinsConfig)
    chosen = ["--method", "barlow-twins"]
    assert "Method that trains the backbone: simsiam, " in (text := invoke("--help")[1])
    assert ", swav, barlow-twins." in text
    for arguments in ([*chosen, "--recipe", "cifar10"], ["--recipe", "cifar10", *chosen]):
        recipe, config = parse(*arguments, "--set", "redundancy=0.1")
        assert recipe == "cifar10" and config.model.backbone == "resnet18"
        assert config.model.method == BarlowTwinsConfig(redundancy=0.1)
    assert parse(*chosen, "--dim", "9")[1].model.method == BarlowTwinsConfig(dim=9)
    assert isinstance(parse("--dim", "9")[1].model.method, SimSiamConfig)
    message = usage_error(*chosen, "--predictor-dim", "4")
    assert "predictor-dim is not a setting of barlow-twins" in message
    assert "compares two views of each image, not 3" in usage_error(*chosen, "--views", "3")
    file = tmp_path / "my.toml"
    file.write_text('[model]\nmethod = "barlow-twins"\nredundancy = 0.2\n')
    method = parse("--config", str(file))[1].model.method
    assert method == BarlowTwinsConfig(redundancy=0.2)
    usual = parse("--config", str(file), "--method", "simsiam")[1]
    assert usual == RECIPES["imagenet"]()
    monkeypatch.undo()
    assert "unknown method 'barlow-twins'; choose one of simsiam" in usage_error(*chosen)


def test_option_without_effect_is_rejected(tmp_path: Path) -> None:
    """A settings file or a resumed run may still contain it."""
    for arguments, message in (
        (["--rendezvous", "node1"], "is for several machines: pass --nodes too, or leave"),
        (["--no-sync-bn", "--sync-bn-ranks", "2"], "sync-bn-ranks 2 needs --sync-bn"),
        (["--resume", str(OLD_RUN), "--init", "a.pt"], "init starts a new run: choose one"),
    ):
        assert message in usage_error(*arguments)
    for command in (["eval", "knn", str(OLD_RUN)], ["features", str(OLD_RUN)]):
        result = CliRunner().invoke(cli.app, [*command, "--rendezvous", "node1"])
        assert result.exit_code == 2 and "pass --nodes too" in " ".join(result.output.split())
    for value in (["--rendezvous", "node1"], ["--set", "rendezvous=node1"]):
        result = CliRunner().invoke(cli.app, ["slurm", "--nodes", "4", *value])
        assert result.exit_code == 2
        assert "the job chooses the rendezvous; leave out" in " ".join(result.output.split())
    file = tmp_path / "my.toml"
    file.write_text('rendezvous = "node1"\nnodes = 4\nsync_bn_ranks = 2\ninit = "a.pt"\n')
    parse("--config", str(file), "--nodes", "1", "--no-sync-bn")
    parse("--config", str(file), "--resume", str(OLD_RUN))
    result = CliRunner().invoke(cli.app, ["slurm", "--config", str(file), "--no-sync-bn"])
    assert result.exit_code == 0 and "node1" not in result.output


def test_flag_overrides_file_overrides_recipe(tmp_path: Path) -> None:
    assert parse() == ("imagenet", RECIPES["imagenet"]())
    assert parse("--data", "a", "--set", "mixed_with=b")[1].data.mixed_with == ("b",)
    file = tmp_path / "my.yaml"
    file.write_text("data: a\nmixed_with: [b]\nweights: [0.7, 0.3]\n")
    for data in (["c"], ["c", "d"]):
        config = parse("--config", str(file), *(x for one in data for x in ("--data", one)))[1].data
        assert [config.data, *config.mixed_with] == data
        assert config.weights == ((0.7, 0.3) if len(data) > 1 else ())
    file.write_text("recipe: cifar10\noptim:\n  lr: 0.5\n  batch: 64\n")
    expected = with_settings(RECIPES["cifar10"](), lr=0.25, batch=64)
    named = ["--config", str(file)]
    for arguments in ([*named, "--lr", "0.25"], ["--lr", "0.25", *named]):
        assert parse(*arguments) == ("cifar10", expected)
    other = with_settings(RECIPES["demo"](), lr=0.5, batch=64)
    assert parse("--recipe", "demo", *named) == ("demo", other)
    other = with_settings(RECIPES["byol"](), lr=0.5, batch=64)
    assert parse("--recipe", "byol", *named) == ("byol", other)
    file.write_text("method: byol\ndim: 64\nencoder_momentum: 0.9\n")
    flags = parse("--recipe", "imagenet", *named)[1].to_flags()
    assert (flags["method"], flags["dim"]) == ("byol", 64)
    assert parse("--recipe", "imagenet", "--method", "simsiam", *named)[1] == RECIPES["imagenet"]()
    file.write_text("optim:\n  lr: -1\n")
    message = usage_error("--config", str(file))
    assert f"lr must be above 0, not -1.0 (with the settings of {file})" in message
    assert parse("--config", str(file), "--lr", "1")[1].optim.lr == 1


def test_set_option_assigns_any_setting() -> None:
    texts = ["lr-end=1e-3", "mean=[0.5, 0.5, 1]", "crop=96,64", "optimizer=lars", "tf32=false"]
    arguments = [word for text in texts for word in ("--set", text)]
    expected = with_settings(
        RECIPES["cifar10"](),
        **{"lr_end": 1e-3, "mean": (0.5, 0.5, 1.0), "crop": "96,64", "optimizer": "lars"},
        tf32=False,
    )
    assert parse("--recipe", "cifar10", *arguments)[1] == expected
    assert parse("--set", "lr=3", "--lr", "4")[1].optim.lr == 4
    assert parse("--set", "method=byol")[1].model.method == BYOLConfig()
    assert "unknown setting 'lrr'; did you mean lr?" in usage_error("--set", "lrr=1")
    assert "unknown setting 'zzz'; `fastsiam config` prints all" in usage_error("--set", "zzz=1")
    for name in ("keep_memory", "keep-memory", "restarts", "extend_schedule"):
        error = usage_error("--set", f"{name}=1")
        assert f"{name.replace('-', '_')} was removed in version 0.3; leave it out" in error
    assert "lr must be a number, not 'fast'" in usage_error("--set", "lr=fast")
    assert "--set takes NAME=VALUE, not 'lr'" in usage_error("--set", "lr")
    assert "No such option: --lr-end; pass --set lr_end=VALUE" in usage_error("--lr-end")
    assert "Option '--lr' requires an argument" in usage_error("--lr")
    assert "Option '--sync-bn' does not take a value" in usage_error("--sync-bn=false")


def test_resume_inherits_and_overrides_run_settings(
    stopped_copy: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is named by its folder or a checkpoint; files and options override its settings."""
    run, file, last = tmp_path / "run", tmp_path / "my.toml", checkpoints.last(tmp_path / "run")
    (tmp_path / "link").symlink_to(last)
    for name in (run, last, f"{run}/checkpoints/../", tmp_path / "link"):
        recipe, config = parse("--resume", str(name), "--workers", "1")
        assert recipe == "demo" and Path(config.run.out).resolve() == run
        expected = {"max_steps": 6, "workers": 1, "resume": str(name), "out": config.run.out}
        assert config == with_settings(stopped_copy, **expected)
    with monkeypatch.context() as context:
        context.chdir(last.parent)
        assert Path(parse("--resume", "last.pt")[1].run.out).resolve() == run
    file.write_text('[run]\nout = ""\nlog_every = 9\nresume = "auto"\n')
    config = parse("--config", str(file), "--resume", str(run))[1]
    resumed = with_settings(stopped_copy, max_steps=6, resume=str(run), out=str(run))
    assert config == with_settings(resumed, log_every=9)
    file.write_text(f'[run]\nresume = "{run}"\n')
    assert parse("--config", str(file))[1] == resumed
    assert parse("--resume", str(run), "--recipe", "byol") == ("demo", resumed)

    for path in (run, run / "config.json"):  # a new run with these settings gets another folder
        recipe, config = parse("--config", str(path), "--lr", "0.125")
        assert (recipe, config) == (
            "demo",
            with_settings(stopped_copy, max_steps=6, lr=0.125, out=""),
        )
    old = parse("--config", str(ROOT / "tests" / "data" / "run-0.2"))[1]
    assert (old.augment.crop, old.model.width, old.run.out) == (16, 4, "")

    branch = tmp_path / "branch"  # keeps its own rate and length, unlike the run's
    changes = {"lr": 0.125, "extend": 9, "resume": str(run), "out": str(branch)}
    record = {"recipe": "demo", "config": with_settings(stopped_copy, **changes).to_dict()}
    branch.mkdir()
    (branch / "config.json").write_text(json.dumps(record))
    config = parse("--resume", str(run), "--out", str(branch))[1]  # it failed before a checkpoint
    assert config == with_settings(stopped_copy, max_steps=6, resume=str(run), out=str(branch))
    put(branch / "checkpoints" / "last.pt")
    config = parse("--resume", str(run), "--out", str(branch))[1]
    assert config == with_settings(stopped_copy, max_steps=6, **changes)
    file.write_text(f'resume = "{run}"\nout = "{branch}"\n')
    assert parse("--config", str(file))[1] == config

    original = (run / "config.json").read_text()  # a new branch does not inherit extend
    record["config"] = with_settings(stopped_copy, epochs=9, extend=9).to_dict()
    (run / "config.json").write_text(json.dumps(record))
    for arguments, epochs in (([], 9), (["--epochs", "7"], 7), (["--epochs", "11"], 11)):
        config = parse("--resume", str(run), "--out", str(tmp_path / "other"), *arguments)[1]
        assert (config.optim.epochs, config.run.extend) == (epochs, 0)
    file.write_text(f'resume = "{run}"\nout = "{tmp_path / "other"}"\nepochs = 7\n')
    config = parse("--config", str(file))[1]
    assert (config.optim.epochs, config.run.extend) == (7, 0)
    assert parse("--resume", str(run))[1].run.extend == 9
    corrections = ((["--extend", "7"], 7), (["--extend", "7", "--epochs", "9"], 9))
    for arguments, epochs in corrections:  # a start that failed wrote the mistyped 9
        config = parse("--resume", str(run), *arguments)[1]
        assert (config.optim.epochs, config.run.extend) == (epochs, 7)
    file.write_text(f'resume = "{run}"\nextend = 7\n')
    assert parse("--config", str(file))[1].optim.epochs == 7
    (run / "config.json").write_text(original)

    (run / "config.json").unlink()  # the checkpoint also has the settings
    assert parse("--resume", str(run))[1] == resumed
    alone = Path(shutil.copy(last, tmp_path / "alone.pt"))
    config = parse("--resume", str(alone))[1]
    assert config == with_settings(stopped_copy, max_steps=6, resume=str(alone), out="")
    extended = with_settings(stopped_copy, epochs=9, extend=9)
    checkpoints.save(alone, replace(checkpoints.load(last), config=extended))
    assert parse("--resume", str(alone))[1].run.extend == 0
    (run / "config.json").write_text("{")
    assert "config.json: " in usage_error("--resume", str(run))


def test_resume_needs_only_run_folder(stopped_copy: TrainConfig, tmp_path: Path) -> None:
    run, folder = str(tmp_path / "run"), tmp_path / "run"
    state = checkpoints.last(folder).read_bytes()
    fastsiam("train", "--resume", run, "--extend", "5", "--max-steps", "9")
    expected = history(folder)
    stderr = fastsiam("train", "--resume", run).stderr
    assert (
        f"{run}/checkpoints/last.pt is at step 9 of 15; pass --max-steps 0 to continue\n" in stderr
    )
    assert "stopped by" not in stderr
    # Killed before it saved: config.json has the longer schedule, the checkpoint does not.
    checkpoints.last(folder).write_bytes(state)
    fastsiam_on_ranks(2, "train", "--resume", run)
    assert [line[0] for line in history(folder)] == [line[0] for line in expected]
    fastsiam("train", "--resume", run, "--max-steps", "0")
    assert checkpoints.load(folder).step == 15 and checkpoints.load(folder).config.run.extend == 5


def test_invalid_resume_path_is_one_line_error(tmp_path: Path) -> None:
    stderr = fastsiam("train", "--resume", str(tmp_path / "none"), code=1).stderr
    assert stderr == f"error: no checkpoint at {tmp_path / 'none'}\n"
    (tmp_path / "photos").mkdir()
    stderr = fastsiam("train", "--resume", str(tmp_path / "photos"), code=1).stderr
    assert stderr == (
        f"error: {tmp_path / 'photos'} is not a run folder: it has neither config.json nor "
        "checkpoints/last.pt\n"
    )
    assert "resume must be auto, never or a path, not empty" in usage_error("--resume", "")


def test_views_command_uses_run_settings(stopped_copy: TrainConfig, tmp_path: Path) -> None:
    draws, sheet = tmp_path / "draws.json", tmp_path / "v.png"
    command = ["views", "--images", "2", "--out", str(sheet), "--json", str(draws)]
    result = fastsiam(*command, "--config", str(tmp_path / "run"))
    assert "2 views of 2 images, pipeline memory, epoch 0, seed 0" in result.stdout
    of_run = json.loads(draws.read_text())
    assert len(of_run) == 2 and all(Path(image["path"]).exists() for image in of_run)
    assert of_run[0]["views"][0]["box"] != of_run[0]["views"][1]["box"]
    batches: list[Batch] = []
    train_run(stopped_copy, lambda _, batch: batches.append(batch), out=tmp_path / "again")
    assert [image["index"] for image in of_run] == batches[0].index[:2].tolist()
    params = batches[0].params
    assert params is not None
    for name in of_run[0]["views"][0]:
        drawn = [[view[name] for view in image["views"]] for image in of_run]
        assert drawn == getattr(params, name)[:, :2].swapaxes(0, 1).tolist(), name
    file = tmp_path / "my.toml"
    file.write_text(f'[data]\ndata = "{stopped_copy.data.data}"\n[augment]\ncrop = 16\n')
    result = fastsiam(*command, "--config", str(file))
    assert "pipeline auto" not in result.stdout and json.loads(draws.read_text()) == of_run
    file.write_text('holdout = "50%"\ncrop = 16\n')  # for other data than these
    other = [*command, "--config", str(file), "--data"]
    write_images(tmp_path / "other" / "train")
    write_images(tmp_path / "other" / "val")
    result = fastsiam(*other, str(tmp_path / "other"), code=1)
    assert "remove --holdout" in result.stderr
    fastsiam(*other, str(tmp_path / "other"), "--holdout", "0%")
    changed = ["--flip-p", "1,0,1", "--seed", "5", "--views", "3", "--crop", "300"]
    changed += ["--config", str(tmp_path / "run"), "--pipeline"]
    result = fastsiam(*command, *changed, "torchvision,memory")
    assert "pipeline torchvision, memory, epoch 0, seed 5" in result.stdout
    flips = [[view["flip"] for view in image["views"]] for image in json.loads(draws.read_text())]
    assert flips == [[True, False, True]] * 2
    with Image.open(sheet) as picture:
        assert picture.width > 300 and len(picture.getcolors(10**6) or []) > 500
    result = fastsiam(*command, *changed, "torchvision,disk", code=2)
    assert "pipeline must be one of auto, torchvision, native, ffcv, dali" in result.stderr
