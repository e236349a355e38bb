"""The training step: forward, backward and optimizer on one rank's share of a batch.

Precision, memory format, compilation and the number of ranks determine its speed. They change
results only by rounding. docs/performance.md has the speedup of each.
"""

from __future__ import annotations

import contextlib
import os
import textwrap
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastsiam.config import TrainConfig
from fastsiam.distributed import Place, bn_group, data_parallel, peer_is_gone
from fastsiam.errors import BackendError, CheckpointError, lacks_gpu_memory
from fastsiam.methods import Method, Moment, Output, image_rows
from fastsiam.methods.optim import SETTINGS, build_optimizer, rates_at
from fastsiam.model.batch_norm import use_view_batch_norm
from fastsiam.model.numerics import autocast, autocast_type, memory_format_of, use_numerics
from fastsiam.trace import span
from fastsiam.train.compile import (
    CompilationError,
    cache_folder,
    cause_line,
    compile_failure,
    compile_settings,
)
from fastsiam.views.batch import Batch
from fastsiam.views.rng import keys

_RECORDING_PASSES = 3
"""Number of passes to record CUDA graphs: the first warms up, the second records, the third replays
(``CUDAGraphTreeManager`` in torch/_inductor/cudagraph_trees.py)."""
_LONGEST_DIFFERENCE = 300
"""Maximum number of characters that a message quotes of the difference between two state dicts."""


