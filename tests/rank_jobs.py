"""Jobs for the ``ranks`` fixture: functions of (rank, world) that return tensors on the CPU.

They compute on the CPU and communicate with gloo. With ``RANKS_ON=cuda``, each rank computes on its
own GPU and communicates with NCCL.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastsiam.evaluate.knn
from fastsiam import cli
from fastsiam.config import (
    AugmentConfig,
    ModelConfig,
    NumericsConfig,
    OptimConfig,
    StepConfig,
    TrainConfig,
)
from fastsiam.config.evaluate import EvalConfig
from fastsiam.distributed import (
    Place,
    Signalled,
    StopSignals,
    bn_group,
    data_parallel,
    gather_uneven,
    mean_across_ranks,
    parallel,
    share_buffers,
)
from fastsiam.errors import DataError, FastSiamError, OtherRankError
from fastsiam.evaluate.knn import knn_accuracy
from fastsiam.evaluate.subject import autocast_of
from fastsiam.methods import Method, build_method
from fastsiam.model import batch_norm
from fastsiam.model.batch_norm import use_view_batch_norm
from fastsiam.model.numerics import with_resolved_precision
from fastsiam.pipelines.automatic import Choice
from fastsiam.pipelines.store import FolderStore
from fastsiam.train import resolve
from fastsiam.train.command import prepare_step
from fastsiam.train.step import TrainingStep
from fastsiam.views.batch import Batch
from tests.configs import TINY, RecordingConsole, make_resolved_config, with_settings
from tests.conftest import write_images
from tests.methods.variants import ALL_CASES
from tests.networks import short_resnet10

CONFIG = TrainConfig(
    augment=AugmentConfig.alike(crop=16),
    model=TINY,
    optim=OptimConfig(batch=16, lr=1.0),
    numerics=NumericsConfig(precision="fp32", tf32=False),
    step=StepConfig(compile="off"),
)


def here(rank: int, world: int) -> Place:
    on_gpu = os.environ.get("RANKS_ON") == "cuda"
    return Place(rank, world, torch.device("cuda", rank) if on_gpu else torch.device("cpu"))


def make_method(model: ModelConfig = TINY) -> Method:
    torch.manual_seed(0)
    return build_method(model)


def global_batch(images: Sequence[int] = range(16)) -> Batch:
    generator = torch.Generator().manual_seed(1)
    views = torch.randn(2, 16, 3, 16, 16, generator=generator)
    # Each sample has a different scale and mean, so statistics of half a batch would differ.
    views = views * torch.linspace(0.2, 3, 16).view(-1, 1, 1, 1) + torch.linspace(-2, 2, 16).view(
        -1, 1, 1, 1
    )
    order = torch.tensor(images)
    return Batch(views[:, order].unbind(0), order, torch.zeros(16, dtype=torch.int64))


def steps(
    rank: int,
    world: int,
    *,
    short: bool = False,
    images: Sequence[int] = range(16),
    **settings: Any,
) -> dict[str, Any]:
    """Take three optimizer steps on this rank's share; return the losses, gradients and state.

    Args:
        rank: This rank.
        world: Number of ranks.
        short: Whether to use a backbone that is quick to compile.
        images: Order of the global batch.
        settings: Settings of the run, by flag name.
    """
    place = here(rank, world)
    config = with_settings(CONFIG, **settings)
    with short_resnet10() if short else nullcontext():
        method = make_method(config.model)
    step = TrainingStep(config, method, place, steps_per_epoch=10)
    assert step.prepare().startswith("compiled") == (config.step.compile == "on")
    share = global_batch(images).chunks(world)[rank].to(place.device)
    gradients: list[Tensor] = []

    def note(*_: Any) -> None:
        parts = [p.grad.flatten() for p in method.parameters() if p.grad is not None]
        gradients.append(torch.cat(parts).to("cpu", copy=True))

    step.optimizer.register_step_pre_hook(note)
    losses = [step(share, at=0)[0] for _ in range(3)]
    state = {name: value.cpu() for name, value in method.state_dict().items()}
    return {"loss": torch.stack(losses).cpu(), "gradient": gradients, "state": state}


def variant(rank: int, world: int, name: str, **settings: Any) -> dict[str, Any]:
    """Take three steps (two per epoch) of a method variant; return the losses and the state.

    The backbone is short. If compiled, DDP's gradient buckets split it into several graphs.
    """
    config = ALL_CASES[name].applied(CONFIG, lr=0.1, **settings)
    torch.manual_seed(0)
    with short_resnet10():
        method = build_method(config.model, images=24)
    place = Place(rank, world, torch.device("cpu"))
    step = TrainingStep(config, method, place, steps_per_epoch=2)
    assert step.prepare().startswith("compiled") == (config.step.compile == "on")
    losses = []
    for at in range(3):
        batch = global_batch()
        first, second = (view.roll(at, 0) for view in batch.views)
        views = tuple(
            nn.functional.interpolate(view, scale_factor=1 / by)
            for view, by in zip(
                (first, second, 0.5 * first + second, first - second),
                ALL_CASES[name].smaller,
                strict=False,
            )
        )
        share = replace(batch, views=views, index=batch.index + 2 * at).chunks(world)[rank]
        losses.append(mean_across_ranks(step(share, at=at)[0]))
    return {"loss": torch.stack(losses), "state": method.state_dict()}


def variants(rank: int, world: int, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {name: variant(rank, world, name) for name in names}


def compiled_steps(rank: int, world: int, **settings: Any) -> dict[str, Any]:
    """Run ``steps`` with a compiled model, split into several graphs by DDP's gradient buckets."""
    from torch._dynamo.backends.distributed import DDPOptimizer

    cuts: list[int] = []
    compile_fn = DDPOptimizer.compile_fn

    def counting(self: Any, *arguments: Any, **settings: Any) -> Any:
        result = compile_fn(self, *arguments, **settings)
        cuts.append(len(self.buckets))
        return result

    DDPOptimizer.compile_fn = counting  # type: ignore[method-assign]
    results = steps(rank, world, compile="on", **settings)
    assert len(cuts) == 1 and cuts[0] > 1, cuts
    return results


