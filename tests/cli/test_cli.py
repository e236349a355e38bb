"""The command line: one-line errors, fast help, and the output of each command."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import ModuleType
from typing import get_args
from unittest.mock import Mock

import pytest
import torch
from typer.testing import CliRunner

from fastsiam import cli
from fastsiam.__main__ import main
from fastsiam.bench.cases import CASES
from fastsiam.config import Pipeline, TrainConfig
from fastsiam.config.recipes import RECIPES
from fastsiam.config.settings_files import to_toml
from fastsiam.errors import FastSiamError, Interrupted
from fastsiam.files import others_can_write, require_local
from fastsiam.kernels import library
from fastsiam.pipelines.backends import Backend
from fastsiam.train.command import train_here
from tests.configs import flags, with_settings
from tests.conftest import ROOT
from tests.processes import fastsiam, python, signals_handled

UNWRITABLE = (
    "error: cannot write to standard output: No space left on device; free some space and try "
    "again\n"
)


def test_help_does_not_import_torch() -> None:
    """Checked with the longest help text, run from the checkout."""
    script = (
        "import sys; from cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    )
    result = python(script, "train", "--help")
    assert result.returncode == 0 and "--lr" in result.stdout, result.stderr


def test_interrupt_during_finalizer_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ignores exceptions of finalizers, such as those that return a loader's buffers."""

    def wait_after_ignored_interrupt() -> None:
        weakref.finalize(Mock(), signal.raise_signal, signal.SIGINT)
        time.sleep(60)

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # restored after the test
    monkeypatch.setattr(cli, "_run", wait_after_ignored_interrupt)
    handled = signals_handled(signal.default_int_handler, signal.SIGINT)
    with handled, pytest.raises(KeyboardInterrupt):
        cli.main()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "imagnet"], "unknown recipe 'imagnet'; did you mean imagenet?"),
        (["--pipeline", "fcv"], "pipeline must be one of auto, torchvision, "),
        (["--batch", "4", "--gpus", "4", "--device", "cpu"], "BN needs at least 2"),
        (["--no-such-flag"], "No such option"),
    ],
)
def test_wrong_usage_exits_2(arguments: list[str], message: str) -> None:
    result = fastsiam("train", *arguments, code=2)
    assert message in re.sub(r"[│\s]+", " ", result.stderr)
    assert "Traceback" not in result.stderr


def run_on_full_disk(*arguments: str, **environment: str) -> str:
    """Run a command with its standard output on a full disk; return its standard error."""
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "fastsiam", *arguments],
            stdout=full, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
        )  # fmt: skip
    assert result.returncode == 1, result.stderr
    return result.stderr


def test_config_prints_utf8_in_every_locale() -> None:
    """Text that the user's program printed earlier is kept, and paths need not be UTF-8.

    ``test_settings_round_trip_through_flags_and_files`` reads such files back.
    """
    program, data = "print('before'); from fastsiam.cli import main; main()", "photos-ü/caf\udce9"
    settings = ["config", "--recipe", "byol", "--lr", "0.3", "--data", data]
    printed = subprocess.run(
        [sys.executable, "-c", program, *settings], env={**os.environ, "PYTHONIOENCODING": "ascii"},
        cwd=ROOT, check=True, capture_output=True,
    ).stdout.decode("utf-8", "surrogateescape")  # fmt: skip
    expected = to_toml(with_settings(RECIPES["byol"](), lr=0.3, data=data), recipe="byol")
    assert printed == f"before\n{expected}" and f'data = "{data}"\n' in printed


@pytest.mark.parametrize(("command", "unbuffered"), [("config", ""), ("--help", "1")])
def test_stdout_on_full_disk_is_error(command: str, unbuffered: str) -> None:
    assert run_on_full_disk(command, PYTHONUNBUFFERED=unbuffered) == UNWRITABLE


def test_broken_pipe_exits_1_silently() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        command = [sys.executable, "-m", "fastsiam", "--version"]
        result = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE)
    assert (result.returncode, result.stderr) == (1, b"")


