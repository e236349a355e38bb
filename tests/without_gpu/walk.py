"""A backward pass in Python that walks autograd's graph node by node.

torch's C++ engine requests CUDA streams as soon as a tensor in the graph is on a GPU, fake or not,
and fails without a CUDA device. The nodes themselves do not. Hooks of tensors and nodes are not
supported; the code under test has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

_numbers = count(1_000_000)


def run_backward(
    outputs: Sequence[Tensor | GradientEdge],
    grads: Sequence[Tensor | None],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Tensor | GradientEdge],
    allow_unreachable: bool = False,
    accumulate_grad: bool = False,
) -> tuple[Tensor | None, ...]:
    """Replace ``torch.autograd.graph._engine_run_backward``, with the same arguments."""
    roots, targets = [_edge(t) for t in outputs], [_edge(t) for t in inputs or ()]
    waiting = _uses(roots)
    gradients: dict[Any, list[Tensor | None]] = {
        node: [None] * len(node._input_metadata) for node in waiting
    }
    captured: dict[tuple[Any, int], Tensor | None] = {}
    for (node, number), grad in zip(roots, grads, strict=True):
        _add(gradients[node], node, number, grad)
    ready = [node for node, uses in waiting.items() if not uses]
    number = next(_numbers)
    # Activation checkpointing asks for the ID of the backward pass.
    own_id = mock.patch.object(torch._C, "_current_graph_task_id", lambda: number)
    with torch.set_grad_enabled(create_graph), own_id:
        while ready:
            # Like the engine: leaves first, then the node that was created last.
            node = ready.pop(max(range(len(ready)), key=lambda i: ready[i]._sequence_nr()))
            node_gradients = gradients.pop(node)
            captured |= {(node, at): node_gradients[at] for other, at in targets if other is node}
            leaf = not node.next_functions
            results: Any = (None,) * len(node.next_functions)
            if any(grad is not None for grad in node_gradients) and (not leaf or accumulate_grad):
                results = _apply(node, node_gradients)
            for (following, at), grad in zip(node.next_functions, results, strict=False):
                if following is None:
                    continue
                _add(gradients[following], following, at, grad)
                waiting[following] -= 1
                if not waiting[following]:
                    ready.append(following)
    assert not gradients, "the walk ended before all nodes were reached"
    return tuple(captured.get(edge) for edge in targets)


def _edge(tensor: Tensor | GradientEdge) -> tuple[Any, int]:
    edge = get_gradient_edge(tensor) if isinstance(tensor, Tensor) else tensor
    return edge.node, edge.output_nr


def _uses(roots: Sequence[tuple[Any, int]]) -> Counter[Any]:
    """Count how often each reachable node is referenced by others."""
    seen = {node for node, _ in roots}
    uses: Counter[Any] = Counter(dict.fromkeys(seen, 0))
    todo = list(seen)
    while todo:
        for following, _ in todo.pop().next_functions:
            if following is None:
                continue
            uses[following] += 1
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return uses


def _apply(node: Any, grads: Sequence[Tensor | None]) -> Any:
    function = node.apply if isinstance(node, torch.autograd.function.BackwardCFunction) else node
    result = function(*grads)
    return result if isinstance(result, tuple) else (result,)


def _add(sums: list[Tensor | None], node: Any, at: int, grad: Tensor | None) -> None:
    """Accumulate a gradient after converting it to the shape and dtype that the engine requires."""
    if grad is None:
        return
    expected = node._input_metadata[at]
    assert grad.device == expected.device, f"{node}: a gradient on {grad.device}"
    if grad.shape != tuple(expected.shape):
        grad = grad.sum_to_size(expected.shape)
    if grad.dtype != expected.dtype:
        grad = grad.to(expected.dtype)
    before = sums[at]
    sums[at] = grad if before is None else before + grad
