"""``walk.run_backward`` is bitwise equal to autograd's engine, so tests may use it instead."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastsiam.methods import Method
from fastsiam.model.batch_norm import use_view_batch_norm
from tests.rank_jobs import global_batch, make_method

from .walk import run_backward


def gradients(*, recompute: bool, leaves: bool) -> list[Tensor]:
    method: Method = make_method()
    use_view_batch_norm(method)
    method.backbone.recompute = recompute
    batch = global_batch()
    loss = method(batch.views, batch.index).loss
    parameters = list(method.parameters())
    if leaves:
        loss.backward()
        return [p.grad for p in parameters if p.grad is not None]
    return list(torch.autograd.grad(loss, parameters, allow_unused=True))


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("recompute", [False, True])
def test_run_backward_equals_autograd(
    recompute: bool, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradients(recompute=recompute, leaves=leaves)
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", run_backward)
    actual = gradients(recompute=recompute, leaves=leaves)
    assert len(actual) == len(expected) > 30
    assert all(map(torch.equal, actual, expected))
