"""Every variant of every method, compared step by step with its formulas in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastsiam.config import SimSiamConfig
from fastsiam.config.methods.byol import BYOLConfig
from fastsiam.config.methods.mocov2 import MoCoV2Config
from fastsiam.config.methods.simclr import SimCLRConfig
from fastsiam.config.methods.swav import SwAVConfig
from fastsiam.views.batch import Batch
from tests.methods import formulas, related_formulas
from tests.methods.formulas import Weights
from tests.methods.linear import (
    BATCH,
    EPOCHS,
    IMAGES,
    STEPS,
    batch_of,
    build,
    copied_weights_of,
    step_of,
    weights_of,
)
from tests.methods.related_formulas import project
from tests.methods.variants import ALL_CASES, RELATED, VARIANTS, Case

SMALL = {"projector_layers": 2, "dim": 6, "projector_dim": 7, "predictor_dim": 3}


def build_case(case: Case, **options: Any) -> Any:
    return build(case.config(**SMALL), **options)


def images_of(case: Case, step: int = 0) -> Batch:
    """Return a batch of a case's views; the largest views have 4 x 4 pixels."""
    return batch_of(step, sides=[4 // by for by in case.smaller])


class MethodState:
    """A method's state across steps, computed from the papers' definitions.

    ``queue`` is a ring buffer of keys of earlier batches. ``averages`` has one row per image.
    ``encoder`` contains the weights of the encoder that computes the targets.
    """

    def __init__(self, case: Any, method: Any) -> None:
        self.config, self.case = method.config, case
        self.encoder: Weights = {}
        self.averages = torch.zeros(IMAGES, method.dim, dtype=torch.float64)
        self.queue: Tensor | None = None
        self.given = 0
        if getattr(self.config, "queue", 0):
            self.queue = method.queue.double()

    def fill(self, method: Any) -> None:
        """Replace the method's state by random unit rows."""
        for name in ("queue", "averages"):
            if name in (buffers := dict(method.named_buffers())):
                buffers[name].copy_(
                    torch.nn.functional.normalize(torch.randn_like(buffers[name]), dim=-1)
                )
                setattr(self, name, buffers[name].to(torch.float64, copy=True))
        if self.queue is not None:
            method.pushed.fill_(len(self.queue))
            self.given = len(self.queue)

    def begin(self, at: int, weights: Weights, copied: Weights) -> None:
        """Set the target encoder of a step; a frozen one is copied at the start of its interval."""
        every = getattr(self.config, "alternate_every", 1) or STEPS
        if every == 1:
            self.encoder = copied or weights
            return
        if at % every == 0:
            self.encoder = {key: weights[key] for key in copied}
        assert all(torch.equal(value, self.encoder[key]) for key, value in copied.items())

    def take(self, weights: Weights, parts: list[Batch], at: int) -> None:
        """Update the state after a step with the given parts of a batch."""
        for part in parts:
            if getattr(self.config, "target_average", 0):
                self.averages[part.index] = self.moving_averages(part, self.case.others)
        rows: list[Tensor] = []
        if isinstance(self.config, MoCoV2Config):
            for view in (0, 1) if self.config.symmetric else (1,):
                for part in parts:
                    keys = project("mocov2", self.encoder, part.views[view])
                    rows += list(formulas.unit(keys))
        elif isinstance(self.config, SwAVConfig) and at >= round(self.config.queue_from * STEPS):
            for part in parts:
                zs = [project("swav", weights, view) for view in part.views[:2]]
                rows += list(torch.stack([formulas.unit(z) for z in zs], 1))
        if self.queue is not None:
            for row in rows:
                self.queue[self.given % len(self.queue)] = row
                self.given += 1

    def check(self, method: Any, at: int) -> None:
        if self.queue is not None:
            torch.testing.assert_close(method.queue.double(), self.queue, atol=1e-6, rtol=1e-7)
            assert method.pushed == self.given
        if getattr(self.config, "target_average", 0):
            torch.testing.assert_close(method.averages, self.averages, atol=1e-6, rtol=1e-7)
            assert self.averages.any(1).sum() == min(IMAGES, (at + 1) * BATCH)

    def moving_averages(self, batch: Batch, views: tuple[int, ...]) -> Tensor:
        """Return the moving averages of a batch's images after the projections of some views."""
        zs = [
            formulas.encode(self.encoder, batch.views[view], norm=self.config.head_bn)
            for view in views
        ]
        rows = self.averages[batch.index]
        return formulas.update_averages(rows, zs, self.config.target_average)


def formula_of(
    method: Any, batch: Batch, state: MethodState, *, group: int = 0
) -> Callable[[Weights], Tensor]:
    """Return the loss as a function of the weights; what the method detaches is constant.

    Args:
        method: the method whose current weights give the constants.
        batch: the images.
        state: the state from earlier batches, and the encoder of the targets.
        group: number of consecutive images that share BN statistics; 0 for all.
    """
    config, views = method.config, batch.views
    weights, known = weights_of(method), dict[str, Any]()
    match config:
        case SimSiamConfig():
            pairs, norm = state.case.pairs, config.head_bn
            known = {"norm": norm, "similarity": config.similarity}
            if config.target_average:
                known["against"] = [state.moving_averages(batch, targets) for _, targets in pairs]
            elif config.stop_gradient:
                zs = [formulas.encode(state.encoder, view, norm=norm) for view in views]
                known["against"] = formulas.targets(dict(enumerate(zs)), pairs)
            return lambda now: formulas.loss(now, views, pairs, **known)
        case SimCLRConfig():
            known = {"temperature": config.temperature}
            if config.stop_gradient:
                known["against"] = [project("simclr", weights, view) for view in views]
        case MoCoV2Config():
            query_groups = key_groups = None
            if group:  # consecutive queries; each group of keys has images of all of these groups
                query_groups = torch.arange(len(batch.index)).view(-1, group)
                key_groups = query_groups.T.reshape(-1, group)
            known = {
                "temperature": config.temperature,
                "keys": [project("mocov2", state.encoder, view, key_groups) for view in views],
                "queue": state.queue,
                "symmetric": config.symmetric,
                "groups": query_groups,
            }
        case BYOLConfig():
            known["targets"] = [project("byol", state.encoder, view) for view in views]
        case SwAVConfig():
            queues = []
            if state.queue is not None and state.given >= config.queue:  # used only when full
                queues = [state.queue[:, view] for view in (0, 1)]
            settings: dict[str, Any] = {"epsilon": config.epsilon, "rounds": config.sinkhorn_rounds}
            known["temperature"] = config.temperature

            def codes(now: Weights) -> list[Tensor]:
                return related_formulas.codes(now, views, queues=queues, **settings)

            if not config.stop_gradient:
                return lambda now: related_formulas.swav(now, views, of=codes(now), **known)
            known["of"] = codes(weights)
    loss = getattr(related_formulas, config.name)
    return lambda now: loss(now, views, **known)


def check_gradients(method: Any, batch: Batch, loss: Callable[[Weights], Tensor]) -> Any:
    """Compare the loss and its gradient for each weight; return the method's output."""
    output = method(batch.views, batch.index)
    output.loss.backward()
    weights = {name: value.requires_grad_() for name, value in weights_of(method).items()}
    expected = loss(weights)
    expected.backward()
    assert output.loss.item() == pytest.approx(expected.item(), abs=2e-6)
    gradients = {name: p.grad for name, p in method.named_parameters() if p.grad is not None}
    assert gradients.keys() == trained_names(method)
    expected_gradients = {name: weights[name].grad for name in gradients}
    torch.testing.assert_close(gradients, expected_gradients, atol=2e-5, rtol=2e-5)
    return output


def trained_names(method: Any) -> set[str]:
    fixed = getattr(method.config, "predictor", "") == "fixed"
    return {name for name in weights_of(method) if not (fixed and name.startswith("predictor."))}


@pytest.mark.parametrize("case", ALL_CASES.values(), ids=ALL_CASES.keys())
def test_loss_and_gradients_equal_formulas(case: Case) -> None:
    """The target encoder has other weights, the queue is full, and all images were seen before.

    Each trained parameter is in one group; fixed parts and the encoder's copies are in no group.
    """
    method, batch = build_case(case), images_of(case)
    trained = {id(p) for name, p in method.named_parameters() if name in trained_names(method)}
    grouped = [id(p) for group in method.param_groups() for p in group.params]
    assert len(grouped) == len(trained) and set(grouped) == trained
    assert all(p.requires_grad == (id(p) in trained) for p in method.parameters())
    state = MethodState(case, method)
    state.fill(method)
    state.encoder = copied_weights_of(method) or weights_of(method)
    output = check_gradients(method, batch, formula_of(method, batch, state))
    if isinstance(case.config(), SimSiamConfig):
        z = formulas.encode(weights_of(method), batch.views[0], norm=method.config.head_bn)
        torch.testing.assert_close(output.embedding, z, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("group", [2, 4])
def test_key_bn_groups_differ_from_query_groups(group: int) -> None:
    """MoCo with BN over parts of the batch: shared statistics would let a key reveal its query."""
    case = RELATED["mocov2, parts"]
    method, batch = build_case(case, normed=True), images_of(case)
    state = MethodState(case, method)
    state.fill(method)
    step_of(method, sync_bn=False, bn_images=group)
    method.target[0].layer.weight.data.normal_()
    state.encoder = copied_weights_of(method)
    loss = formula_of(method, batch, state, group=group)
    check_gradients(method, batch, loss)
    same = formula_of(method, batch, state)
    assert abs(loss(weights_of(method)) - same(weights_of(method))) > 1e-3


STATEFUL_CASES = RELATED | {
    name: case
    for name, case in VARIANTS.items()
    if (case_config := case.config()).alternate_every != 1
    or case_config.target_average
    or case_config.encoder_momentum
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("case", STATEFUL_CASES.values(), ids=STATEFUL_CASES.keys())
def test_losses_and_state_equal_formulas_at_each_step(case: Case, accumulate: int) -> None:
    """Train for two epochs, with queues that wrap around and averages for each image.

    Momentum encoders match to almost the last bit, and BYOL's momentum increases to 1.
    """
    method = build_case(case)
    step, state, losses = step_of(method, accumulate=accumulate), MethodState(case, method), []
    for at in range(EPOCHS * STEPS):
        batch, weights = images_of(case, at), weights_of(method)
        state.begin(at, weights, copied_weights_of(method))
        parts = batch.chunks(accumulate)
        expected = [formula_of(method, part, state)(weights) for part in parts]
        losses.append(step(batch, at=at)[0].item())
        assert losses[-1] == pytest.approx(torch.stack(expected).mean().item(), abs=5e-6), at
        state.take(weights, parts, at)
        state.check(method, at)
        # Other values of ``alternate_every`` freeze the copy: see ``MethodState.begin``.
        if getattr(method.config, "alternate_every", 1) == 1:
            momentum, after = momentum_of(method.config, at), weights_of(method)
            copied = copied_weights_of(method)
            follows = {x: momentum * state.encoder[x] + (1 - momentum) * after[x] for x in copied}
            torch.testing.assert_close(copied, follows, atol=1e-12, rtol=1e-12)
    assert max(losses) - min(losses) > 1e-2


def momentum_of(config: Any, at: int) -> float:
    momentum: float = getattr(config, "encoder_momentum", 0.0)
    if getattr(config, "momentum_schedule", "constant") == "cosine":
        return related_formulas.momentum_at(momentum, at, EPOCHS * STEPS)
    return momentum


def test_mean_of_bfloat16_targets_is_not_rounded() -> None:
    """FastSiam's bfloat16 targets are means of rounded projections and are not rounded again."""
    case = VARIANTS["fastsiam 4"]
    method, batch = build_case(case).float(), images_of(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        zs = [method.projector(method.backbone(view.float())) for view in batch.views]
        ps = [method.predictor(z) for z in zs]
        loss = method(tuple(view.float() for view in batch.views), batch.index).loss.item()
    assert ps[0].dtype == torch.bfloat16
    targets = formulas.targets({view: z.double() for view, z in enumerate(zs)}, case.pairs)
    cosine = formulas.DISTANCES["cosine"]
    terms = [cosine(p.double(), target) for p, target in zip(ps, targets, strict=True)]
    assert loss == pytest.approx(torch.stack(terms).mean().item(), abs=1e-6)


def test_momentum_encoder_has_separate_bn_statistics() -> None:
    """Its statistics are those of its own activations, one view after the other."""
    case = RELATED["byol"]
    method = build_case(case)
    step = step_of(method)
    mean = torch.zeros(SMALL["projector_dim"], dtype=torch.float64)
    for at in range(STEPS):
        batch, copied = images_of(case, at), copied_weights_of(method)
        for view in batch.views:
            inputs = formulas.features(copied, view) @ copied["projector.0.weight"].T
            mean = 0.9 * mean + 0.1 * inputs.mean(0)
        step(batch, at=at)
        running_mean = method.target[1][1].running_mean
        torch.testing.assert_close(running_mean, mean, atol=1e-12, rtol=1e-7)
    assert (method.projector[1].running_mean - mean).abs().max() > 1e-3


@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
@pytest.mark.parametrize(("epochs", "frozen"), [(0.0, 0), (0.3, 1), (1.0, 3), (1.7, 5), (2.0, 6)])
def test_prototypes_are_frozen_for_frozen_epochs(
    epochs: float, frozen: int, optimizer: str
) -> None:
    """Prototypes do not move during the frozen steps, by gradients, weight decay or momentum."""
    case = Case({"prototypes": 8, "frozen_epochs": epochs}, SwAVConfig)
    method = build_case(case)
    step = step_of(method, optimizer=optimizer, weight_decay=0.1)
    weight = method.prototypes.weight
    for at in range(EPOCHS * STEPS):
        before = weight.detach().clone()
        step(images_of(case, at), at=at)
        still = at < frozen
        assert torch.equal(weight, before) == still, at
        assert (step.optimizer.state[weight]["momentum_buffer"] == 0).all() == still, at
