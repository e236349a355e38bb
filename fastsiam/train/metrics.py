"""The metrics of a run's steps: spread and effective rank of the embeddings, and the log lines."""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastsiam.distributed import gather, mean_across_ranks, sum_across_ranks
from fastsiam.run.checkpoint import Checkpoint
from fastsiam.run.log import MetricsLog, initial_spread
from fastsiam.run.run_folder import RunFolder
from fastsiam.run.trackers import Outcome
from fastsiam.train.clock import Clock
from fastsiam.train.gauges import MachineMonitor
from fastsiam.train.guard import CollapseGuard
from fastsiam.train.step import TrainingStep
from fastsiam.views.batch import Batch, Loader
from fastsiam.views.digest import hex_digest, sum_digests

_RANK_ROWS = 1024
_HALF = 32


def z_std(z: Tensor) -> Tensor:
    """Measure the spread of projections (section 4.1 of the SimSiam paper).

    Args:
        z: (N, d) projections of the global batch.

    Returns:
        Scalar: standard deviation of each channel of the l2-normalised z, averaged over channels,
        times sqrt(d). It is 1 if z is spread over the sphere and 0 if z collapsed to one point.
    """
    z = F.normalize(z.float(), dim=1)
    return z.std(0, unbiased=False).mean() * math.sqrt(z.shape[1])


def gram(z: Tensor) -> Tensor:
    """Return the Gram matrix of the l2-normalised rows, or of the columns if those are fewer.

    Args:
        z: (N, d) projections; only the first 1024 rows are used.

    Returns:
        (n, n) float32 on the device of z, with n = min(N, 1024, d); input of ``rank_of_gram``.
    """
    z = F.normalize(z[:_RANK_ROWS].float(), dim=1)
    return z @ z.T if z.shape[0] < z.shape[1] else z.T @ z


def rank_of_gram(gram: Tensor) -> Tensor:
    """Compute the effective rank of projections; detects dimensional collapse, unlike ``z_std``.

    Args:
        gram: (n, n) float32, the result of ``gram``.

    Returns:
        float64 scalar: exp of the entropy of the normalised singular values of the l2-normalised
        projections (Roy and Vetterli 2007; RankMe, Garrido et al. 2023); between 1 and n.
    """
    singular = torch.linalg.eigvalsh(gram.double()).clamp(min=0).sqrt()
    share = singular / singular.sum().clamp(min=1e-30)
    return torch.exp(-torch.xlogy(share, share).sum())


def host_is_idle(device: torch.device) -> bool:
    """Return whether the host is free for other work while the device trains."""
    return device.type == "cuda"


