"""The compiled step gives the eager step's results, is cached, and compiles only once."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch._inductor.exc import InductorError

from fastsiam.config import TrainConfig
from fastsiam.config.settings_files import RunSettings
from fastsiam.errors import BackendError, TrainingError
from fastsiam.evaluate.features import frozen_output
from fastsiam.methods import build_method
from fastsiam.run import checkpoint as checkpoints
from fastsiam.train.compile import cache_folder, cause_line, compile_settings
from fastsiam.train.memory import check_memory
from fastsiam.train.resolve import with_compilation
from fastsiam.train.step import TrainingStep
from tests import rank_jobs
from tests.configs import with_settings
from tests.networks import short_resnet10
from tests.processes import Forked
from tests.tiers import slow
from tests.train.runs import CPU, train_run


@pytest.mark.parametrize(
    ("network", "settings"),
    [
        (partial(short_resnet10, 1), {"activation_memory": 0.3}),
        slow((nullcontext, {})),
        slow((short_resnet10, {"accumulate": 2})),  # with ranks: tests/distributed
    ],
    ids=["a block, less activation memory", "whole network", "stem, accumulate"],
)
def test_compiled_step_matches_eager_step(
    network: Callable[[], AbstractContextManager[None]], settings: dict[str, Any]
) -> None:
    """Losses, gradients, weights and BN statistics of three steps, in float32."""
    torch._dynamo.reset()  # it would reuse code that was compiled for other settings
    with network():
        eager = rank_jobs.steps(0, 1, accumulate=settings.get("accumulate", 1))
        compiled = rank_jobs.steps(0, 1, compile="on", **settings)
    torch.testing.assert_close(compiled, eager, atol=1e-4, rtol=1e-4)


def test_compiled_bfloat16_losses_match_eager() -> None:
    """They differ by 0.0002. The float32 losses differ from them by 0.006."""
    torch._dynamo.reset()
    eager, compiled = (
        rank_jobs.steps(0, 1, short=True, precision="bf16", compile=mode)["loss"]
        for mode in ("off", "on")
    )
    torch.testing.assert_close(compiled, eager, atol=3e-3, rtol=0)


@short_resnet10(1)
def test_prepare_compiles_all_graphs_and_preserves_state() -> None:
    """``prepare`` changes no weights, gradients or random state, also when it warms up CUDA graphs.

    It warms up on noise, not zeros. Later steps compile nothing, and the backbone evaluates batches
    of any size.
    """
    config = with_settings(rank_jobs.CONFIG, compile="on", cuda_graphs=True)
    method, forward = rank_jobs.make_method(), TrainingStep._forward
    before = {name: value.clone() for name, value in method.state_dict().items()}
    generator = torch.get_rng_state()

    step = TrainingStep(config, method, CPU, steps_per_epoch=2)
    with patch.object(TrainingStep, "_forward", autospec=True, side_effect=forward) as passes:
        assert step.prepare().startswith("compiled in")
    seen = [view for call in passes.call_args_list for view in call.args[1].views]
    assert len(seen) == 2 * 3
    assert all(view.std() == pytest.approx(1, abs=0.1) for view in seen)
    assert torch.equal(torch.get_rng_state(), generator)
    torch.testing.assert_close(dict(method.state_dict()), before, atol=0, rtol=0)
    assert all(parameter.grad is None for parameter in method.parameters())
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(2):
            step(rank_jobs.global_batch(), at=i)
    backbone, images = step.method.backbone.eval(), torch.randn(3, 3, 16, 16)
    one_batch, *parts = (
        frozen_output(backbone, part, dtype=torch.float32)
        for part in (images, images[:1], images[1:])
    )
    torch.testing.assert_close(one_batch, torch.cat(parts))


def test_compiled_run_resumes_bit_for_bit_from_cache(small: TrainConfig, tmp_path: Path) -> None:
    """The second half runs in another process, which takes the graphs from the cache."""
    config = with_settings(small, knn_every=0, compile="on")
    reference, halves = tmp_path / "whole", tmp_path / "halves"
    with short_resnet10():
        train_run(config, out=reference)
        train_run(config, out=halves, max_steps=5)
    # With "auto" a run this short would not compile, but a resumed run keeps its setting.
    result = Forked(_train_short, with_settings(config, out=str(halves), compile="auto")).wait()
    assert result.returncode == 0, result.stderr
    assert "compiled in" in result.stderr
    assert result.stdout == "all graphs from the cache\n"
    states = [checkpoints.load(run) for run in (reference, halves)]
    assert states[0].step == states[1].step == 12
    torch.testing.assert_close(states[0].model, states[1].model, atol=0, rtol=0)


def _train_short(config: TrainConfig) -> None:
    from torch._dynamo.utils import counters

    with short_resnet10():
        train_run(config)
    hits, misses = (counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss"))
    print("all graphs from the cache" if hits and not misses else f"compiled: {dict(counters)}")


def test_inductor_cache_is_outside_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache moves even if torch has set the variable to its own folder under /tmp."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("HOME", str(tmp_path))
    for default in (None, default_cache_dir()):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if default is not None:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default)
        with compile_settings(rank_jobs.CONFIG):
            width = torch.backends.cpu.get_cpu_capability().lower()
            caches = tmp_path / ".cache" / "fastsiam" / "torchinductor"
            assert cache_folder() == str(caches / width)


def test_failed_cuda_graph_capture_is_reported(
    small: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilation itself works here. Errors of the device are passed on, also inductor's."""
    config = with_settings(small, compile="on", cuda_graphs=True)
    memory = InductorError(torch.OutOfMemoryError("CUDA out of memory."), first_useful_frame=None)
    with pytest.raises(TrainingError, match="out of GPU memory"):
        check_memory(memory, config, at=1, saved="")
    no_graphs = r"model \(RuntimeError: not these\); pass --no-cuda-graphs"
    for error, kind, message in (
        (RuntimeError("not these"), BackendError, no_graphs),
        (torch.AcceleratorError("CUDA error"), torch.AcceleratorError, "CUDA error"),
        (memory, InductorError, "CUDA out of memory"),
    ):
        monkeypatch.setattr(TrainingStep, "_warm_up", Mock(side_effect=error))
        monkeypatch.setattr("fastsiam.train.step.compile_failure", lambda _: "")
        step = TrainingStep(config, build_method(config.model), CPU, steps_per_epoch=3)
        with pytest.raises(kind, match=message):
            step.prepare()


