"""The training step: forward, backward and optimizer on one rank's share of a batch.

Here a step is made as fast as the hardware allows, by precision, memory format, compilation and
ranks; none of it changes what is computed but for rounding. docs/performance.md says what each
lever brings and where the limit lies.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastsiam.config import TrainConfig
from fastsiam.distributed import (
    Place,
    bn_group,
    data_parallel,
    from_all,
    peer_is_gone,
)
from fastsiam.errors import BackendError
from fastsiam.methods import SimSiam
from fastsiam.model.batch_norm import use_view_batch_norm
from fastsiam.trace import span
from fastsiam.training.optim import build_optimizer, set_lr
from fastsiam.views.batch import TwoViewBatch

_CACHE = Path("~/.cache/fastsiam/torchinductor")


class TrainingStep:
    """Takes optimizer steps: ``loss, z = step(batch, rates)``; never waits for the device.

    ``prepare`` comes before the first step.

    Args:
        config: all settings; what ``compile`` means must be settled ("on" or "off").
        method: is trained in place, and stays usable by itself, for evaluation for instance.
        place: this rank; every rank takes every step.
    """

    def __init__(self, config: TrainConfig, method: SimSiam, place: Place) -> None:
        assert config.step.compile != "auto"
        use_numerics(config)
        self.method = method.to(place.device).to(memory_format=memory_format_of(config))
        self.optimizer = build_optimizer(config.optim, method.param_groups())
        self._config, self._place = config, place
        self._dtype = autocast_type(config, place)
        self.scaler = torch.amp.GradScaler(place.device.type, enabled=self._dtype == torch.float16)
        self._group = bn_group(place, config.numerics)
        self._model: nn.Module = method
        self.compiled = False
        """Whether the model is compiled."""

    def prepare(self) -> str:
        """Put the model together, and compile it if the settings say so; every rank does.

        Compiling takes a step that leaves no trace.

        Returns:
            A line for people: how long it took, or why the steps will be taken without it; empty
            if it was not to be.

        Raises:
            BackendError: it fails on the model, and other ranks may wait for this one.
        """
        if self._config.step.compile == "off":
            self._use(compiled=False)
            return ""
        began = time.perf_counter()
        with _compiling(self._config):
            reason = _why_not(self._place) or self._compile()
        if not reason:
            kept = os.environ["TORCHINDUCTOR_CACHE_DIR"]
            return f"compiled in {time.perf_counter() - began:.0f} s (kept in {kept})"
        self._use(compiled=False)
        return (
            f"torch.compile cannot be used here ({reason}); training goes on without it, "
            "more slowly; --compile off leaves this line out"
        )

    def __call__(self, batch: TwoViewBatch, rates: dict[str, float]) -> tuple[Tensor, Tensor]:
        """Take one step.

        Args:
            batch: this rank's share.
            rates: learning rate of each parameter group.

        Returns:
            Scalar float32 loss, averaged over the accumulated parts; (n, dim) projections of the
            last part. Both on the device, without gradient.
        """
        set_lr(self.optimizer, rates)
        parts = batch.chunks(self._config.optim.accumulate)
        total = torch.zeros((), device=self._place.device)
        for number, part in enumerate(parts, start=1):
            alone = number < len(parts) and isinstance(
                self._model, nn.parallel.DistributedDataParallel
            )
            with self._model.no_sync() if alone else contextlib.nullcontext():  # type: ignore[operator]
                with span("forward"):
                    loss, z = self._forward(part.view1, part.view2)
                with span("backward"):
                    self.scaler.scale(loss / len(parts)).backward()
            total += loss.detach() / len(parts)
        with span("optimizer"):
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
        return total, z

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the states that a checkpoint holds: of the model, the optimizer, the scaler."""
        return {
            "model": self.method.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load(
        self, *, model: dict[str, Any], optimizer: dict[str, Any], scaler: dict[str, Any]
    ) -> None:
        """Go on from what ``state`` returned."""
        self.method.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.scaler.load_state_dict(scaler)

    def _forward(self, view1: Tensor, view2: Tensor) -> tuple[Tensor, Tensor]:
        if self.compiled and self._config.step.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        memory_format = memory_format_of(self._config)
        with torch.autocast(
            self._place.device.type, dtype=self._dtype, enabled=self._dtype != torch.float32
        ):
            result: tuple[Tensor, Tensor] = self._model(
                view1.contiguous(memory_format=memory_format),
                view2.contiguous(memory_format=memory_format),
            )
        return result

    def _compile(self) -> str:
        """Compile the model; return why that fails, if it does."""
        try:
            self._use(compiled=True)
            self._take_no_step()
            return ""
        except (torch.OutOfMemoryError, dist.DistError):
            raise
        except Exception as error:  # a compiler that fails may raise anything
            if peer_is_gone(error):
                raise
            if self._place.world > 1:
                raise BackendError(
                    f"torch.compile fails on the model ({_reason(error)}); "
                    "--compile off trains without it"
                ) from error
            if os.environ.get("FASTSIAM_DEBUG"):
                raise
            return _reason(error)

    def _take_no_step(self) -> None:
        """Go forward and backward on nothing, and leave everything as it was."""
        parts = self._place.world * self._config.optim.accumulate
        side = self._config.augment.crop
        shape = (self._config.optim.batch // parts, 3, side, side)
        buffers = {name: buffer.clone() for name, buffer in self.method.named_buffers()}
        try:
            view = torch.zeros(shape, dtype=self._dtype, device=self._place.device)
            loss, _ = self._forward(view, view.clone())  # one tensor twice is another graph
            loss.backward()
        finally:
            self.method.zero_grad(set_to_none=True)
            with torch.no_grad():
                for name, buffer in self.method.named_buffers():
                    buffer.copy_(buffers[name])

    def _use(self, *, compiled: bool) -> None:
        step, method = self._config.step, self.method
        together = compiled and step.batch_views
        method.views_together = together
        method.backbone.recompute = step.activation_memory < 1 and not compiled
        use_view_batch_norm(method, views=2 if together else 1, group=self._group)
        vars(method).pop("forward", None)
        if compiled:
            mode = "reduce-overhead" if step.cuda_graphs else "default"
            method.forward = torch.compile(  # type: ignore[method-assign]
                method.forward, fullgraph=True, dynamic=False, mode=mode
            )
        everywhere = self._group is not None and self._group.size() == self._place.world
        self._model = data_parallel(
            method, self._place, bucket_mb=step.bucket_mb, same_buffers=everywhere
        )
        self.compiled = compiled
        method.train()


def autocast_type(config: TrainConfig, place: Place) -> torch.dtype:
    """Resolve the precision.

    "auto" is bf16 where the hardware computes in it, else fp16 on a GPU, else fp32.
    """
    named = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if config.numerics.precision != "auto":
        return named[config.numerics.precision]
    if place.device.type == "cuda":
        return (
            torch.bfloat16
            if torch.cuda.is_bf16_supported(including_emulation=False)
            else torch.float16
        )
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def memory_format_of(config: TrainConfig) -> torch.memory_format:
    """Return the layout of images, activations and weights."""
    return torch.channels_last if config.numerics.channels_last else torch.contiguous_format


def use_numerics(config: TrainConfig) -> None:
    """Set torch's process-wide switches."""
    tf32 = config.numerics.tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True


def keep_freed_memory() -> None:
    """Have this process keep the memory of freed tensors for the next ones.

    By default glibc maps each large tensor of each step anew, and the system clears every page of
    it: a tenth of a step of a small network. With another C library nothing happens.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        m_trim_threshold, m_mmap_max = -1, -4
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


@contextlib.contextmanager
def _compiling(config: TrainConfig) -> Any:
    """Keep what is compiled, quietly, and trade memory for computing as the settings say."""
    from torch._functorch import config as functorch
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch sets the variable itself when it is imported, to a folder that is lost with /tmp.
    default = default_cache_dir()
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default) == default:
        with contextlib.suppress(OSError, RuntimeError):
            folder = _CACHE.expanduser()
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"can be written")
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    noisy = [logging.getLogger(name) for name in ("torch.utils.cpp_extension", "torch._logging")]
    levels = [logger.level for logger in noisy]
    try:
        for logger in noisy:
            logger.setLevel(logging.ERROR)
        with functorch.patch(activation_memory_budget=config.step.activation_memory):
            yield
    finally:
        for logger, level in zip(noisy, levels, strict=True):
            logger.setLevel(level)


def _why_not(place: Place) -> str:
    """Compile something small, forward and backward; return why not all ranks can, if so."""
    reason = ""
    try:
        x = torch.zeros(8, device=place.device, requires_grad=True)
        torch.compile(lambda x: (x.sin() + 1).relu().sum(), fullgraph=True)(x).backward()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler that is missing may raise anything
        if place.world == 1 and os.environ.get("FASTSIAM_DEBUG"):
            raise
        reason = _reason(error)
    reasons = from_all(reason)
    failed = [f"{reason} on rank {rank}" for rank, reason in enumerate(reasons) if reason]
    return reason if place.world == 1 else next(iter(failed), "")


def _reason(error: BaseException) -> str:
    """Return the first line that says something, of the innermost error."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