class StepMetrics:
    """Metrics of a run's steps. Every rank creates one and calls the same methods.

    On a GPU a host thread computes the effective rank of the embeddings while training continues.
    The log line is then written a few steps later: at the first step after the thread is done, or
    by ``settle``. On a CPU the line is written immediately.

    Args:
        step: the training step.
        loader: the loader of the batches.
        clock: the clock of the steps.
        folder: the run's folder; its console shows the progress.
        start: checkpoint to resume from.
        end: number of steps after which the run ends.
    """

    def __init__(
        self,
        step: TrainingStep,
        loader: Loader,
        clock: Clock,
        *,
        folder: RunFolder,
        start: Checkpoint | None,
        end: int,
    ) -> None:
        config, place = step.config, step.place
        self._step, self._loader, self._clock, self._end = step, loader, clock, end
        self._console = folder.console
        self.digest = DataDigest(start)
        self.line: tuple[dict[str, Any], Future[Tensor]] | None = None
        """Pending log line and the future of its effective rank; None without a pending line."""
        self._log: MetricsLog | None = None
        self._machine_monitor: MachineMonitor | None = None
        if place.is_leader:
            self._log = MetricsLog(
                folder,
                step=0 if start is None else start.step,
                steps_per_epoch=step.steps_per_epoch,
                trackers=config.run.trackers,
                settings=config.to_flags(),
            )
            self._machine_monitor = MachineMonitor(self._log, console=self._console)
        spread = initial_spread(folder.path)
        if spread is None and start is not None and "run" in start.branch:
            spread = initial_spread(Path(start.branch["run"]))
            if spread is not None:  # a branch keeps its own copy, because its parent may be deleted
                self._write_initial(spread)
        self._guard = CollapseGuard(
            config.monitor.on_collapse,
            batch=config.optim.micro_batch(ranks=1),
            dim=step.method.dim,
            centred=config.model.method.centred,
            first=spread,
        )
        stops = config.monitor.on_collapse == "stop"
        self._checks_collapse = place.is_leader or stops
        self._thread = (
            ThreadPoolExecutor(1, "fastsiam-rank") if host_is_idle(place.device) else None
        )
        # All ranks must stop at the same step, so it must not depend on the thread's timing.
        self._can_settle_in_step = place.world == 1 or not stops

    def write(self, kind: str, values: dict[str, Any]) -> None:
        """Write a log line; on rank 0 only."""
        if self._log:
            self._log.write(kind, values)

    def sync(self) -> None:
        """Synchronise the log to the disk; on rank 0 only."""
        if self._log:
            self._log.sync()

    def start_is_evaluated(self) -> bool:
        """Return on all ranks whether rank 0's log has the evaluation of the resumed checkpoint."""
        has_line = self._log is not None and self._log.is_evaluated
        return bool(sum_across_ranks(torch.tensor(int(has_line))).item())

    def close(self, outcome: Outcome) -> None:
        """Write the pending log line, without the collapse check; close the thread and the log."""
        try:
            if self.line:
                values, rank = self.line
                self._finish_line(values, rank.result())
        finally:
            if self._thread:
                self._thread.shutdown()
            if self._log:
                self._log.close(outcome)

    def note(self, done: int, batch: Batch, embedding: Tensor) -> None:
        """Record the result of a step, which ``done`` steps precede.

        Only the first step of a run waits for the device.

        Raises:
            TrainingError: as ``settle``.
        """
        if done == 0:  # the guard compares later values with the untrained network's
            spread = z_std(gather(embedding)).item()
            if math.isfinite(spread):  # otherwise the first check of the loss ends the run
                self._guard.first = spread
                self._write_initial(spread)
        self.digest.add(batch.digest)
        if self._can_settle_in_step and self.line and self.line[1].done():
            self.settle()

    def _write_initial(self, spread: float) -> None:
        self.write("initial", {"step": 0, "epoch": 0.0, "z_std": spread})

    def log(self, done: int, loss: Tensor, embedding: Tensor) -> None:
        """Log the metrics of step ``done``, from 1, and pause the clock; waits for the device.

        Raises:
            TrainingError: as ``settle``.
        """
        self.settle()
        self.digest.share()
        z = gather(embedding)
        # The host waits only once: when the two numbers arrive, the earlier copy is complete.
        products = gram(z).to("cpu", non_blocking=True)
        numbers = torch.stack([mean_across_ranks(loss).double(), z_std(z).double()])
        mean, spread = numbers.tolist()
        self._clock.pause()
        values = {
            "step": done,
            "epoch": done / self._step.steps_per_epoch,
            "loss": mean,
            "z_std": spread,
            "rank": math.nan,  # set when the line is written
            "lr": self._step.lr,
            **self._clock.read(self._step.config.optim.batch),
            **self.digest.line(done),
        }
        if (workers := getattr(self._loader, "tuned_workers", None)) is not None:
            values["workers"] = workers
        if not self._checks_collapse:
            return
        if self._thread:
            self.line = values, self._thread.submit(rank_of_gram, products)
        else:
            self._finish_line(values, rank_of_gram(products))
            self._check_collapse(values)

    def settle(self) -> None:
        """Write and print the pending log line, if any; waits for its effective rank.

        Call this before every checkpoint, so that the log of a resumed run has no gap.

        Raises:
            TrainingError: the representation collapsed, and ``on_collapse`` is "stop".
        """
        if self.line:
            (values, rank), self.line = self.line, None
            self._finish_line(values, rank.result())
            self._check_collapse(values)

    def _finish_line(self, values: dict[str, Any], rank: Tensor) -> None:
        values["rank"] = rank.item()
        self.write("train", values)
        batch, remaining = self._step.config.optim.batch, self._end - values["step"]
        self._console.show(values, remaining=remaining, batch=batch)
        if self._machine_monitor:
            self._machine_monitor.check(values)

    def _check_collapse(self, values: dict[str, Any]) -> None:
        if warning := self._guard.check(values["step"], values["z_std"], values["rank"]):
            self._console.warn(warning)


class DataDigest:
    """Digest of the images and augmentations since a run's last log line, over all ranks.

    Each rank adds its own batches; ``share`` sums over the ranks. All computation is on the host.

    Args:
        start: checkpoint to resume from, with the digest of the steps since its last log line.
    """

    def __init__(self, start: Checkpoint | None) -> None:
        state = {} if start is None else start.seen
        self._local = 0
        self._since = int(state.get("since", 0 if start is None else start.step))
        self._total = int(state.get("digest", "0"), 16)

    def add(self, digest: int) -> None:
        """Add this rank's part of a step's batch."""
        self._local = sum_digests(self._local, digest)

    def share(self) -> None:
        """Sum the digests added since the last call over the ranks; every rank must call this."""
        # In halves, because a sum of 64-bit digests overflows every type that gloo can sum. On the
        # host, to avoid waiting for the device.
        halves = torch.tensor([self._local >> _HALF, self._local % (1 << _HALF)])
        high, low = sum_across_ranks(halves).tolist()
        self._total, self._local = sum_digests(self._total, high << _HALF, low), 0

    def line(self, done: int) -> dict[str, Any]:
        """Return the digest's fields for the log line at step ``done``, and start a new sum.

        Returns:
            ``since``, the number of steps before the first one in the digest;
            ``seen``, the digest as 16 hexadecimal digits.
        """
        fields = {"since": self._since, "seen": hex_digest(self._total)}
        self._since, self._total = done, 0
        return fields

    def state(self) -> dict[str, Any]:
        """Return the sum since the last log line, for a checkpoint; call ``share`` first."""
        assert not self._local
        return {"since": self._since, "digest": hex_digest(self._total)}