def test_sigint_before_first_step_prints_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("fastsiam.train.command.preflight", interrupted)
    monkeypatch.setattr(sys, "argv", ["fastsiam", "train", "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as caught:
        cli._run()
    assert caught.value.code == 130
    stderr = capsys.readouterr().err
    assert stderr == "SIGINT: stopped before the first step; there is nothing to save\n"


def test_sigint_during_import_exits_silently() -> None:
    script = (
        "import os, runpy, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "runpy.run_module('fastsiam', run_name='__main__', alter_sys=True)\n"
    )
    result = python(script)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_sigint_after_command_exits_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_run", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"cannot decode .*class1/004\.jpg: .*; repair or remove the file"),
        ({"out": "/dev/null/run"}, r"cannot create the run folder .*: Not a directory"),
        ({"gpus": 80, "device": "auto"}, r"--gpus 80: torch finds .*; pass at most"),
        ({"precision": "fp16"}, r"--precision fp16 needs a GPU"),
    ],
)
def test_train_errors_are_one_line(
    settings: dict[str, object], message: str, small: TrainConfig, images: Path
) -> None:
    """An image is truncated, but a wrong setting is found first."""
    truncated = images / "train" / "class1" / "004.jpg"
    truncated.write_bytes(truncated.read_bytes()[:300])
    stderr = fastsiam("train", *flags(with_settings(small, **settings)), code=1).stderr
    lines = [line for line in stderr.splitlines() if line.startswith("error")]
    assert len(lines) == 1 and re.search(message, lines[0]), stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("command", [
    "report /no/run", "train --resume", "train --config",
    "train --out x --data . --gpus 1 --device cpu --init",
])  # fmt: skip
def test_remote_input_is_rejected(command: str) -> None:
    stderr = fastsiam(*command.split(), "s3://b/run", code=1).stderr
    assert stderr.startswith(
        "error: cannot read s3://b/run: only --data and --source can be remote"
    )


@pytest.mark.parametrize("command", [
    "report ~/run", "train --device cpu --out ~/run", "info --json ~/run", "train --data ~/run",
])  # fmt: skip
def test_unexpanded_tilde_is_rejected(command: str, images: Path, tmp_path: Path) -> None:
    environment = {"FASTSIAM_DATA": str(images), "HOME": "/home/me"}
    stderr = fastsiam(*command.split(), folder=tmp_path, environment=environment, code=1).stderr
    assert stderr.endswith(" (the shell did not expand ~: pass /home/me/run)\n")
    assert not (tmp_path / "~").exists()


def test_tilde_path_of_other_user() -> None:
    """bash expands ``~root`` but not ``--out=~root``; it leaves ``~nobody-here`` as it is."""
    with pytest.raises(FastSiamError, match=r"did not expand ~root: pass /\S+/run\)$"):
        require_local(Path("~root/run"))
    require_local(Path("~nobody-here/run"))
    with pytest.raises(FastSiamError, match="cannot find the home directory in ~nobody-here/run; "):
        others_can_write(Path("~nobody-here/run"))


@pytest.mark.parametrize("scheme", ["s3", "S3", "gs", "az", "https", "file", "hf"])
def test_url_as_output_is_rejected(scheme: str) -> None:
    with pytest.raises(FastSiamError, match=f"^cannot write to {scheme}://b/run: results can only"):
        require_local(Path(f"{scheme}://b/run"))
    require_local(Path(f"{scheme}/run"))


RANK_0_OF_2 = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK set without WORLD_SIZE: start ranks with --gpus or "),
        ({"RANK": "1"}, "RANK set without WORLD_SIZE: "),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "RANK, WORLD_SIZE set without LOCAL_RANK: ",
        ),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE set without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "x"}, "RANK must be a number, not 'x': run `unset RANK` first"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE must be a number, not ''"),
        (
            RANK_0_OF_2 | {"RANK": "5", "MASTER_PORT": "1"},
            "RANK must be below WORLD_SIZE, but they are 5 and 2: start ranks with --gpus or ",
        ),
        ({"WORLD_SIZE": "0"}, "RANK must be below WORLD_SIZE, but they are 0 and 0: "),
        (
            {"WORLD_SIZE": "1", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK must be below LOCAL_WORLD_SIZE, but they are 2 and 2: ",
        ),
        (
            RANK_0_OF_2 | {"MASTER_PORT": "x"},
            "the ranks cannot connect: invalid literal for int() with base 10: 'x'; check the ",
        ),
    ],
)
def test_invalid_launcher_variables_are_rejected(
    variables: dict[str, str], message: str, small: TrainConfig
) -> None:
    stderr = fastsiam("train", *flags(small), environment=variables, code=1).stderr
    assert f"error: {message}" in stderr and "Traceback" not in stderr


