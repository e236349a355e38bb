"""Verdicts: every kind of claim with each outcome, on results with known intervals."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest

from fastsiam.study.catalogue import ORIGINAL, Claim, ClaimKind
from fastsiam.study.record import Result
from fastsiam.study.verdicts import (
    Outcome,
    Verdict,
    holm,
    interval,
    judge,
    judge_all,
)
from tests.study.results import record, result, row

HOLDS: Outcome = "holds"
NOT: Outcome = "contradicted"
OPEN: Outcome = "inconclusive"
Results = tuple[Result, ...]

REFERENCE = row(60, 61, 59)
"""Gains over the untrained network of 40, 41 and 39 points; a quarter of the mean is 10."""
TABLE = record()


def verdict_of(kind: ClaimKind, results: Results, other: Results = REFERENCE) -> Verdict:
    """Judge a claim about a row; ``other`` is the reference and the row it is compared with."""
    compared_row = "other" if kind in ("better", "worse", "alike") else ""
    rows = [
        replace(TABLE.rows[0], variant=variant, results=row_results)
        for variant, row_results in (("own", results), ("other", other))
    ]
    table = replace(TABLE, rows=tuple(rows), reference="other")
    return judge(Claim(kind, compared_row), rows[0], table)


def test_interval_uses_student_t() -> None:
    three = interval([1.0, 2.0, 3.0])
    assert three is not None and three.mean == 2
    assert three.high - 2 == pytest.approx(4.303 / sqrt(3), abs=1e-3)
    assert three.low + three.high == pytest.approx(4)
    assert interval([1.0]) is None and interval([]) is None
    two = interval([0.0, 2.0])
    assert two is not None and two.high == pytest.approx(1 + 12.7062)


def build_collapsed(seed: int) -> Result:
    return result(seed, 11, z_std=0.01, rank=1.2)


def losses(*rough: float) -> Results:
    """Build one result per value, with a loss that oscillates by it in the second half."""
    return tuple(
        result(seed, losses=[0.0, 9.0, 0.0, 9.0, *[-0.5, -0.5 - by] * 2])
        for seed, by in enumerate(rough)
    )


def low(centred: bool, *curve: float, rank: float = 40.0) -> Results:
    """Build a row of one run with this curve of z_std."""
    return (result(0, z_std=curve[-1], z_std_curve=curve, rank=rank, centred=centred),)


DEGENERATE, NOT_DEGENERATE = (
    result(seed, z_std=z_std, losses=(0.0, -0.5, -0.95)) for seed, z_std in ((0, 0.05), (1, 0.2))
)
"""Two runs whose loss approaches -1: z_std goes to 0 in the first, but not in the second."""
DIVERGED = tuple(result(seed, diverged=True) for seed in range(3))
CASES: tuple[tuple[Results, dict[ClaimKind, Outcome]], ...] = (
    ((build_collapsed(0), build_collapsed(1)), {"collapses": HOLDS, "stands": NOT}),
    ((build_collapsed(0),), {"collapses": HOLDS, "stands": NOT}),  # one seed is enough
    (row(60, 61), {"collapses": NOT, "stands": HOLDS}),
    ((build_collapsed(0), result(1)), {"collapses": OPEN, "stands": OPEN}),
    ((result(0, z_std=0.9, rank=3.9),), {"collapses": HOLDS, "stands": NOT}),  # low rank
    ((result(0, z_std=0.5, rank=4.0),), {"collapses": NOT, "stands": HOLDS}),  # on the thresholds
    # The effective rank of 4 dimensions cannot exceed 4; a collapse is below 2.
    ((replace(result(0, rank=2.5), dim=4),), {"stands": HOLDS}),
    ((replace(result(0, rank=1.9), dim=4),), {"stands": NOT}),
    # If no BN centres the projections, z_std may fall to half its first value; rank still counts.
    (low(True, 0.5, 0.3), {"stands": NOT}),
    (low(False, 0.5, 0.3), {"stands": HOLDS}),
    (low(False, 0.5, 0.3, rank=1.5), {"collapses": HOLDS}),
    (low(False, 0.5, 0.24), {"stands": NOT}),
    (low(False, 0.04, 0.11), {"stands": HOLDS}),  # already low at the first log line
    ((DEGENERATE,), {"degenerates": HOLDS}),  # loss to -1 and std to 0
    ((NOT_DEGENERATE, result(0, z_std=0.05)), {"degenerates": NOT}),
    ((DEGENERATE, NOT_DEGENERATE), {"degenerates": OPEN}),
    (DIVERGED[:1], {"collapses": OPEN, "stands": OPEN}),
    ((), {"collapses": OPEN, "stands": OPEN, "unstable": OPEN}),
    (row(50, 52, 51), {"works": HOLDS, "fails": NOT}),
    (row(23, 24, 22.5), {"works": HOLDS, "fails": HOLDS}),  # learns, but less than a quarter
    (row(17, 16, 17.2), {"works": NOT, "fails": HOLDS}),  # worse than untrained
    (row(28, 36, 27), {"works": OPEN, "fails": OPEN}),  # gains 8, 16, 7; threshold 10
    (row(60), {"works": OPEN, "fails": OPEN, "alike": OPEN}),
    ((*row(55, 56), DIVERGED[2]), {"works": OPEN, "fails": OPEN}),  # top-1 at chance
    (DIVERGED, {"works": NOT, "fails": HOLDS, "worse": HOLDS}),
    (row(62, 63, 61.2), {"better": HOLDS, "worse": NOT}),  # paired differences 2, 2, 2.2
    (row(58, 59, 56.8), {"better": NOT, "worse": HOLDS}),
    (row(61, 60, 61), {"better": OPEN, "worse": OPEN}),  # differences 1, -1, 2
    (row(60, 61, 59), {"better": OPEN, "worse": OPEN}),
    (row(99), {"better": OPEN, "worse": OPEN}),
    ((result(7, 99), result(8, 99)), {"better": OPEN, "worse": OPEN}),  # no common seeds
    (row(60.2, 61.1, 59.2), {"alike": HOLDS}),
    (row(63, 64, 62.1), {"alike": NOT}),
    (row(57, 58, 56.1), {"alike": NOT}),
    (row(61, 62.2, 59.5), {"alike": OPEN}),
    (losses(0.2, 0.21, 0.19), {"unstable": HOLDS}),
    (losses(0.1, 0.11, 0.1), {"unstable": NOT}),
    (losses(0.1, 0.2, 0.15), {"unstable": OPEN}),
    (losses(0.9), {"unstable": OPEN}),
    ((*losses(0.1, 0.1), DIVERGED[2]), {"unstable": HOLDS}),
    (DIVERGED[:1], {"unstable": HOLDS}),
)
"""Results of a row, and the outcome of each claim about it against ``REFERENCE``."""


def test_verdicts_of_every_kind() -> None:
    """For ``unstable``, the reference's loss changes by 0.1 between log lines."""
    for results, verdicts in CASES:
        for kind, outcome in verdicts.items():
            other = losses(0.1, 0.1, 0.1) if kind == "unstable" else REFERENCE
            assert verdict_of(kind, results, other).outcome == outcome, (kind, results)


