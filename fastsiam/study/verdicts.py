"""Verdicts on the paper's claims: each *holds*, is *contradicted*, or is *inconclusive*.

docs/study.md describes the criteria and the tests. The claim "stands" means "does not collapse".

A seed diverged if its loss was not finite. Its top-1 accuracy counts as chance, but divergence is
not collapse: "a model with a diverging loss, which is another pattern of failure, may also exhibit
a chance-level accuracy" (section 4.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, sqrt
from statistics import fmean, stdev
from typing import Literal

from scipy.special import stdtr, stdtrit

from fastsiam.study.catalogue import ORIGINAL, Claim
from fastsiam.study.record import Result, RowRecord, StudyRecord
from fastsiam.train.guard import is_collapsed, lowest_spread

Outcome = Literal["holds", "contradicted", "inconclusive"]
Results = Sequence[Result]

LEVEL = 0.05
"""Significance level of the two-sided tests; family-wise for the comparisons of rows in a study."""
SHARE = 0.25
"""A row fails if its gain is below this fraction of the reference's gain."""
MARGIN = 1.0
"""Rows are alike if their top-1 differs by less than this many percentage points.

A row is comparable to the original if it is less than this below it.
"""
ROUGHNESS = 1.5
"""A row is unstable if its loss changes this many times as much as the reference's."""
DEGENERATE_LOSS, DEGENERATE_STD = -0.9, 0.1
"""A run is degenerate if its loss and z_std are both below these values."""
ORIGINAL_SCALE = ("paper", 100)
"""Scale, and number of epochs of its base recipe, at which rows are compared with the original."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a claim, and its reason."""

    outcome: Outcome
    reason: str
    comparison: float | None = None
    """Uncorrected p-value of a test that compares a row with another, or with the original."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds with its 95% confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return ``mean [low, high]``."""
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def interval(values: Sequence[float]) -> Interval | None:
    """Return the mean with its 95% confidence interval; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = fmean(values)
    quantile = float(stdtrit(len(values) - 1, 1 - LEVEL / 2))
    half = quantile * stdev(values) / sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def judge_all(record: StudyRecord) -> dict[str, list[tuple[Claim, Verdict]]]:
    """Judge all of the paper's claims about a study; return the verdicts by variant."""
    verdicts = {
        row.variant: [(claim, judge(claim, row, record)) for claim in row.claims]
        for row in record.rows
    }
    tests = [one.comparison for row in verdicts.values() for _, one in row]
    corrected = holm([p for p in tests if p is not None])
    return {
        name: [(claim, _corrected(verdict, corrected)) for claim, verdict in row]
        for name, row in verdicts.items()
    }


def holm(tests: Sequence[float]) -> dict[float, float]:
    """Correct p-values by Holm's method; return a mapping from uncorrected to corrected."""
    corrected: dict[float, float] = {}
    highest = 0.0
    for index, p in enumerate(sorted(tests)):
        highest = max(highest, min(1.0, p * (len(tests) - index)))
        corrected.setdefault(p, highest)
    return corrected


def _corrected(verdict: Verdict, corrected: Mapping[float, float]) -> Verdict:
    if verdict.comparison is None:
        return verdict
    p = corrected[verdict.comparison]
    reason = f"{verdict.reason}; p {verdict.comparison:.2g}, corrected {p:.2g}"
    outcome = verdict.outcome if p < LEVEL else "inconclusive"
    return replace(verdict, outcome=outcome, reason=reason)


def judge(claim: Claim, row: RowRecord, record: StudyRecord) -> Verdict:
    """Judge a claim about a row of a study, without correction for multiple tests."""
    rows = {one.variant: one.results for one in record.rows}
    results, reference_results = row.results, rows.get(record.reference, ())
    match claim.kind:
        case "collapses" | "stands":
            return _by_count(results, _is_collapsed, expected=claim.kind == "collapses")
        case "degenerates":
            return _by_count(results, _is_degenerate, expected=True)
        case "works":
            return _works(results)
        case "fails":
            reference_works = _works(reference_results)
            if reference_works.outcome != "holds":
                return Verdict("inconclusive", f"the reference itself: {reference_works.reason}")
            pairs = _pairs(results, reference_results)
            excess = [one.gain - SHARE * other.gain for one, other in pairs]
            return _by_mean(excess, "gain minus a quarter of the reference's {} points", high=0)
        case "unstable":
            return _is_unstable(results, reference_results)
    if claim.than != ORIGINAL:
        pairs = _pairs(results, rows.get(claim.than, ()))
        differences = [one.top1 - other.top1 for one, other in pairs]
    elif (record.scale, record.epochs) == ORIGINAL_SCALE and isinstance(row.original, float):
        differences = [one.top1 - row.original for one in results]  # a constant in the test
    else:
        return Verdict(
            "inconclusive", "no original result with this scale's images, measure and epochs"
        )
    low = {"better": 0.0, "alike": -MARGIN, "comparable": -MARGIN}.get(claim.kind, -inf)
    high = {"worse": 0.0, "alike": MARGIN}.get(claim.kind, inf)
    return _by_mean(differences, "differs by {} points", low=low, high=high)


