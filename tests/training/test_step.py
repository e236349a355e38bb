"""The training step: whatever makes it fast leaves its results as they are."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fastsiam import checkpoint as checkpoints
from fastsiam.config import StepConfig, TrainConfig
from fastsiam.distributed import Place
from fastsiam.evaluate.features import collected, feature_batches
from fastsiam.jobs.train import preflight
from fastsiam.methods import Output, build_method
from fastsiam.model.batch_norm import ViewBatchNorm, recomputing, use_view_batch_norm
from fastsiam.training.compile import with_settled_compilation
from fastsiam.training.numerics import autocast_type
from fastsiam.training.step import TrainingStep
from fastsiam.views.batch import Batch, EvalBatch
from tests import rank_jobs
from tests.configs import flags, model_of, with_settings
from tests.conftest import ROOT
from tests.processes import fastsiam

CPU = Place(0, 1, torch.device("cpu"))


def bn(kind: Any = nn.BatchNorm2d, **settings: Any) -> Any:
    torch.manual_seed(0)
    layer = kind(6, **settings)
    if layer.weight is not None:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "shape", "settings"),
    [
        (nn.BatchNorm2d, (16, 6, 5, 7), {}),
        (nn.BatchNorm1d, (16, 6), {}),
        (nn.BatchNorm1d, (16, 6), {"affine": False}),
    ],
)
def test_views_in_one_batch_are_normalised_each_by_itself(
    kind: type[nn.Module], shape: tuple[int, ...], settings: dict[str, Any], dtype: torch.dtype
) -> None:
    """Against torch's BN, called for each view in turn: output, gradients, running statistics."""
    reference, layer = bn(kind, **settings), bn(kind, **settings)
    use_view_batch_norm(layer, images=8)
    assert isinstance(layer, ViewBatchNorm)
    x = torch.randn(shape) * torch.linspace(0.2, 5, 16).view(-1, *[1] * (len(shape) - 1)) + 3
    x, weight = x.to(dtype), torch.randn(shape)
    if len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    outs = layer(ours), torch.cat([reference(view) for view in theirs.chunk(2)])
    for out in outs:
        (out.float() * weight).sum().backward()
    exact = dtype == torch.float32
    close: Any = {"atol": 1e-4, "rtol": 1e-4} if exact else {"atol": 0.1, "rtol": 0.02}
    torch.testing.assert_close(*outs, **close)
    torch.testing.assert_close(ours.grad, theirs.grad, **close)
    if layer.weight is not None:
        torch.testing.assert_close(layer.weight.grad, reference.weight.grad, **close)
        torch.testing.assert_close(layer.bias.grad, reference.bias.grad, **close)
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(layer.get_buffer(name), buffer, atol=1e-5, rtol=1e-5)
    assert layer.state_dict().keys() == reference.state_dict().keys()
    if len(shape) == 4:
        assert outs[0].is_contiguous(memory_format=torch.channels_last)
        assert ours.grad is not None
        assert ours.grad.is_contiguous(memory_format=torch.channels_last)


def test_one_view_alone_is_torchs_batch_norm_to_the_last_bit() -> None:
    reference, layer = bn(), bn()
    use_view_batch_norm(layer)
    x = torch.randn(8, 6, 5, 5)
    for training in (True, False):
        reference.train(training)
        layer.train(training)
        assert torch.equal(layer(x), reference(x))
        assert all(map(torch.equal, layer.buffers(), reference.buffers()))


def test_recomputing_moves_no_statistics() -> None:
    for images in (0, 4):
        layer = bn()
        use_view_batch_norm(layer, images=images)
        before = [buffer.clone() for buffer in layer.buffers()]
        with recomputing():
            again = layer(torch.randn(8, 6, 5, 5, generator=torch.Generator().manual_seed(0)))
        assert all(map(torch.equal, layer.buffers(), before))
        first = layer(torch.randn(8, 6, 5, 5, generator=torch.Generator().manual_seed(0)))
        assert torch.equal(again, first) and not torch.equal(layer.running_mean, before[0])


