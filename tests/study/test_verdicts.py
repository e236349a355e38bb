"""Verdicts: every claim in each of its outcomes, by results whose intervals are known."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest

from fastsiam.study.catalogue import Claim, ClaimKind
from fastsiam.study.record import Result
from fastsiam.study.verdicts import (
    Outcome,
    Verdict,
    holm,
    interval,
    judge,
    judge_all,
    within,
)
from tests.study.results import record, result, row

HOLDS: Outcome = "holds"
NOT: Outcome = "contradicted"
OPEN: Outcome = "cannot be told"
Results = tuple[Result, ...]

REFERENCE = row(60, 61, 59)
"""Gains 40, 41 and 39: a quarter is 10."""


def judged(kind: ClaimKind, own: Results, other: Results = REFERENCE) -> Verdict:
    """Judge a claim on a row against the reference, which is the other row too."""
    than = "other" if kind in ("better", "worse", "alike") else ""
    return judge(Claim(kind, than), "own", {"own": own, "other": other}, reference="other")


def test_an_interval_is_students() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found is not None and found.mean == 2
    assert found.high - 2 == pytest.approx(4.303 / sqrt(3), abs=1e-3)
    assert found.low + found.high == pytest.approx(4)
    assert interval([1.0]) is None and interval([]) is None
    two = interval([0.0, 2.0])
    assert two is not None and two.high == pytest.approx(1 + 12.7062)


def test_students_distribution() -> None:
    """By the values that tables of it have."""
    for freedom, t in ((1, 12.7062), (2, 4.3027), (3, 3.1824), (10, 2.2281), (29, 2.0452)):
        assert within(t, freedom) == pytest.approx(0.95, abs=1e-5)
    assert within(2.7638, 10) == pytest.approx(0.98, abs=1e-5)
    assert within(0, 5) == 0 and within(float("inf"), 5) == within(float("inf"), 6) == 1


def collapsed(seed: int) -> Result:
    """Return a run that fell into one point."""
    return result(seed, 11, z_std=0.01, rank=1.2)


@pytest.mark.parametrize(
    ("own", "collapses", "stands"),
    [
        ((collapsed(0), collapsed(1)), HOLDS, NOT),
        ((collapsed(0),), HOLDS, NOT),  # one seed can tell
        (row(60, 61), NOT, HOLDS),
        ((collapsed(0), result(1)), OPEN, OPEN),
        ((result(0, z_std=0.9, rank=3.9),), HOLDS, NOT),  # few dimensions, whatever their spread
        ((result(0, z_std=0.5, rank=4.0),), NOT, HOLDS),  # the last that is no collapse
        ((result(0, diverged=True),), OPEN, OPEN),
        ((), OPEN, OPEN),
    ],
)
def test_collapse(own: Results, collapses: Outcome, stands: Outcome) -> None:
    assert judged("collapses", own).outcome == collapses
    assert judged("stands", own).outcome == stands


@pytest.mark.parametrize(
    ("own", "works", "fails"),
    [
        (row(50, 52, 51), HOLDS, NOT),
        (row(23, 24, 22.5), HOLDS, HOLDS),  # it learns, but less than a quarter
        (row(17, 16, 17.2), NOT, HOLDS),  # it unlearns
        (row(28, 36, 27), OPEN, OPEN),  # gains 8, 16, 7 about 10
        (row(60), OPEN, OPEN),
        ((*row(55, 56), result(2, diverged=True)), OPEN, OPEN),  # it has the top-1 of chance
        (tuple(result(seed, diverged=True) for seed in range(3)), NOT, HOLDS),
    ],
)
def test_gain(own: Results, works: Outcome, fails: Outcome) -> None:
    assert judged("works", own).outcome == works
    assert judged("fails", own).outcome == fails


def test_beside_a_reference_that_learns_nothing_nothing_fails() -> None:
    lost = (result(0, diverged=True), result(1, diverged=True))
    for reference in (row(20, 20, 20), row(20, 23, 20.1), row(15, 16, 14), lost):
        found = judged("fails", row(20, 21, 22), reference)
        assert found.outcome == OPEN and "the reference itself" in found.reason


@pytest.mark.parametrize(
    ("centred", "curve", "outcome"),
    [
        (True, (0.5, 0.3), NOT),
        (False, (0.5, 0.3), HOLDS),
        (False, (0.5, 0.24), NOT),
        (False, (0.04, 0.11), HOLDS),  # the first log line is a low of its own
    ],
)
def test_a_low_spread_from_the_beginning_is_no_collapse(
    centred: bool, curve: tuple[float, float], outcome: Outcome
) -> None:
    """Where no BN centres the projections, half of the first z_std is enough; the rank counts."""
    own = result(0, z_std=curve[-1], z_std_curve=curve, centred=centred)
    assert judged("stands", (own,)).outcome == outcome
    of_one_point = result(0, z_std=curve[-1], rank=1.5, z_std_curve=curve, centred=centred)
    assert judged("collapses", (of_one_point,)).outcome == HOLDS


def test_degeneration() -> None:
    """The loss goes to -1 and the std to 0, both."""
    losses = (0.0, -0.5, -0.95)
    point, spread = (result(0, z_std=z_std, losses=losses) for z_std in (0.05, 0.2))
    assert judged("degenerates", (point,)).outcome == HOLDS
    assert judged("degenerates", (spread, result(1, z_std=0.05))).outcome == NOT
    assert judged("degenerates", (point, spread)).outcome == OPEN


@pytest.mark.parametrize(
    ("own", "better", "worse"),
    [
        (row(62, 63, 61.2), HOLDS, NOT),  # paired: by 2, 2 and 2.2
        (row(58, 59, 56.8), NOT, HOLDS),
        (row(61, 60, 61), OPEN, OPEN),  # by 1, -1 and 2
        (row(60, 61, 59), OPEN, OPEN),
        (row(99), OPEN, OPEN),
        ((result(7, 99), result(8, 99)), OPEN, OPEN),  # other seeds pair with none
    ],
)
def test_order(own: Results, better: Outcome, worse: Outcome) -> None:
    assert judged("better", own).outcome == better
    assert judged("worse", own).outcome == worse


@pytest.mark.parametrize(
    ("own", "outcome"),
    [
        (row(60.2, 61.1, 59.2), HOLDS),
        (row(63, 64, 62.1), NOT),
        (row(57, 58, 56.1), NOT),
        (row(61, 62.2, 59.5), OPEN),
        (row(60), OPEN),
    ],
)
def test_likeness(own: Results, outcome: Outcome) -> None:
    assert judged("alike", own).outcome == outcome


def test_seeds_that_diverged_in_both_rows_are_not_compared() -> None:
    """They are at chance, both of them, which is no likeness."""
    lost = tuple(result(seed, diverged=True) for seed in range(3))
    kinds: tuple[ClaimKind, ...] = ("alike", "better", "worse", "unstable")
    assert {judged(kind, lost, lost).outcome for kind in kinds} == {OPEN}
    both = (*row(60, 61), result(2, diverged=True))
    assert judged("alike", both, both).outcome == HOLDS
    assert judged("worse", lost).outcome == HOLDS


def losses(*rough: float) -> Results:
    """Return runs whose loss goes up and down by so much over the second half, one for each."""
    return tuple(
        result(seed, losses=[0.0, 9.0, 0.0, 9.0, *[-0.5, -0.5 - by] * 2])
        for seed, by in enumerate(rough)
    )


@pytest.mark.parametrize(
    ("own", "outcome"),
    [
        (losses(0.2, 0.21, 0.19), HOLDS),
        (losses(0.1, 0.11, 0.1), NOT),
        (losses(0.1, 0.2, 0.15), OPEN),
        (losses(0.9), OPEN),
        ((*losses(0.1, 0.1), result(2, diverged=True)), HOLDS),
        ((result(0, diverged=True),), HOLDS),
        ((), OPEN),
    ],
)
def test_stability(own: Results, outcome: Outcome) -> None:
    assert judged("unstable", own, losses(0.1, 0.1, 0.1)).outcome == outcome


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx({0.01: 0.03, 0.03: 0.06, 0.04: 0.06})
    assert holm([0.9, 0.5]) == {0.5: 1.0, 0.9: 1.0} and holm([]) == {}


def test_comparisons_are_corrected_for_their_number() -> None:
    """Table 2 has six; a difference that would do by itself does not among them."""
    base, smaller = row(60, 61, 59), row(55, 57, 51.5)
    claim = Claim("worse", "baseline")
    rows = {"own": smaller, "baseline": base}
    assert judge(claim, "own", rows, reference="baseline").outcome == HOLDS
    found = dict(judge_all(record("batch", [smaller, *[base] * 6]))["eighth-batch"])[claim]
    assert found.outcome == OPEN and "corrected" in found.reason


def test_the_same_runs_work_in_every_study() -> None:
    """Whatever they are compared with, and in however many claims."""
    runs = row(28, 32, 27)
    outcomes = set()
    for name in ("predictor", "batch", "batch-norm", "symmetry", "byol"):
        table = record(name)
        rows = tuple(
            replace(one, results=runs if one.variant in ("baseline", "simsiam") else row(9, 70, 30))
            for one in table.rows
        )
        found = judge_all(replace(table, rows=rows))
        own = found.get("baseline") or found["simsiam"]
        outcomes.add(dict(own)[Claim("works")])
    assert len(outcomes) == 1 and outcomes.pop().outcome == HOLDS