def _by_count(results: Results, predicate: Callable[[Result], bool], *, expected: bool) -> Verdict:
    """Judge by how many seeds meet a condition: all, some or none. Diverged seeds do not count."""
    results = [one for one in results if None not in (one.z_std, one.rank, one.loss)]
    if not results:
        return Verdict("inconclusive", "no seed came to its end")
    count = sum(map(predicate, results))
    reason = (
        f"{count} of {len(results)} seeds; loss {_range([one.loss for one in results], 2)}, "
        f"std {_range([one.z_std for one in results], 2)}, "
        f"rank {_range([one.rank for one in results], 1)}"
    )
    if 0 < count < len(results):
        return Verdict("inconclusive", reason)
    return Verdict("holds" if bool(count) == expected else "contradicted", reason)


def _is_collapsed(one: Result) -> bool:
    assert one.z_std is not None and one.rank is not None
    first = one.z_std_curve[0] if one.initial_std is None else one.initial_std
    bound = lowest_spread(first, centred=one.centred)
    dim = inf if one.dim is None else one.dim
    return is_collapsed(one.z_std, one.rank, batch=one.batch, dim=dim, bound=bound)


def _is_degenerate(one: Result) -> bool:
    assert one.z_std is not None and one.loss is not None
    return one.loss < DEGENERATE_LOSS and one.z_std < DEGENERATE_STD


def _works(results: Results) -> Verdict:
    verdict = _by_mean([one.gain for one in results], "gain {} points", low=0)
    return replace(verdict, comparison=None)


def _is_unstable(results: Results, reference: Results) -> Verdict:
    diverged_seeds = {one.seed for one in results if one.diverged}
    if diverged_seeds - {one.seed for one in reference if one.diverged}:
        return Verdict("holds", f"{len(diverged_seeds)} of {len(results)} seeds diverged")
    pairs = [pair for pair in _pairs(results, reference) if not pair[1].diverged]
    changes = [(_loss_changes(one), _loss_changes(other)) for one, other in pairs]
    ratios = [fmean(one) / fmean(other) for one, other in changes if one and any(other)]
    return _by_mean(ratios, "loss {} times as rough", low=ROUGHNESS)


def _loss_changes(result: Result) -> list[float]:
    """Return the absolute changes of the loss between log lines in a run's second half."""
    losses = result.loss_curve[len(result.loss_curve) // 2 :]
    return [abs(b - a) for a, b in pairwise(losses)]


def _by_mean(
    values: Sequence[float], reason: str, *, low: float = -inf, high: float = inf
) -> Verdict:
    """Judge by whether the mean of one value per seed lies between two bounds.

    The verdict's reason is ``reason`` with the confidence interval in place of ``{}``.
    """
    estimate = interval(values)
    if estimate is None:
        return Verdict("inconclusive", f"seeds to judge by: {len(values)}; it takes two")
    distance = min(abs(estimate.mean - border) for border in (low, high))
    error = stdev(values) / sqrt(len(values))
    t = distance / error if error else inf * distance if distance else 0.0
    p = 2 * float(stdtr(len(values) - 1, -t))
    outcome: Outcome = "holds" if low < estimate.mean < high else "contradicted"
    return Verdict(outcome if p < LEVEL else "inconclusive", reason.format(estimate), p)


def _pairs(results: Results, other_results: Results) -> list[tuple[Result, Result]]:
    """Pair the results of two rows by seed.

    Seeds that only one row has, or that diverged in both rows, cannot be compared.
    """
    of_seed = {one.seed: one for one in other_results}
    pairs = [(one, of_seed[one.seed]) for one in results if one.seed in of_seed]
    return [(one, two) for one, two in pairs if not (one.diverged and two.diverged)]


def _range(values: Sequence[float | None], digits: int) -> str:
    numbers = [value for value in values if value is not None]
    low, high = f"{min(numbers):.{digits}f}", f"{max(numbers):.{digits}f}"
    return low if low == high else f"{low} to {high}"
