"""What the ranks of the tests run: functions of (rank, world) that return tensors."""

from __future__ import annotations

import copy
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastsiam.batch import TwoViewBatch
from fastsiam.config import ModelConfig, NumericsConfig, OptimConfig, TrainConfig
from fastsiam.distributed import (
    CpuSyncBatchNorm,
    Place,
    StopSignals,
    distribute,
    gather_uneven,
    to_cpu_sync_bn,
)
from fastsiam.evaluate.knn import knn_accuracy
from fastsiam.methods import SimSiam, build_method
from fastsiam.optim import build_optimizer
from fastsiam.train import train_step

MODEL = ModelConfig(
    backbone="resnet10", stem="cifar", width=4, projector_layers=2, dim=16, predictor_dim=4
)
CONFIG = TrainConfig(
    model=MODEL, optim=OptimConfig(batch=16, lr=1.0), numerics=NumericsConfig(precision="fp32")
)


def make_method() -> SimSiam:
    torch.manual_seed(0)
    return build_method(MODEL)


def global_batch() -> TwoViewBatch:
    generator = torch.Generator().manual_seed(1)
    views = torch.randn(2, 16, 3, 16, 16, generator=generator)
    # Every sample has its own scale and mean: statistics of half a batch would give another result.
    views = views * torch.linspace(0.2, 3, 16).view(-1, 1, 1, 1) + torch.linspace(-2, 2, 16).view(
        -1, 1, 1, 1
    )
    return TwoViewBatch(views[0], views[1], torch.arange(16), torch.zeros(16, dtype=torch.int64))


def steps(rank: int, world: int, accumulate: int = 1) -> dict[str, Any]:
    """Take three optimizer steps on this rank's share; return the losses, gradients and state."""
    place = Place(rank, world, torch.device("cpu"))
    config = TrainConfig(
        model=MODEL,
        optim=OptimConfig(batch=16, lr=1.0, accumulate=accumulate),
        numerics=NumericsConfig(precision="fp32"),
    )
    method = make_method()
    model = distribute(method, place, sync_bn=True)
    optimizer = build_optimizer(config.optim, method.param_groups())
    share = global_batch().chunks(world)[rank]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    gradients: list[Tensor] = []

    def note(*_: Any) -> None:
        parts = [p.grad.flatten() for p in method.parameters() if p.grad is not None]
        gradients.append(torch.cat(parts).clone())

    optimizer.register_step_pre_hook(note)
    losses = [train_step(model, share, optimizer, scaler, config, place)[0] for _ in range(3)]
    return {"loss": torch.stack(losses), "gradient": gradients, "state": method.state_dict()}


def sync_bn(rank: int, world: int) -> dict[str, Any]:
    """Run ``CpuSyncBatchNorm`` on this rank's share: forward, backward, evaluation."""
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(3)
    nn.init.normal_(plain.weight)
    nn.init.normal_(plain.bias)
    joint, target = torch.randn(8, 3, 5, 5) * 4 + 7, torch.randn(8, 3, 5, 5)
    layer = to_cpu_sync_bn(copy.deepcopy(plain))
    assert isinstance(layer, CpuSyncBatchNorm)
    share = joint.chunk(world)[rank].clone().requires_grad_()
    out = layer(share)
    (out * target.chunk(world)[rank]).sum().backward()
    layer.eval()
    return {
        "out": out.detach(),
        "input_gradient": share.grad,
        "weight_gradient": layer.weight.grad,
        "mean": layer.running_mean,
        "var": layer.running_var,
        "evaluated": layer(joint).detach(),
    }


def knn(rank: int, world: int) -> dict[str, float]:
    """Classify with bank and queries cut into uneven shares."""
    bank, bank_labels, queries, labels = knn_problem()
    cuts = (
        torch.arange(len(bank)).tensor_split(world)[rank],
        torch.arange(len(queries)).tensor_split(world)[rank],
    )
    result = knn_accuracy(
        bank[cuts[0]],
        bank_labels[cuts[0]],
        queries[cuts[1]],
        labels[cuts[1]],
        k=20,
        temperature=0.2,
    )
    return {**result.record()}


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
    return gather_uneven(torch.full((3 * rank, 2), float(rank)))


def stop(rank: int, world: int) -> list[int]:
    """Signal the last rank alone after its third step; return each step's verdict."""
    verdicts = []
    with StopSignals(Place(rank, world, torch.device("cpu"))) as signals:
        for step in range(20):
            if rank == world - 1 and step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            verdicts.append(signals.after_step())
            if verdicts[-1]:
                break
    return verdicts


def main(job: str, world: str, folder: str, rank: str) -> None:
    """Be one rank: meet the others in ``folder``, run the job, leave its result there."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=int(rank), world_size=int(world)
    )
    torch.save(globals()[job](int(rank), int(world)), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