def test_stale_empty_libraries_are_removed_from_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old empty libraries are removed: inductor never recompiles them. New ones may be in use."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "zv"
    folder.mkdir()
    for name, data, age in (("left", b"", 100), ("new", b"", 0), ("whole", b"ELF", 100)):
        library = folder / f"{name}.so"
        library.write_bytes(data)
        os.utime(library, (time.time() - age,) * 2)
    with compile_settings(rank_jobs.CONFIG):
        pass
    assert {path.stem for path in folder.iterdir()} == {"new", "whole"}


def _train_without_compiler(config: TrainConfig) -> None:
    from torch._inductor import config as inductor

    # inductor reads $CXX once, when Python imports it.
    with short_resnet10(1), inductor.patch({"cpp.cxx": ("no-such-compiler",)}):
        train_run(config)


@short_resnet10(1)
def test_missing_compiler_falls_back_to_eager(
    small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training falls back to eager execution, with the same results as an eager run.

    It runs in a separate process: once inductor has inspected the CPU, the error is another one.
    """
    config = with_settings(small, knn_every=0, epochs=1)
    eager, fallen = tmp_path / "eager", tmp_path / "fallen"
    train_run(config, out=eager)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    compiled = with_settings(config, out=str(fallen), compile="on")
    result = Forked(_train_without_compiler, compiled).wait()
    stderr = result.stderr
    assert result.returncode == 0, stderr
    lines = [line for line in stderr.splitlines() if "torch.compile" in line]
    assert len(lines) == 1, stderr
    assert lines[0].startswith("warning: torch.compile does not work on this machine ("), stderr
    assert "Traceback" not in stderr
    states = [checkpoints.load(run) for run in (eager, fallen)]
    torch.testing.assert_close(states[0].model, states[1].model, atol=0, rtol=0)
    assert "(InvalidCxxCompiler: No working C++ compiler found in" in lines[0]
    assert states[1].config.step.compile == "off"  # to resume with the same settings
    recorded = RunSettings.read(fallen)
    assert (recorded.config, recorded.compiled) == (states[1].config, False)


def test_cause_line_extracts_cause_of_compile_error() -> None:
    """Generic first lines of torch's messages are skipped."""
    from torch._dynamo.exc import Unsupported
    from torch._inductor.compile_worker.subproc_pool import SubprocException
    from torch._inductor.exc import CppCompileError

    failed = CppCompileError(
        ["g++", "-Werror"], "In file included:\na.h:1:2: fatal error: no omp.h\n"
    )
    failed.__cause__ = subprocess.CalledProcessError(1, "g++ a.cpp")
    with pytest.raises(Exception) as raised:  # torch wraps errors of its backend
        torch.compile(lambda x: x + 1, backend=Mock(side_effect=failed))(torch.zeros(2))
    assert cause_line(raised.value) == "CppCompileError: a.h:1:2: fatal error: no omp.h"
    with pytest.raises(Unsupported) as broken:
        torch.compile(lambda x: print(x), backend="eager", fullgraph=True)(torch.zeros(2))
    line = cause_line(broken.value)
    assert line.startswith("Unsupported: Failed to trace builtin operator: Dynamo does not"), line
    trace = "Traceback (most recent call last):\n  File x\nRuntimeError: no ptxas\n"
    assert cause_line(SubprocException(trace)) == "SubprocException: RuntimeError: no ptxas"
    assert cause_line(AssertionError()) == "AssertionError"
    assert cause_line(RuntimeError("one\ntwo")) == "RuntimeError: one"


def test_compile_auto_depends_on_step_count_and_is_kept(
    small: TrainConfig, stopped_config: TrainConfig
) -> None:
    """The number of steps of this start decides, not the length of the schedule."""
    run = checkpoints.load(Path(stopped_config.run.out))

    def resolved(config: TrainConfig, began_with: str, steps: int) -> str:
        start = None
        if began_with:
            start = replace(run, config=with_settings(run.config, compile=began_with), step=0)
        return with_compilation(config, start, end=steps).step.compile

    config = with_settings(small, compile="auto")
    assert resolved(config, "", 999) == "off"
    assert resolved(config, "", 1000) == "on"
    assert resolved(with_settings(config, compile="on"), "", 1) == "on"
    assert resolved(config, "on", 1) == "on"
    assert resolved(config, "off", 1000) == "off"
    assert resolved(with_settings(config, cuda_graphs=True), "off", 1000) == "on"
    assert resolved(with_settings(config, cuda_graphs=True), "off", 0) == "off"  # nothing to do
    assert resolved(with_settings(config, compile="off"), "on", 0) == "on"
