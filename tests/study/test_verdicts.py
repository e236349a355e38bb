"""Verdicts: every claim in each of its outcomes, by results whose intervals are known."""

from __future__ import annotations

import math

import pytest

from fastsiam.study.catalogue import Claim, ClaimKind
from fastsiam.study.record import Result
from fastsiam.study.verdicts import Outcome, Verdict, interval, judge, roughness
from tests.study.results import result, row

HOLDS: Outcome = "holds"
NOT: Outcome = "contradicted"
OPEN: Outcome = "cannot be told"
Results = tuple[Result, ...]

REFERENCE = row(60, 61, 59)
"""Gains 40, 41 and 39: a quarter is 10."""


def judged(kind: ClaimKind, own: Results, other: Results = REFERENCE) -> Verdict:
    """Judge a claim on a row against the reference, which is the other row too."""
    than = "other" if kind in ("better", "worse", "alike", "no better") else ""
    return judge(Claim(kind, than), "own", {"own": own, "other": other}, reference="other")


def test_an_interval_is_students() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found is not None and found.mean == 2
    assert found.high - 2 == pytest.approx(4.303 / math.sqrt(3), abs=1e-3)
    assert found.low + found.high == pytest.approx(4)
    assert interval([1.0]) is None and interval([]) is None
    two = interval([0.0, 2.0])
    assert two is not None and two.high == pytest.approx(1 + 12.706)
    many = interval([0.0, 1.0] * 40)
    assert many is not None and many.high - 0.5 == pytest.approx(2.042 * 0.0563, abs=1e-3)


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
        ((result(0, z_std=0.49),), HOLDS, NOT),
        ((result(0, z_std=0.5, rank=4.0),), NOT, HOLDS),  # the last that is none
        ((result(0, diverged=True),), OPEN, OPEN),
        ((collapsed(0), result(1, diverged=True)), HOLDS, NOT),
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
        (row(21, 22, 20), NOT, HOLDS),
        (row(28, 36, 27), OPEN, OPEN),  # gains 8, 16, 7 about 10
        (row(60), OPEN, OPEN),
        ((), OPEN, OPEN),
        ((*row(55, 56), result(2, diverged=True)), OPEN, OPEN),  # it has the top-1 of chance
        (tuple(result(seed, diverged=True) for seed in range(3)), NOT, HOLDS),
    ],
)
def test_gain(own: Results, works: Outcome, fails: Outcome) -> None:
    assert judged("works", own).outcome == works
    assert judged("fails", own).outcome == fails


@pytest.mark.parametrize(
    ("centred", "curve", "outcome"),
    [
        (True, (0.5, 0.3), NOT),
        (False, (0.5, 0.3), HOLDS),
        (False, (0.5, 0.24), NOT),
        (False, (0.04, 0.11), HOLDS),  # the first log line is a low of its own
        (False, (0.04, 0.09), NOT),
        (False, (1.0, 0.49), NOT),
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


def test_the_reference_is_judged_by_itself() -> None:
    rows = {"other": REFERENCE}
    assert judge(Claim("works"), "other", rows, reference="other").outcome == HOLDS


def test_a_reference_that_learns_nothing_tells_nothing() -> None:
    lost = (result(0, diverged=True), result(1, diverged=True))
    kinds: tuple[ClaimKind, ...] = ("works", "fails")
    for reference in (row(20, 20, 20), row(20, 23, 20.1), row(15, 16, 14), lost):
        for own in (row(50, 51, 52), reference):
            for kind in kinds:
                found = judged(kind, own, reference)
                assert found.outcome == OPEN and "own gain is not above 0" in found.reason


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


def test_differences_are_paired() -> None:
    """Seeds that differ by far more than the rows do hide nothing."""
    found = judged("better", row(41, 61.1, 81), row(40, 60, 80))
    assert found.outcome == HOLDS and "1.03" in found.reason


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


def test_roughness_is_of_the_second_half() -> None:
    assert [roughness(one) for one in losses(0.1, 0.2)] == pytest.approx([0.1, 0.2])
    assert roughness(result(0, losses=[1.0])) is None


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


@pytest.mark.parametrize(
    ("own", "outcome"),
    [
        (row(60, 61, 59.2), HOLDS),
        (row(50, 51, 49), HOLDS),
        (row(63, 64.1, 62), NOT),
        (row(63, 60, 59), OPEN),
        (row(60), OPEN),
        ((), OPEN),
    ],
)
def test_no_better(own: Results, outcome: Outcome) -> None:
    assert judged("no better", own).outcome == outcome


@pytest.mark.parametrize(
    ("own", "outcome"),
    [
        ((result(0, diverged=True), result(1, diverged=True)), HOLDS),
        ((result(0, diverged=True),), HOLDS),  # one seed can tell
        (row(60, 11), NOT),
        ((result(0, diverged=True), result(1)), OPEN),
        ((), OPEN),
    ],
)
def test_divergence(own: Results, outcome: Outcome) -> None:
    assert judged("diverges", own).outcome == outcome
