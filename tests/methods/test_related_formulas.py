"""SimCLR, MoCo v2, BYOL and SwAV against their papers' formulas in float64 numpy, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fastsiam.config import BYOLConfig, MoCoV2Config, SimCLRConfig, SwAVConfig
from fastsiam.views.batch import Batch
from tests.methods import formulas, related_formulas
from tests.methods.formulas import Array, Weights
from tests.methods.linear import (
    EPOCHS,
    STEPS,
    arrays,
    batch_of,
    build,
    step_of,
    views_of,
)
from tests.methods.related_formulas import Groups, projected
from tests.methods.variants import EVERY, RELATED, Case

CASES = pytest.mark.parametrize("case", RELATED.values(), ids=RELATED.keys())
SMALL = {"projector_layers": 2, "dim": 6, "projector_dim": 7, "predictor_dim": 3}


def of(case: Case, **how: Any) -> Any:
    """Build a case with small heads."""
    return build(case.config(**SMALL), **how)


def images_of(case: Case, step: int = 0) -> Batch:
    """Return a batch of a case's views, the largest of four pixels."""
    return batch_of(case.views, step, sides=[4 // by for by in case.smaller])


def formula_of(
    method: Any, batch: Batch, *, queue: Array | None = None, group: int = 0
) -> Callable[[Weights], float]:
    """Return the loss as a function of the weights; what the method holds constant is constant.

    Args:
        method: whose weights and momentum encoder give the constants.
        batch: of images.
        queue: what was kept of earlier batches and counts; none is nothing.
        group: images in a row that share BN statistics; 0 is all.
    """
    config, views = method.config, views_of(batch)
    weights, copied = arrays(method), arrays(method, copied=True)
    known: dict[str, Any] = {"views": views}
    match config:
        case SimCLRConfig():
            known |= {"temperature": config.temperature}
            if config.stop_gradient:
                known["against"] = [projected("simclr", weights, view) for view in views]
        case MoCoV2Config():
            parts: list[Groups] = [(), ()]
            if group:
                parts = [
                    groups(len(batch.index), group)
                    for groups in (related_formulas.query_groups, related_formulas.key_groups)
                ]
            known |= {
                "temperature": config.temperature,
                "keys": [projected("mocov2", copied, view, parts[1]) for view in views],
                "queue": queue,
                "symmetric": config.symmetric,
                "groups": parts[0],
            }
        case BYOLConfig():
            known["targets"] = [projected("byol", copied, view) for view in views]
        case SwAVConfig():
            queues = [] if queue is None else [queue[:, view] for view in (0, 1)]
            how: dict[str, Any] = {
                "epsilon": config.epsilon,
                "rounds": config.sinkhorn_rounds,
                "queues": queues,
            }
            known["temperature"] = config.temperature

            def codes(now: Weights) -> list[Array]:
                return related_formulas.codes(now, views, **how)

            if not config.stop_gradient:
                return lambda now: related_formulas.swav(now, of=codes(now), **known)
            known["of"] = codes(weights)
    loss = getattr(related_formulas, config.name)
    return lambda now: loss(now, **known)


def check_gradients(method: Any, batch: Batch, loss: Callable[[Weights], float]) -> None:
    """Compare the loss, and its slope along each weight."""
    output = method(batch.views, batch.index)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss(arrays(method)), abs=2e-6)
    expected = formulas.gradient(loss, arrays(method))
    found = {name: p.grad.numpy() for name, p in method.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, slopes in expected.items():
        np.testing.assert_allclose(found[name], slopes, atol=2e-5, rtol=2e-5, err_msg=name)


def filled(method: Any) -> Array | None:
    """Fill a method's queue with random unit rows, and return them."""
    if "queue" not in dict(method.named_buffers()) or not len(method.queue):
        return None
    method.queue.copy_(torch.nn.functional.normalize(torch.randn_like(method.queue), dim=-1))
    method.pushed.fill_(len(method.queue))
    queue: Array = method.queue.double().numpy()
    return queue


@CASES
def test_loss_and_gradients(case: Case) -> None:
    """With other weights in the momentum encoder, and a full queue."""
    method, batch = of(case), images_of(case)
    check_gradients(method, batch, formula_of(method, batch, queue=filled(method)))


@pytest.mark.parametrize("group", [2, 4])
def test_keys_are_normalised_in_other_groups_than_queries(group: int) -> None:
    """MoCo's loss and gradients where BN has parts of the batch; a key would know its query."""
    case = RELATED["mocov2, parts"]
    method, batch = of(case, normed=True), images_of(case)
    queue = filled(method)
    step_of(method, sync_bn=False, bn_images=group)
    method.target[0].layer.weight.data.normal_()
    loss = formula_of(method, batch, queue=queue, group=group)
    check_gradients(method, batch, loss)
    same = formula_of(method, batch, queue=queue)
    assert abs(loss(arrays(method)) - same(arrays(method))) > 1e-3


def state_of(method: Any) -> dict[str, Array]:
    return {name: value.double().numpy().copy() for name, value in method.state_dict().items()}


class Ring:
    """A queue by the papers' words: of each step the keys take the oldest ones' places, in turn."""

    def __init__(self, method: Any) -> None:
        self.config = method.config
        self.rows: Array | None = None
        self.given = 0
        if getattr(self.config, "queue", 0):
            self.rows = method.queue.double().numpy().copy()

    def counts(self) -> Array | None:
        """Return what a step compares with: SwAV's queue once it is full."""
        waits = isinstance(self.config, SwAVConfig) and self.given < self.config.queue
        return None if waits else self.rows

    def take(self, method_before: Weights, copied: Weights, parts: list[Batch], at: int) -> None:
        """Put in what a step's parts leave."""
        if self.rows is None:
            return
        views = [views_of(part) for part in parts]
        rows = []
        if isinstance(self.config, MoCoV2Config):
            for view in (0, 1) if self.config.symmetric else (1,):
                for part in views:
                    rows += list(formulas.unit(projected("mocov2", copied, part[view])))
        elif at >= round(self.config.queue_from * STEPS):
            for part in views:
                zs = [formulas.unit(projected("swav", method_before, v)) for v in part[:2]]
                rows += list(np.stack(zs, axis=1))
        for row in rows:
            self.rows[self.given % len(self.rows)] = row
            self.given += 1


@pytest.mark.parametrize("accumulate", [1, 2])
@CASES
def test_losses_and_queues_step_by_step(case: Case, accumulate: int) -> None:
    """Of two epochs. A queue goes round, whatever its length; SwAV's counts once it is full."""
    method = of(case)
    step, ring, losses = step_of(method, accumulate=accumulate), Ring(method), []
    for at in range(EPOCHS * STEPS):
        batch = images_of(case, at)
        parts = batch.chunks(accumulate)
        weights, copied = arrays(method), arrays(method, copied=True)
        expected = [formula_of(method, part, queue=ring.counts())(weights) for part in parts]
        losses.append(step(batch, at=at)[0].item())
        assert losses[-1] == pytest.approx(np.mean(expected), abs=5e-6), at
        ring.take(weights, copied, parts, at)
        if ring.rows is not None:
            np.testing.assert_allclose(method.queue.numpy(), ring.rows, atol=1e-6, err_msg=str(at))
            assert method.pushed == ring.given
    assert np.ptp(losses) > 1e-2


FOLLOWED = {
    name: case for name, case in EVERY.items() if getattr(case.config(), "encoder_momentum", None)
} | {"byol, no momentum": EVERY["byol, no momentum"]}


@pytest.mark.parametrize("case", FOLLOWED.values(), ids=FOLLOWED.keys())
def test_momentum_encoders_follow(case: Case) -> None:
    """Their weights to the last bits; BYOL's momentum grows to 1."""
    method = of(case)
    step, config = step_of(method), case.config()
    prefix = "target" if hasattr(method, "target") else "frozen"
    for at in range(EPOCHS * STEPS):
        momentum = config.encoder_momentum
        if getattr(config, "momentum_schedule", "constant") == "cosine":
            momentum = related_formulas.momentum_at(momentum, at, EPOCHS * STEPS)
            assert momentum == config.encoder_momentum if at == 0 else momentum < 1
        before = arrays(method, copied=True)
        step(images_of(case, at), at=at)
        own, now = arrays(method), arrays(method, copied=True)
        assert (
            before.keys()
            == now.keys()
            == {name for name in own if not name.startswith("predictor.")}
        )
        for name, value in now.items():
            expected = momentum * before[name] + (1 - momentum) * own[name]
            np.testing.assert_allclose(value, expected, atol=1e-12, rtol=1e-12, err_msg=name)
            assert np.abs(value - before[name]).max() > 1e-7, name
        assert all(not p.requires_grad for p in getattr(method, prefix).parameters())


def test_a_momentum_encoder_has_bn_statistics_of_its_own() -> None:
    """They are of the images that it saw, with its weights: one view after the other."""
    case = RELATED["byol"]
    method = of(case)
    step, mean = step_of(method), np.zeros(SMALL["projector_dim"])
    for at in range(STEPS):
        batch, copied = images_of(case, at), arrays(method, copied=True)
        for view in views_of(batch):
            inputs = formulas.features(copied, view) @ copied["projector.0.weight"].T
            mean = 0.9 * mean + 0.1 * inputs.mean(0)
        step(batch, at=at)
        np.testing.assert_allclose(method.target[1][1].running_mean, mean, atol=1e-12)
    own = method.projector[1].running_mean.numpy()
    assert np.abs(own - mean).max() > 1e-3


@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
@pytest.mark.parametrize(("epochs", "frozen"), [(0.0, 0), (0.3, 1), (1.0, 3), (1.7, 5), (2.0, 6)])
def test_prototypes_are_frozen_for_so_many_steps(
    epochs: float, frozen: int, optimizer: str
) -> None:
    """Neither gradients nor decay nor a momentum of the frozen steps moves them."""
    case = Case({"prototypes": 8, "frozen_epochs": epochs}, SwAVConfig)
    method = of(case)
    step = step_of(method, optimizer=optimizer, weight_decay=0.1)
    weight = method.prototypes.weight
    began = weight.detach().clone()
    for at in range(EPOCHS * STEPS):
        before = weight.detach().clone()
        step(images_of(case, at), at=at)
        still = at < frozen
        assert torch.equal(weight, before) == still, at
        assert (step.optimizer.state[weight]["momentum_buffer"] == 0).all() == still, at
    assert torch.equal(began, weight) == (frozen == 6)


@CASES
def test_what_moves_in_a_step(case: Case) -> None:
    """All that is trained, the momentum encoder and the queue; not the prototypes at first."""
    method = of(case)
    step, before = step_of(method), state_of(method)
    step(images_of(case), at=0)
    now = state_of(method)
    moved = {name for name in now if not np.array_equal(now[name], before[name])}
    everything = set(now)
    if getattr(case.config(), "frozen_epochs", 0):
        everything -= {"prototypes.weight"}
    if getattr(case.config(), "queue_from", 1):
        everything -= {"queue", "pushed"} if isinstance(case.config(), SwAVConfig) else set()
    assert moved == everything
    of_groups = {id(p) for group in method.param_groups() for p in group.params}
    trained = {name for name, p in method.named_parameters() if id(p) in of_groups}
    assert trained == set(arrays(method))
    assert all(p.requires_grad == (name in trained) for name, p in method.named_parameters())
