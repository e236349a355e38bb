"""Every variant of SimSiam and FastSiam against the paper's formulas in float64 numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fastsiam.config import SimSiamConfig
from fastsiam.methods import Output
from fastsiam.methods.simsiam_variants import SimSiamVariant
from fastsiam.views.batch import Batch
from tests.methods import formulas
from tests.methods.formulas import Array, Pairs, Weights
from tests.methods.linear import (
    BATCH,
    IMAGES,
    STEPS,
    arrays,
    batch_of,
    build,
    step_of,
    views_of,
)
from tests.methods.variants import VARIANTS, Variant

EVERY = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
KEEPS = {
    name: v
    for name, v in VARIANTS.items()
    if v.config().alternate_every != 1 or v.config().target_average
}


def of(variant: Variant, **settings: Any) -> SimSiamVariant:
    """Build a variant with small heads."""
    method: SimSiamVariant = build(
        variant.config(projector_layers=2, dim=6, predictor_dim=3, **settings)
    )
    return method


def by_formula(
    config: SimSiamConfig, pairs: Pairs, weights: Weights, views: Sequence[Array], against: Any
) -> float:
    """Return the loss of some weights with given targets, or with their own."""
    how = {"norm": config.head_bn, "similarity": config.similarity}
    return formulas.loss(weights, views, pairs, **how, against=against)


def targets_of(
    config: SimSiamConfig, pairs: Pairs, weights: Weights, views: Sequence[Array], rows: Array
) -> list[Array]:
    """Return the targets that some weights give, moving averages if there are any."""
    zs = {view: formulas.encoded(weights, x, norm=config.head_bn) for view, x in enumerate(views)}
    if not config.target_average:
        return formulas.targets(zs, pairs)
    momentum = config.target_average
    return [formulas.moved(rows, [zs[view] for view in of], momentum) for _, of in pairs]


@EVERY
def test_loss_and_gradients(variant: Variant) -> None:
    """With other weights in the frozen copy, and with averages of images that were seen before."""
    method, config = of(variant), variant.config()
    weights, frozen = arrays(method), arrays(method, copied=True)
    assert bool(frozen) == (config.alternate_every != 1 or config.encoder_momentum > 0)
    if config.target_average:
        method.averages.copy_(torch.nn.functional.normalize(torch.randn_like(method.averages)))
    batch = batch_of(variant.views)
    views, rows = views_of(batch), np.zeros(0)
    if config.target_average:
        rows = method.averages.numpy()[batch.index]
    output: Output = method(batch.views, batch.index)
    output.loss.backward()

    against = None
    if config.stop_gradient:
        against = targets_of(config, variant.pairs, frozen or weights, views, rows)

    def loss(changed: Weights) -> float:
        return by_formula(config, variant.pairs, changed, views, against)

    assert output.loss.item() == pytest.approx(loss(weights), abs=1e-6)
    z = formulas.encoded(weights, views[0], norm=config.head_bn)
    np.testing.assert_allclose(output.embedding.numpy(), z, rtol=1e-9, atol=1e-12)
    expected = formulas.gradient(loss, weights)
    if config.predictor == "fixed":
        expected = {k: v for k, v in expected.items() if not k.startswith("predictor.")}
    found = {name: p.grad.numpy() for name, p in method.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, slopes in expected.items():
        np.testing.assert_allclose(found[name], slopes, atol=2e-6, rtol=1e-5, err_msg=name)


def test_the_mean_of_views_is_not_rounded_to_half_precision() -> None:
    """FastSiam's targets under bfloat16: of rounded projections, but no further rounded."""
    method, batch = of(VARIANTS["fastsiam 4"]).float(), batch_of(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        zs = [method.projector(method.backbone(view.float())) for view in batch.views]
        ps = [method.predictor(z) for z in zs]
        found = method(tuple(view.float() for view in batch.views), batch.index).loss.item()
    assert ps[0].dtype == torch.bfloat16
    z = {view: one.detach().double().numpy() for view, one in enumerate(zs)}
    p = [one.detach().double().numpy() for one in ps]
    of_each = formulas.targets(z, VARIANTS["fastsiam 4"].pairs)
    terms = [formulas.DISTANCES["cosine"](a, b) for a, b in zip(p, of_each, strict=True)]
    assert found == pytest.approx(np.mean(terms), abs=1e-6)


Taken = tuple[Weights, Batch, float, Array | None]
"""A step: the weights before it, its batch, its loss, the images' averages after it."""


def run(method: SimSiamVariant, views: int, *, accumulate: int = 1) -> list[Taken]:
    """Take the steps of two epochs."""
    step, found = step_of(method, accumulate=accumulate), list[Taken]()
    for at in range(2 * STEPS):
        weights, batch = arrays(method), batch_of(views, at)
        loss, _ = step(batch, at=at)
        rows = method.averages.numpy().copy() if method.config.target_average else None
        found.append((weights, batch, loss.item(), rows))
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("variant", KEEPS.values(), ids=KEEPS.keys())
def test_what_is_kept_over_steps(variant: Variant, accumulate: int) -> None:
    """Targets are of the weights before the stretch; averages are of each image's own rows."""
    method, config, pairs = of(variant), variant.config(), variant.pairs
    every = config.alternate_every or STEPS
    taken = run(method, variant.views, accumulate=accumulate)
    averages = np.zeros((IMAGES, method.dim))
    for at, (weights, batch, loss, rows) in enumerate(taken):
        before = taken[at - at % every][0]  # the weights as they were when the stretch began
        sources, losses, after = (before, weights), [0.0, 0.0], averages.copy()
        for part in batch.chunks(accumulate):
            views, index = views_of(part), part.index.numpy()
            for which, source in enumerate(sources):
                against = targets_of(config, pairs, source, views, averages[index])
                losses[which] += by_formula(config, pairs, weights, views, against) / accumulate
            seen = sorted({view for _, of in pairs for view in of})
            zs = [formulas.encoded(before, views[view], norm=config.head_bn) for view in seen]
            after[index] = formulas.moved(averages[index], zs, config.target_average)
        assert loss == pytest.approx(losses[0], abs=2e-6), at
        assert at % every == 0 or abs(loss - losses[1]) > 2e-5, at
        if rows is not None:
            averages = after
            np.testing.assert_allclose(rows, averages, atol=1e-6, err_msg=str(at))
            assert (np.abs(rows).sum(1) > 0).sum() == min(IMAGES, (at + 1) * BATCH)


@EVERY
def test_what_moves_in_a_step(variant: Variant) -> None:
    """All that is trained, and no more: no fixed predictor, no frozen copy, no unseen image."""
    method, config = of(variant), variant.config()
    step, batch = step_of(method), batch_of(variant.views)
    before = {name: value.clone() for name, value in method.state_dict().items()}
    step(batch, at=0)
    now = method.state_dict()
    moved = {name for name, _ in method.named_parameters() if not now[name].equal(before[name])}
    still = ("frozen.",) if config.predictor == "trained" else ("frozen.", "predictor.")
    trained = {name for name, _ in method.named_parameters() if not name.startswith(still)}
    follows = {name for name in moved if name.startswith("frozen.")}
    assert bool(follows) == (config.encoder_momentum > 0)
    if config.alternate_every in (0, 2):
        assert any(name.startswith("frozen.") for name, _ in method.named_parameters())
    assert moved - follows == trained
    of_groups = {id(p) for group in method.param_groups() for p in group.params}
    assert of_groups == {id(p) for name, p in method.named_parameters() if name in trained}
    if config.target_average:
        seen = (now["averages"] != 0).any(1).nonzero().flatten()
        assert torch.equal(seen, batch.index.sort().values)
    if config.alternate_every == 2:
        step(batch_of(variant.views, 1), at=1)
        for name, value in method.frozen.named_parameters():
            own = ("backbone" if name[0] == "0" else "projector") + name[1:]
            assert torch.equal(value, method.state_dict()[own]), name
