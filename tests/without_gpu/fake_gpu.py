"""A fake GPU built on torch's fake tensors, which have everything but values.

Inside ``fake_gpu()`` the code under test finds ``torch.device("cuda")``. Its tensors have devices,
shapes, dtypes and strides, by the rules that torch's compiler traces with. Tensors on the host are
real. Operations on tensors of two devices fail as on a GPU. While the fake GPU is ``watched``,
whatever makes the host wait for a GPU also fails:

- reading a value (``item``, ``tolist``, ``if tensor:``) or positions (``nonzero``, masks);
- copying from the GPU to the host;
- copying to the GPU from memory that is not pinned, or without ``non_blocking``;
- synchronising the current stream.

Every stand-in below names what it replaces. None has a GPU's values, timing or memory.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from .walk import run_backward

CUDA = torch.device("cuda", 0)


class HostWait(AssertionError):
    """The code under test would make the host wait for the GPU."""


@dataclass(frozen=True, slots=True)
class OperationOutput:
    """A tensor created by an operation."""

    by: str
    """Name of the operation."""
    tensor: Tensor


class Gpu(TorchDispatchMode):
    """The fake GPU. As a torch dispatch mode it sees every operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outputs: list[OperationOutput] = []
        """Tensors that were created while ``watched``."""
        self.copied: list[Tensor] = []
        """Tensors that were copied to the GPU while ``watched``."""
        self.empty_cache = mock.Mock()
        """Replaces ``torch.cuda.empty_cache``."""
        self._watches = False
        self.is_current = False
        """Whether this thread has made it the current GPU."""
        self._pinned: list[torch.UntypedStorage] = []

    @contextlib.contextmanager
    def current(self, device: Any) -> Iterator[None]:
        """Replace ``torch.cuda.device``. It needs an index: a loader's thread would take GPU 0."""
        assert device.index is not None
        before, self.is_current = self.is_current, True
        try:
            yield
        finally:
            self.is_current = before

    def stream(self, stream: Stream | None) -> Any:
        """Replace ``torch.cuda.stream``. A loader's thread must have made its GPU current.

        At the end of the block torch returns to the thread's current GPU, initially GPU 0.
        """
        assert stream is None or self.is_current, "this would take memory of GPU 0 in each process"
        return stream or contextlib.nullcontext()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Raise if the host would wait for the GPU, and record the tensors that are created."""
        self.outputs.clear()
        self.copied.clear()
        self._watches = True
        try:
            yield
        finally:
            self._watches = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        there = torch.device(kwargs.get("device") or "cpu").type == "cuda"
        if not there and not any(isinstance(t, FakeTensor) for t in tensors):
            return self._really(func, args, kwargs)
        if name == "_fused_sgd_":
            return _fused_sgd(*args, **kwargs)
        out = func(*args, **kwargs)
        if self._watches:
            self.outputs += [
                OperationOutput(name, t) for t in tree_leaves(out) if isinstance(t, Tensor)
            ]
            if name == "_to_copy":
                self._copy(args[0], out, bool(kwargs.get("non_blocking")))
            elif name == "copy_":
                self._copy(args[1], args[0], len(args) > 2 and bool(args[2]))
            elif any(_on_the_host(t) for t in tensors):
                raise HostWait(f"{name} of tensors on the host and on the GPU")
        return out

    def _really(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation on host tensors only, and remember pinned memory."""
        pinned = kwargs.pop("pin_memory", False)
        with _disable_current_modes():
            out = func(*args, **kwargs)
        if pinned:
            self.pin(out)
        return out

    def pin(self, tensor: Tensor) -> Tensor:
        """Mark a tensor's memory as pinned."""
        self._pinned.append(tensor.untyped_storage())
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a host tensor is in memory that is marked as pinned."""
        at = tensor.untyped_storage().data_ptr()
        return any(p.data_ptr() <= at < p.data_ptr() + p.nbytes() for p in self._pinned)

    def _copy(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        if source.device == target.device:
            return
        description = f"a copy of {tuple(source.shape)} {source.dtype}"
        if source.is_cuda:
            raise HostWait(f"{description} to the host")
        if not (non_blocking and self.is_pinned(source)):
            raise HostWait(f"{description} to the GPU, not from pinned memory or not non_blocking")
        self.copied.append(target)

    def on_the_host(self) -> list[str]:
        """Return operations that created host tensors from GPU tensors, except for scalars."""
        return [one.by for one in self.outputs if _on_the_host(one.tensor)]

    def images_in(self, layout: torch.memory_format) -> Counter[tuple[str, bool]]:
        """Count batches of images by operation and by whether their memory format is ``layout``."""
        return Counter(
            (one.by, one.tensor.is_contiguous(memory_format=layout))
            for one in self.outputs
            if one.tensor.dim() == 4 and one.tensor.shape[1] > 1 and one.tensor[0, 0].numel() > 1
        )


class Stream:
    """Replaces a CUDA stream. It runs nothing."""

    def __init__(self, *, is_current: bool = False) -> None:
        self._is_current = is_current

    def synchronize(self) -> None:
        """Raise unless this is a side stream: a loader may wait until its buffer is copied."""
        if self._is_current:
            raise HostWait("synchronize of the current stream")

    def record_event(self) -> object:
        return object()

    def wait_event(self, event: object) -> None:
        """The GPU waits, not the host."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _fused_sgd(
    weights: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], **settings: Any
) -> None:
    """Replace the fused kernel, which fake tensors do not support, and check its requirements.

    They are those of ``check_fast_path_restrictions`` in ATen/native/ForeachUtils.h.
    """
    for tensors in zip(weights, gradients, momenta, strict=True):
        assert all(t.is_cuda for t in tensors)
        assert len({t.dtype for t in tensors}) == 1
        assert len({(t.shape, _strides(t)) for t in tensors}) == 1, [t.stride() for t in tensors]
    for scalar in ("grad_scale", "found_inf"):
        assert settings.get(scalar) is None or settings[scalar].is_cuda


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of the axes with more than one element."""
    return tuple(step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def _on_the_host(tensor: Tensor) -> bool:
    return not tensor.is_cuda and tensor.dim() > 0


def _apply(module: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
    """Replace ``Module._apply``, which swaps parameters in place and forbids weakrefs to them.
    Fake tensors have some, so here parameters are new objects.
    """
    for child in module.children() if recurse else ():
        child._apply(change)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            with torch.no_grad():
                module._parameters[name] = nn.Parameter(change(parameter), parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = change(buffer)
    return module


class TritonDriver:
    """Replaces Triton's driver, so that kernels are compiled for an H200."""

    utils = None

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def fake_gpu() -> Iterator[Gpu]:
    """Give this thread one fake GPU, and yield it."""
    gpu, current = Gpu(), Stream(is_current=True)
    cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda including_emulation=True: True,
        "mem_get_info": lambda device=None: (140 * 2**30, 141 * 2**30),
        "empty_cache": gpu.empty_cache,
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda device=None: current,
        "stream": gpu.stream,
        "Stream": lambda device=None: Stream(),
        "device_of": lambda tensor: contextlib.nullcontext(),
        "device": gpu.current,
    }
    cudnn = torch._C._ConvBackend.Cudnn  # type: ignore[attr-defined]
    with contextlib.ExitStack() as stack:
        for name, stand_in in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        for owner, name, stand_in in (
            (torch.autograd, "_engine_run_backward", run_backward),
            (nn.Module, "_apply", _apply),
            (Tensor, "pin_memory", lambda tensor, device=None: gpu.pin(tensor.clone())),
            (Tensor, "is_pinned", lambda tensor, device=None: gpu.is_pinned(tensor)),
            (Tensor, "record_stream", lambda tensor, stream: None),
            # Now that there seems to be a GPU, torch would request a CUDA context.
            (FakeTensorMode, "avoid_device_init", True),
            (fake_tensor, "init_gpu_context", lambda device: None),
            # Without a GPU torch assumes that cuDNN lacks bfloat16, and chooses another layout.
            (torch._C, "_select_conv_backend", lambda *_, **__: cudnn),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        if find_spec("triton"):
            from triton.runtime import driver

            stack.enter_context(mock.patch.object(driver, "_active", TritonDriver()))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(gpu)
        yield gpu