def test_exceptions_map_to_message_and_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Notes follow the message, signals set their own exit code, bugs keep their traceback."""
    with_note = FastSiamError("no such thing")
    with_note.add_note("saved last.pt at step 7")
    for error, code, line in (
        (with_note, 1, "error: no such thing (saved last.pt at step 7)\n"),
        (FastSiamError("no /a\nb\x1b[1m/é"), 1, "error: no /a\\nb\\x1b[1m/é\n"),
        (Interrupted("SIGTERM: stopped", 15), 143, "SIGTERM: stopped\n"),
    ):
        monkeypatch.setattr(cli, "app", Mock(side_effect=error))
        with pytest.raises(SystemExit) as exit:
            cli.main()
        assert (exit.value.code, capsys.readouterr().err) == (code, line)
    monkeypatch.setattr(cli, "app", lambda: Path("/no such file").read_text())
    with pytest.raises(FileNotFoundError):
        cli.main()


def test_bench_defaults_to_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, int]] = []
    session = ModuleType("fastsiam.bench.session")
    session.run = lambda case, config: measured.append((case, config.repeats))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastsiam.bench.session", session)
    for arguments in ([], ["--repeats", "2"], ["all", "--repeats", "3"], ["step"]):
        result = CliRunner().invoke(cli.app, ["bench", *arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert measured == [("all", 0), ("all", 2), ("all", 3), ("step", 0)]  # 0: the case decides
    text = CliRunner().invoke(cli.app, ["bench", "--help"]).output
    assert all(f"\n  {case} " in text for case in (*CASES, "profile", "report"))


def test_eval_knn_prints_protocol_and_writes_json(small: TrainConfig, tmp_path: Path) -> None:
    run, out = train_here(small, "imagenet"), tmp_path / "knn.json"
    votes = ["--k", "7", "--temperature", "0.1"]
    result = fastsiam("eval", "knn", str(run), "--baselines", *votes, "--json", str(out))
    lines = result.stdout.splitlines()
    networks = [line.split(":")[0] for line in lines]
    assert networks == ["raw pixels", "untrained network", "after 4 epochs"]
    assert all("(k 7, T 0.1, bank 24)" in line for line in lines)
    record = json.loads(out.read_text())
    assert record["pixels"]["k"] == record["untrained"]["k"] == 7
    assert record["trained"]["k"] == 7 and f"{record['trained']['top1']:.2f}%" in lines[2]
    again = fastsiam("eval", "knn", str(run / "checkpoints" / "last.pt"), *votes)
    assert again.stdout.splitlines() == lines[2:]
    out.unlink()
    stderr = run_on_full_disk("eval", "knn", str(run), *votes, "--json", str(out))
    assert UNWRITABLE in stderr and "Traceback" not in stderr
    assert json.loads(out.read_text())["trained"] == record["trained"]


def test_info_lists_versions_pipelines_and_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not import the pipelines' packages, which would take ten seconds."""
    monkeypatch.setattr(Backend, "problem", lambda self: "")
    oldest = library.kinds()[-1]
    monkeypatch.setenv(library.CHOICE, oldest)
    path = tmp_path / "info.json"
    monkeypatch.setattr(sys, "argv", ["fastsiam", "info", "--json", str(path)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert not caught.value.code
    stdout = capsys.readouterr().out
    assert re.search(rf"^kernels +{oldest}$", stdout, re.MULTILINE)
    assert re.search(rf"^JPEG decoder +{re.escape(library.decoder_name())}$", stdout, re.MULTILINE)
    assert torch.__version__ in stdout and "--pipeline memory" in stdout
    record = json.loads(path.read_text())
    assert record["pipelines"].keys() == set(get_args(Pipeline))
    assert record["cores"] >= 1