def test_fails_needs_reference_that_learns() -> None:
    lost = (result(0, diverged=True), result(1, diverged=True))
    for reference in (row(20, 20, 20), row(20, 23, 20.1), row(15, 16, 14), lost):
        verdict = verdict_of("fails", row(20, 21, 22), reference)
        assert verdict.outcome == OPEN and "the reference itself" in verdict.reason


def test_seeds_that_diverged_in_both_rows_are_not_compared() -> None:
    """Both are at chance accuracy, which does not make them alike."""
    kinds: tuple[ClaimKind, ...] = ("alike", "better", "worse", "unstable")
    assert {verdict_of(kind, DIVERGED, DIVERGED).outcome for kind in kinds} == {OPEN}
    both = (*row(60, 61), DIVERGED[2])
    assert verdict_of("alike", both, both).outcome == HOLDS
    results, reference = row(23, 24, 22, 23, 24, 22), row(60, 61, 59, 60, 61, 59)
    lost = result(6, diverged=True)
    with_lost = verdict_of("fails", (*results, lost), (*reference, lost))
    assert with_lost == verdict_of("fails", results, reference) and with_lost.outcome == HOLDS


def test_roughness_ignores_diverged_reference_seed() -> None:
    smooth, lost = losses(0.1, 0.1, 0.1), replace(losses(0.1, 0.1, 0.9)[2], diverged=True)
    assert verdict_of("unstable", losses(0.2, 0.2, 0.2), (*smooth[:2], lost)).outcome == HOLDS