def one_without_compiler(rank: int, world: int) -> dict[str, Any]:
    """Prepare and take a compiled step when the last rank has no compiler."""
    from torch._inductor import config as inductor

    if rank == world - 1:
        inductor.cpp.cxx = (None, "no-such-compiler")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    place = Place(rank, world, torch.device("cpu"))
    config = with_settings(CONFIG, compile="on")
    console = RecordingConsole()
    step = prepare_step(make_resolved_config(config, place), make_method(), console)[1]
    loss, _ = step(global_batch().chunks(world)[rank], at=0)
    (line,) = console.warnings
    return {"line": line, "compile": step.config.step.compile, "loss": loss}


def own_bn(rank: int, world: int) -> dict[str, Any]:
    """Run two passes with per-rank BN; return the buffers sent and values equal on all ranks."""
    place = here(rank, world)
    norm, layer = nn.BatchNorm1d(1, affine=False), nn.Linear(1, 1)
    module = nn.Sequential(norm, layer)
    for owner, name in ((module, "rows"), (layer, "average")):
        owner.register_buffer(name, torch.tensor(float(rank)))
    together = data_parallel(module.to(place.device), place, same_buffers=False)
    for _ in range(2):  # statistics are sent before a pass
        together(torch.tensor([[1.0 + rank], [3.0 + rank]], device=place.device)).sum().backward()
    assert norm.running_mean is not None
    ignored = set(together.parameters_to_ignore)  # type: ignore[arg-type]
    sent = [name for name, _ in module.named_buffers() if name not in ignored]
    contribution = rank * 0.1  # this rank's contribution from the second pass
    left = {name: module.get_buffer(name).item() for name in ("rows", "1.average")}
    return {"sent": sent, "mean": norm.running_mean.cpu() - contribution, **left}


def groups(rank: int, world: int) -> Tensor:
    """Return the BN mean that this rank's group computes together."""
    config, place = NumericsConfig(sync_bn_ranks=2), here(rank, world)
    layer = nn.BatchNorm1d(1, momentum=1.0, device=place.device)
    use_view_batch_norm(layer, group=bn_group(place, config))
    layer(torch.tensor([[float(rank)], [float(rank)]], device=place.device))
    assert layer.running_mean is not None
    return layer.running_mean.cpu()


def knn(rank: int, world: int) -> tuple[list[dict[str, float]], list[float]]:
    """Classify with bank and queries split unevenly across ranks, in blocks of 64 rows.

    Returns:
        The results, and a BN's running means, initially its rank, after ``share_buffers``.
    """
    fastsiam.evaluate.knn._BLOCK = 64
    bank, bank_labels, queries, labels = knn_problem()
    bank_parts = torch.arange(len(bank)).tensor_split(world)[rank].split(50)
    query_part = torch.arange(len(queries)).tensor_split(world)[rank]
    results = knn_accuracy(
        ((bank[part], bank_labels[part]) for part in bank_parts),
        queries[query_part],
        labels[query_part],
        votes=VOTES,
        classes=7,
    )
    norm = nn.BatchNorm1d(2)
    torch.nn.init.constant_(norm.running_mean, rank)  # type: ignore[arg-type]
    share_buffers(norm, Place(rank, world, torch.device("cpu")))
    return [one.record() for one in results], norm.running_mean.tolist()  # type: ignore[union-attr]


VOTES = [(20, 0.2), (1, 0.07), (403, 0.1)]


