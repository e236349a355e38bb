"""The code that torch's compiler would run on an H200, written down and not run.

dynamo, autograd and inductor trace with fake tensors anyway. What is left out is what needs a GPU:
folding constants, choosing by timing, loading the code.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.graph import GraphLowering

from .fake_gpu import HOPPER


class _WouldRun(Exception):
    """Everything is compiled, and would run now."""


@dataclass(frozen=True, slots=True)
class Code:
    """A program of inductor's, forward or backward."""

    text: str

    @property
    def kernels(self) -> list[str]:
        """Names of Triton's kernels, one for each launch."""
        return re.findall(r"^ +(triton_\w+)\.run\(", self.text, re.MULTILINE)

    def calls(self, name: str) -> int:
        """Count the calls of a function of torch's."""
        return len(re.findall(rf"\b{name}(?:\.default)?\(", self.text))

    @property
    def images(self) -> list[Allocation]:
        """Batches of images and weights that are allocated: type, sizes and strides of each."""
        four = r"\(((?:\d+, ){3}\d+)\)"
        found = re.findall(rf"empty_strided_cuda\({four}, {four}, torch\.(\w+)", self.text)
        batches = [
            Allocation(kind, _numbers(size), _numbers(stride)) for size, stride, kind in found
        ]
        return [
            batch for batch in batches if batch.size[1] > 1 and batch.size[2] * batch.size[3] > 1
        ]


class Allocation(NamedTuple):
    """What is allocated."""

    dtype: str
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(", ")))


def cuda_code(function: Callable[..., Any], *args: Any) -> tuple[Code, Code]:
    """Compile a function as one graph, within ``fake_gpu()``; return forward and backward."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    codes: list[Code] = []

    def write_down(graph: GraphLowering) -> Any:
        codes.append(Code(graph.codegen()[0].value))
        return SimpleNamespace(call=_would_run, __file__="", key="")

    torch._dynamo.reset()
    with (
        _cuda_for_dynamo(),
        mock.patch.object(GraphLowering, "_compile_to_module", write_down),
        inductor.patch(
            force_disable_caches=True,
            compile_threads=1,
            joint_graph_constant_folding=False,
            shape_padding=False,
        ),
        functorch.patch(force_non_lazy_backward_lowering=True),
        contextlib.suppress(_WouldRun),
    ):
        torch.compile(function, fullgraph=True, dynamic=False)(*args)
    torch._dynamo.reset()
    forward, backward = codes
    return forward, backward


def _would_run(_: Any) -> NoReturn:
    raise _WouldRun


@contextlib.contextmanager
def _cuda_for_dynamo() -> Any:
    """dynamo took hold of torch.cuda's functions when it was imported, before they were faked."""
    names = ("current_device", "current_stream", "device_count", "get_device_properties")
    faked: dict[str, Any] = {name: getattr(torch.cuda, name) for name in names}
    faked |= {
        "is_available": lambda: True,
        "get_compute_capability": lambda device=None: 90,
        "get_raw_stream": lambda device=None: 0,
    }
    with contextlib.ExitStack() as stack:
        for name, stand_in in faked.items():
            stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(stand_in)))
        properties = staticmethod(lambda device=None: HOPPER)
        stack.enter_context(
            mock.patch.object(CudaInterface.Worker, "get_device_properties", properties)
        )
        # dynamo would note the stream that it finds there.
        stack.enter_context(mock.patch.object(torch.accelerator, "is_available", lambda: False))
        yield