def results(**settings: Any) -> dict[str, Any]:
    return rank_jobs.steps(0, 1, **settings)


def assert_same(one: dict[str, Any], other: dict[str, Any], *, tolerance: float = 0.0) -> None:
    for name in ("loss", "gradient", "state"):
        torch.testing.assert_close(one[name], other[name], atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return results()


@pytest.mark.parametrize(
    "settings",
    [{}, {"batch_views": False}, {"activation_memory": 0.3}, {"accumulate": 2}],
    ids=str,
)
def test_a_compiled_step_is_the_same_step(settings: dict[str, Any], plain: dict[str, Any]) -> None:
    """Losses, gradients, weights and BN statistics of three steps, in float32."""
    eager = results(accumulate=2) if "accumulate" in settings else plain
    assert_same(results(compile="on", **settings), eager, tolerance=1e-4)


def test_recomputed_blocks_give_the_same_step(plain: dict[str, Any]) -> None:
    assert_same(results(activation_memory=0.5), plain)


def saved_bytes(**settings: Any) -> int:
    config = with_settings(rank_jobs.CONFIG, **settings)
    method = rank_jobs.make_method()
    TrainingStep(config, method, CPU, steps_per_epoch=10).prepare()
    total = 0

    def note(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    batch = rank_jobs.global_batch()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        method(batch.views, batch.index)
    return total


def test_recomputing_saves_memory() -> None:
    assert saved_bytes(activation_memory=0.5) < 0.5 * saved_bytes()


def losses(config: TrainConfig, steps: int) -> list[float]:
    step = TrainingStep(config, rank_jobs.make_method(), CPU, steps_per_epoch=steps)
    step.prepare()
    assert step.config == config
    batch = rank_jobs.global_batch()
    dtype = autocast_type(config.numerics.precision, CPU.device)
    batch = replace(batch, views=tuple(view.to(dtype) for view in batch.views))
    return [step(batch, at=i)[0].item() for i in range(steps)]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.1)])
def test_fifty_compiled_steps_learn_as_eager_ones(precision: str, tolerance: float) -> None:
    """The loss of each of 50 steps, down to -.7, is the same within the tolerance.

    In bfloat16 that is what this little network (BN over 16 images) makes of rounding: its eager
    curve lies up to .04 from float32's.
    """
    config = with_settings(rank_jobs.CONFIG, precision=precision, lr=0.3)
    compiled = losses(with_settings(config, compile="on"), 50)
    eager = losses(config, 50)
    assert eager[0] - eager[-1] > 0.6, "it learns nothing that could differ"
    assert np.abs(np.subtract(compiled, eager)).max() < tolerance


@pytest.mark.parametrize("backbone", ["resnet18", "resnet50"])
@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
def test_the_model_has_no_graph_break(backbone: Any, stem: Any) -> None:
    method = build_method(model_of(backbone=backbone, stem=stem, width=4, dim=8))
    method.views_together = True
    use_view_batch_norm(method, images=2)
    torch._dynamo.reset()
    views = torch.randn(2, 2, 3, 33, 33).unbind(0)
    explained = torch._dynamo.explain(method)(views, torch.arange(2))
    assert explained.graph_break_count == 0 and explained.graph_count == 1