class TrainingStep:
    """A callable that takes one optimizer step: ``loss, embedding = step(batch, at=7)``.

    Call ``prepare`` before the first step. A step does not wait for the device, except in torch's
    SyncBN, which uncompiled models use on several GPUs.

    Args:
        config: all settings; ``compile`` must be "on" or "off".
        method: trained in place; it stays usable on its own, for example for evaluation.
        place: this rank; every rank must take every step.
        steps_per_epoch: number of optimizer steps in an epoch, for the schedules.
    """

    def __init__(
        self, config: TrainConfig, method: Method, place: Place, *, steps_per_epoch: int
    ) -> None:
        assert config.step.compile != "auto"
        use_numerics(config, place.device)
        self.config = config
        self.place = place
        self.method = method.to(place.device).to(memory_format=memory_format_of(config))
        self.groups = method.param_groups()
        self.optimizer = build_optimizer(config.optim, self.groups)
        self.steps_per_epoch = steps_per_epoch
        self.total = config.optim.epochs * steps_per_epoch
        """Number of optimizer steps in the entire schedule."""
        self._dtype = autocast_type(config.numerics.precision, place.device)
        self.scaler = torch.amp.GradScaler(place.device.type, enabled=self._dtype == torch.float16)
        self._bn_group = bn_group(place, config.numerics)
        self._model: nn.Module = method

    @property
    def lr(self) -> float:
        """The backbone's learning rate at the last step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def prepare(self) -> str:
        """Assemble the model, and compile it if ``compile`` is "on"; every rank must call this.

        Compiling runs passes on noise and restores the state. It also records CUDA graphs, if
        enabled. While it records, no loader thread (DALI has some) may wait for the device or free
        device memory, so the loader must be idle.

        Returns:
            A message with the compile time; empty if nothing was compiled.

        Raises:
            CompilationError: compiling fails on this machine; raised on every rank.
            BackendError: CUDA graphs cannot be recorded, or compiling the model fails while other
                ranks may be waiting for this one.
        """
        if self.config.step.compile == "off":
            self._assemble()
            return ""
        start = time.perf_counter()
        with compile_settings(self.config):
            if reason := compile_failure(self.place):
                raise CompilationError(reason)
            self._compile()
        return f"compiled in {time.perf_counter() - start:.0f} s (cached in {cache_folder()})"

    def __call__(self, batch: Batch, *, at: int) -> tuple[Tensor, Tensor]:
        """Take one optimizer step.

        torch's generators are seeded with the run's seed, the step and the rank, so a method that
        draws random numbers draws the same ones after a restart.

        Args:
            batch: this rank's share of the batch.
            at: step number, from 0.

        Returns:
            Scalar float32 loss, averaged over the micro-batches, and (n, dim) embeddings of the
            last micro-batch. Both are on the device and detached.
        """
        rates = rates_at(self.config.optim, self.groups, at, self.steps_per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rates[group["name"]]
        moment = Moment(at, self.steps_per_epoch, self.total)
        seed = int(keys(self.config.numerics.seed, at, self.place.rank)[0])
        torch.default_generator.manual_seed(seed)  # torch.manual_seed is 100 times slower
        if self.place.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        parts = batch.chunks(self.config.optim.accumulate)
        total = torch.zeros((), device=self.place.device)
        outputs: list[Output] = []
        for number, part in enumerate(parts, start=1):
            with self._no_sync(number < len(parts)):
                output = self._forward_and_backward(part, len(parts))
            total += output.loss.detach() / len(parts)
            outputs.append(output._replace(loss=output.loss.detach()))
        with span("optimizer"):
            self.method.before_optimizer(at=moment)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            with torch.no_grad():
                self.method.after_step(outputs, at=moment)
        return total, outputs[-1].embedding

    def state(self) -> dict[str, Any]:
        """Return the state dicts of method, optimizer and gradient scaler, for a checkpoint."""
        return {
            "model": self.method.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load(
        self, *, model: dict[str, Any], optimizer: dict[str, Any], scaler: dict[str, Any]
    ) -> None:
        """Load the dicts that ``state`` returned; keep the optimizer settings of ``config``.

        Raises:
            CheckpointError: the weights do not match the network, which its library may change.
        """
        try:
            self.method.load_state_dict(model)
        except RuntimeError as error:
            difference = textwrap.shorten(str(error), _LONGEST_DIFFERENCE)
            raise CheckpointError(
                f"the checkpoint does not match {self.config.model.backbone} ({difference}); "
                "install the version of timm or torchvision that the run was started with"
            ) from error
        groups = self.optimizer.param_groups
        current_settings = [
            {name: group[name] for name in SETTINGS if name in group} for group in groups
        ]
        self.optimizer.load_state_dict(optimizer)
        for group, settings in zip(self.optimizer.param_groups, current_settings, strict=True):
            group.update(settings)  # a branch's settings may differ from its checkpoint's
        self.scaler.load_state_dict(scaler)

    def _no_sync(self, defer_sync: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context in which DDP skips its gradient all-reduce, if ``defer_sync``."""
        if defer_sync and isinstance(self._model, nn.parallel.DistributedDataParallel):
            return self._model.no_sync()
        return contextlib.nullcontext()

    def _forward_and_backward(self, part: Batch, parts: int) -> Output:
        with span("forward"):
            output = self._forward(part)
        with span("backward"):
            self.scaler.scale(output.loss / parts).backward()
        return output

    def _forward(self, batch: Batch) -> Output:
        if self._is_compiled and self.config.step.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        layout = memory_format_of(self.config)
        views = tuple(view.contiguous(memory_format=layout) for view in batch.views)
        with autocast(self.place.device, self._dtype):
            output: Output = self._model(views, batch.index)
        if not self._is_compiled:
            return output
        # The compiled backward pass may overwrite memory that it shares with these outputs.
        carry = {name: tensor.clone() for name, tensor in output.carry.items()}
        return output._replace(embedding=output.embedding.clone(), carry=carry)

    def _compile(self) -> None:
        """Compile the model.

        Raises:
            CompilationError, BackendError: as ``prepare``.
        """
        try:
            self._assemble()
            self._warm_up(_RECORDING_PASSES if self.config.step.cuda_graphs else 1)
        except (torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError):
            raise  # not caused by the compiler
        except Exception as error:  # the compiler may raise anything
            if peer_is_gone(error) or lacks_gpu_memory(error):
                raise
            graphs = self.config.step.cuda_graphs
            if graphs or self.place.world > 1:
                raise BackendError(
                    f"torch.compile fails on the model ({cause_line(error)}); pass "
                    f"{'--no-cuda-graphs' if graphs else '--compile off'}"
                ) from error
            if os.environ.get("FASTSIAM_DEBUG"):
                raise
            raise CompilationError(cause_line(error)) from error

    def _warm_up(self, count: int) -> None:
        """Run forward and backward passes on noise; restore the state afterwards.

        Per-image rows are not copied: they may be too large, and only ``after_step`` changes them.
        """
        batch = self._noise()
        rows = image_rows(self.config.model)
        buffers = {k: x.clone() for k, x in self.method.named_buffers() if k not in rows}
        try:
            for _ in range(count):
                # Keep the outputs alive during the backward pass, as in a real step. Otherwise the
                # first step would record its graph again.
                output = self._forward_and_backward(batch, 1)
                self.method.zero_grad(set_to_none=True)
                del output
        finally:
            self.method.zero_grad(set_to_none=True)
            with torch.no_grad():
                for name, buffer in buffers.items():
                    self.method.get_buffer(name).copy_(buffer)

    def _noise(self) -> Batch:
        """Return a batch of noise, without using torch's global generators.

        cuDNN benchmarks its kernels on this batch. Zeros would bias its choice, because a GPU
        needs less power for them than for images.
        """
        images = self.config.optim.micro_batch(self.place.world)
        device = self.place.device
        generator = torch.Generator(device).manual_seed(0)
        views = tuple(  # one tensor per view: a shared tensor would produce a different graph
            torch.randn(images, 3, s, s, dtype=self._dtype, device=device, generator=generator)
            for s in (view.crop for view in self.config.augment.views)
        )
        return Batch(
            views,
            index=torch.zeros(images, dtype=torch.int64, device=device),
            label=torch.full((images,), -1, device=device),
        )

    @property
    def _is_compiled(self) -> bool:
        return self.config.step.compile == "on"

    def _assemble(self) -> None:
        """Set up BN, compilation and DDP according to the settings."""
        step, method = self.config.step, self.method
        method.views_together = self._is_compiled
        method.backbone.recompute = step.activation_memory < 1 and not self._is_compiled
        images = self.config.numerics.bn_images
        if self._is_compiled and not images:
            images = self.config.optim.micro_batch(self.place.world)
        use_view_batch_norm(method, images=images, group=self._bn_group)
        vars(method).pop("forward", None)
        if self._is_compiled:
            # Only forward is compiled, so that DDP wraps the method and checkpoints keep its
            # keys. Under DDP the compiler splits the graph at the gradient buckets.
            mode = "reduce-overhead" if step.cuda_graphs else "default"
            method.forward = torch.compile(  # type: ignore[method-assign]
                method.forward, fullgraph=True, dynamic=False, mode=mode
            )
        is_shared_by_all = self._bn_group is not None and self._bn_group.size() == self.place.world
        self._model = data_parallel(method, self.place, same_buffers=is_shared_by_all)
        method.train()