def knn_problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(7, 24, generator=generator)
    bank_labels = torch.randint(0, 7, (403,), generator=generator)
    labels = torch.randint(0, 7, (101,), generator=generator)
    bank = centres[bank_labels] + 2.5 * torch.randn(403, 24, generator=generator)
    queries = centres[labels] + 2.5 * torch.randn(101, 24, generator=generator)
    return bank, bank_labels, queries, labels


def uneven(rank: int, world: int) -> Tensor:
    """Gather tensors of lengths 0, 3, 6, ..."""
    device = here(rank, world).device
    return gather_uneven(torch.full((3 * rank, 2), float(rank), device=device)).cpu()


def items(rank: int, world: int, *, error: Exception | None = None) -> Iterator[int]:
    """Yield 20 items; before item 3 of the last rank, raise ``error``, or else get a SIGTERM."""
    for item in range(20):
        if rank == world - 1 and item == 3:
            if error:
                raise error
            os.kill(os.getpid(), signal.SIGTERM)
        yield item


def stop(rank: int, world: int) -> list[int]:
    """Send SIGTERM to the last rank at item 3; return the items taken and the signal."""
    items_taken: list[int] = []
    with StopSignals(here(rank, world)) as signals:
        try:
            items_taken.extend(signals.over(items(rank, world)))
        except Signalled as signalled:
            items_taken.append(signalled.number)
    return items_taken


def fail(rank: int, world: int) -> tuple[list[int], str, float]:
    """Raise at item 3 of the last rank, which takes a second to close.

    Returns:
        The items taken, the error, and the time at which this rank exits.
    """
    items_taken: list[int] = []
    message = ""
    with StopSignals(here(rank, world)) as signals:
        try:
            for item in signals.over(items(rank, world, error=DataError("a broken image"))):
                items_taken.append(item)
        except FastSiamError as error:
            assert signals.is_known_to_all(error)
            signals.meet()
            message = f"{type(error).__name__}: {error}"
            if isinstance(error, OtherRankError):
                with patch.object(cli, "app", side_effect=error), suppress(SystemExit):
                    cli._run()
            else:
                time.sleep(1)
    return items_taken, message, time.monotonic()


def shares(rank: int, world: int) -> list[int]:
    """Iterate over r items on rank r; return the items taken."""
    with StopSignals(here(rank, world)) as signals:
        return list(signals.over(range(rank)))


def pipelines(rank: int, world: int) -> tuple[str, str, float]:
    """Choose a pipeline when ranks disagree; return the pipeline, its log line and free memory."""
    arguments = {"free": 0.0}

    def choose(*_: object, free: float, **__: object) -> Choice:
        arguments["free"] = free
        return Choice("ffcv" if rank == 0 else "dali", f"of rank {rank}")

    free = 1000 if rank == 1 else 2000
    vars(resolve).update(choose_pipeline=choose, free_bytes=lambda device: free)
    with tempfile.TemporaryDirectory() as folder:
        store = FolderStore(write_images(Path(folder)))
    config, line = resolve.with_pipeline(CONFIG, here(rank, world), store, None)
    return config.data.pipeline, line, arguments["free"]


def precisions(rank: int, world: int) -> list[str]:
    """Resolve precision "auto" for training and evaluation when only rank 0 has AMX."""
    vars(torch.cpu)["_is_amx_tile_supported"] = lambda: rank == 0
    place, auto = here(rank, world), with_settings(CONFIG, precision="auto")
    trained = with_resolved_precision(auto, place.device).numerics.precision
    return [trained, str(autocast_of(EvalConfig(), TrainConfig(), place))]


def count_step_exchanges(rank: int, world: int) -> tuple[int, int, int]:
    """Return a step's number of BN gathers, their bytes from other ranks, and gradient bytes."""
    gathered: list[int] = []
    layers: Any = batch_norm
    gather = layers.gather_with_gradient

    def record_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        gathered.append(tensor.numel() * tensor.element_size() * (world - 1))
        all_of_it: Tensor = gather(tensor, group)
        return all_of_it

    place = here(rank, world)
    step = TrainingStep(CONFIG, make_method(), place, steps_per_epoch=10)
    step.prepare()
    share = global_batch().chunks(world)[rank]
    layers.gather_with_gradient = record_gather
    step(share, at=0)
    together: Any = step._model
    data = together._get_ddp_logging_data()
    return len(gathered), sum(gathered), data["total_parameter_size_bytes"]


def main(job: str, world: int, settings: dict[str, Any], folder: Path, rank: int) -> None:
    """Run a job as one rank: rendezvous in ``folder`` and save the result there."""
    torch.set_num_threads(1)
    parallel._BUCKET_MB = 1  # gives small networks several gradient buckets
    device = here(rank, world).device
    on_gpu: dict[str, Any] = {"backend": "cuda:nccl,cpu:gloo", "device_id": device}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        **on_gpu if device.type == "cuda" else {"backend": "gloo"},
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=world,
    )
    torch.save(globals()[job](rank, world, **settings), folder / f"{rank}.pt")
    dist.destroy_process_group()