def test_compiled_bn_keeps_channels_last() -> None:
    """No kernel of a convolution, BN, ReLU, convolution turns a layout round."""
    from torch._inductor.utils import run_fw_bw_and_get_code

    layers = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
    ).to(memory_format=torch.channels_last)
    use_view_batch_norm(layers, images=8)
    x = torch.randn(16, 16, 14, 14, dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    torch._dynamo.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, code = run_fw_bw_and_get_code(lambda: torch.compile(layers, fullgraph=True)(x))
    assert len(code) == 2 and all("cpp_fused" in part for part in code)
    assert not any("transpose_mxn" in part for part in code)
    assert x.grad is not None and x.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("channels_last", [True, False])
def test_steps_compile_nothing_that_was_not_prepared(channels_last: bool) -> None:
    config = with_settings(rank_jobs.CONFIG, compile="on", channels_last=channels_last)
    step = TrainingStep(config, rank_jobs.make_method(), CPU, steps_per_epoch=2)
    assert "compiled in" in step.prepare()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(2):
            step(rank_jobs.global_batch(), at=i)


def test_a_compiled_model_evaluates_batches_of_any_size() -> None:
    config = with_settings(rank_jobs.CONFIG, compile="on")
    step = TrainingStep(config, rank_jobs.make_method(), CPU, steps_per_epoch=2)
    step.prepare()
    images = torch.randn(3, 3, 16, 16)
    sizes: list[Any] = [[images], [images[:1], images[1:]]]
    whole, parts = (
        collected(
            feature_batches(
                step.method.backbone,
                [EvalBatch(part, *torch.zeros(2, len(part)).long()) for part in size],
            )
        )[0]
        for size in sizes
    )
    torch.testing.assert_close(whole, parts)


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_compiling_leaves_no_trace(cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do the passes that CUDA graphs take to be recorded, on noise and not on zeros."""
    config = with_settings(rank_jobs.CONFIG, compile="on", cuda_graphs=cuda_graphs)
    method = rank_jobs.make_method()
    before = {name: value.clone() for name, value in method.state_dict().items()}
    generator, forward = torch.get_rng_state(), TrainingStep._forward
    seen: list[Tensor] = []

    def noting(step: TrainingStep, batch: Batch) -> Output:
        seen.extend(batch.views)
        return forward(step, batch)

    monkeypatch.setattr(TrainingStep, "_forward", noting)
    line = TrainingStep(config, method, CPU, steps_per_epoch=2).prepare()
    assert line.startswith("compiled in")
    assert len(seen) == 2 * (3 if cuda_graphs else 1)
    assert all(view.std() == pytest.approx(1, abs=0.1) for view in seen)
    assert torch.equal(torch.get_rng_state(), generator)
    torch.testing.assert_close(dict(method.state_dict()), before, atol=0, rtol=0)
    assert all(parameter.grad is None for parameter in method.parameters())


def test_a_compiled_run_is_resumed_bit_for_bit_and_keeps_what_it_compiled(
    small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    config = with_settings(small, knn_every=0, compile="on")
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    done = fastsiam("train", *flags(with_settings(config, out=str(whole))))
    assert "compiled in" in done.stderr
    compiled = sorted(cache.rglob("*.so"))
    assert compiled
    fastsiam("train", *flags(with_settings(config, out=str(halves), max_steps=5)))
    # "auto" of a run this short would not compile, but goes on as the run began.
    fastsiam("train", *flags(with_settings(config, out=str(halves), compile="auto")))
    assert sorted(cache.rglob("*.so")) == compiled
    states = [checkpoints.load(run) for run in (whole, halves)]
    assert states[0].step == states[1].step == 12
    torch.testing.assert_close(states[0].model, states[1].model, atol=0, rtol=0)


@pytest.mark.parametrize("kept", [True, False])
def test_kept_memory_is_not_handed_out_anew(kept: bool) -> None:
    """Page faults of the tenth large tensor: none if the memory of the ninth was kept."""
    script = (
        "import resource, torch\n"
        "from fastsiam.training.numerics import keep_freed_memory\n"
        f"{'keep_freed_memory()' if kept else ''}\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "def work():\n    torch.empty(2**26, dtype=torch.uint8).fill_(1)\n"
        "for _ in range(9): work()\n"
        "before = faults(); work(); print(faults() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert (int(done.stdout) < 100) == kept, done.stdout  # the tensor has 16,384 pages


def test_what_is_compiled_is_kept_beyond_tmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "from fastsiam.training.compile import compiling, kept_in\n"
        "from tests.rank_jobs import CONFIG\n"
        "with compiling(CONFIG): print(kept_in())"
    )

    def folder() -> str:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
        return done.stdout.strip()

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert folder() == str(tmp_path / ".cache" / "fastsiam" / "torchinductor")
    monkeypatch.setenv("HOME", "/proc")  # where nobody can write
    assert "fastsiam" not in folder()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    assert folder() == str(tmp_path / "own")


def test_without_cuda_graphs_the_step_stays_compiled(
    small: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording may fail where compiling does not; an error of the device itself comes out."""
    config = with_settings(small, compile="on", cuda_graphs=True)
    tried: list[bool] = []
    error: Exception = RuntimeError("this cannot be recorded")

    def take(self: TrainingStep, count: int) -> None:
        tried.append(self.config.step.cuda_graphs)
        if tried[-1]:
            raise error

    monkeypatch.setattr(TrainingStep, "_take_no_steps", take)
    monkeypatch.setattr("fastsiam.training.step.why_not", lambda _: "")
    step = TrainingStep(config, build_method(config.model), CPU, steps_per_epoch=3)
    line = step.prepare()
    assert "graphs cannot be recorded here (RuntimeError: this cannot" in line, line
    assert "compiled in" in line and tried == [True, False]
    assert step.config.step.compile == "on" and not step.config.step.cuda_graphs
    error = torch.AcceleratorError("CUDA error: an illegal memory access")
    with pytest.raises(torch.AcceleratorError):
        TrainingStep(config, build_method(config.model), CPU, steps_per_epoch=3).prepare()


def test_a_missing_compiler_is_one_line(
    small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on without it, and gives what an eager run gives."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = with_settings(small, knn_every=0)
    eager, fallen = tmp_path / "eager", tmp_path / "fallen"
    fastsiam("train", *flags(with_settings(config, out=str(eager))))
    done = fastsiam("train", *flags(with_settings(config, out=str(fallen), compile="on")))
    lines = [line for line in done.stderr.splitlines() if "torch.compile" in line]
    assert len(lines) == 1 and "torch.compile cannot be used here (" in lines[0], done.stderr
    assert "Traceback" not in done.stderr
    states = [checkpoints.load(run) for run in (eager, fallen)]
    torch.testing.assert_close(states[0].model, states[1].model, atol=0, rtol=0)
    assert states[1].config.step.compile == "off"  # it would not go on as it began otherwise
    written = json.loads((fallen / "config.json").read_text())["config"]
    assert TrainConfig.from_dict(written) == states[1].config


def test_auto_compiles_long_runs_and_goes_on_as_the_run_began(small: TrainConfig) -> None:
    def settled(config: TrainConfig, began_with: Any, steps: int) -> str:
        found = with_settled_compilation(config, began_with=began_with, steps_per_epoch=steps)
        return found.step.compile

    config = with_settings(small, compile="auto", epochs=10)
    assert settled(config, None, 99) == "off"
    assert settled(config, None, 100) == "on"
    assert settled(with_settings(config, max_steps=20), None, 100) == "on"
    assert settled(with_settings(config, compile="on"), None, 1) == "on"
    assert settled(config, "on", 1) == "on"
    assert settled(config, "off", 1000) == "off"
    assert settled(with_settings(config, cuda_graphs=True), "off", 1000) == "on"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compile": "yes"}, "compile must be auto, on or off"),
        ({"activation_memory": 1.5}, "activation-memory is a share"),
        ({"bucket_mb": 0}, "bucket-mb"),
        ({"compile": "off", "cuda_graphs": True}, "cuda-graphs needs"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepConfig(**settings)


def test_what_cannot_work_is_refused_before_anything_starts(small: TrainConfig) -> None:
    from fastsiam.errors import DeviceError

    with pytest.raises(ValueError, match="cuda-graphs does not go with accumulate"):
        replace(
            small,
            optim=replace(small.optim, accumulate=2),
            step=StepConfig(compile="on", cuda_graphs=True),
        )
    with pytest.raises(DeviceError, match="--cuda-graphs works on one GPU"):
        preflight(with_settings(small, compile="on", cuda_graphs=True), world=1)
    with pytest.raises(ValueError, match="2 ranks cannot be cut into groups of 3"):
        preflight(with_settings(small, sync_bn_ranks=3), world=2)