def test_holm_correction() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx({0.01: 0.03, 0.03: 0.06, 0.04: 0.06})
    assert holm([0.9, 0.5]) == {0.5: 1.0, 0.9: 1.0} and holm([]) == {}


def test_comparisons_are_holm_corrected() -> None:
    """Table 2 has six comparisons; a difference significant alone is not after correction."""
    base, smaller = row(60, 61, 59), row(55, 57, 51.5)
    assert verdict_of("worse", smaller, base).outcome == HOLDS
    verdicts = judge_all(record("batch", [smaller, *[base] * 6]))["eighth-batch"]
    verdict = dict(verdicts)[Claim("worse", "baseline")]
    assert verdict.outcome == OPEN and "corrected" in verdict.reason


def reproduction(
    simclr: Results, byol: Results, *, scale: str = "paper", epochs: int = 100
) -> list[Verdict]:
    """Judge SimCLR after 200 epochs (original: 66.6) and BYOL after 300 (72.5)."""
    rows = [simclr, row(), row(), row(), byol, row(), row()]
    verdicts = judge_all(replace(record("reproduction", rows), scale=scale, epochs=epochs))
    better, comparable = Claim("better", ORIGINAL), Claim("comparable", ORIGINAL)
    return [dict(verdicts["simclr-2x"])[better], dict(verdicts["byol-3x"])[comparable]]


def test_reproduction_is_compared_with_original() -> None:
    """Better: above the original. Comparable: above one point less than the original."""
    for simclr, byol, outcome in (
        (row(68.3, 68.4, 68.2), row(72.4, 72.5, 72.3), HOLDS),
        (row(65.3, 65.4, 65.2), row(70.4, 70.5, 70.3), NOT),
        (row(67.6, 66.6, 65.8), row(72.4, 71.4, 70.7), OPEN),
        (row(68.3), row(72.4), OPEN),  # one seed
        ((), (), OPEN),
    ):
        verdicts = reproduction(simclr, byol)
        assert [one.outcome for one in verdicts] == [outcome] * 2, (simclr, byol)
    assert reproduction(row(), row(78, 78.1, 77.9))[1].outcome == HOLDS


def test_original_is_not_compared_with_other_images_or_epochs() -> None:
    rows = row(68.3, 68.4, 68.2), row(72.4, 72.5, 72.3)
    for verdict in (*reproduction(*rows, scale="cifar"), *reproduction(*rows, epochs=50)):
        assert verdict.outcome == OPEN and verdict.comparison is None
        assert "no original result" in verdict.reason and "corrected" not in verdict.reason


def test_comparisons_with_original_are_holm_corrected() -> None:
    """Only tests count: a comparison without two seeds is no test."""
    simclr, byol = row(68.3, 68.8, 67.6), row(72.4, 71.4, 70.7)
    alone, both = reproduction(simclr, row(72.4)), reproduction(simclr, byol)
    assert alone[0].outcome == HOLDS and both[0].outcome == OPEN
    assert alone[0].comparison == both[0].comparison


def test_verdict_of_same_runs_is_independent_of_study() -> None:
    """The verdict does not depend on the study's other rows or its number of claims."""
    runs, verdicts = row(28, 32, 27), []
    for name, variant in (("predictor", "baseline"), ("batch", "baseline"), ("byol", "simsiam")):
        table = record(name)
        rows = tuple(
            replace(one, results=runs if one.variant == variant else row(9, 70, 30))
            for one in table.rows
        )
        verdicts.append(dict(judge_all(replace(table, rows=rows))[variant])[Claim("works")])
    assert verdicts[0].outcome == HOLDS and verdicts.count(verdicts[0]) == 3
