"""Verdicts on the paper's claims: each *holds*, is *contradicted*, or *cannot be told*.

docs/study.md lists the criteria. **collapses**, **stands** (does not collapse) and **degenerates**
are judged by counting seeds; they cannot be told if the seeds differ. The others are judged by a
mean over seeds, with a two-sided t test against a bound. Rows are compared seed by seed, without
seeds that diverged in both, and these tests are corrected for their number in the study (Holm).

A seed diverged if its loss was not finite. It counts with the top-1 of chance, but not as collapse:
"a model with a diverging loss, which is another pattern of failure, may also exhibit a chance-level
accuracy" (section 4.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, sqrt
from statistics import fmean, stdev
from typing import Literal

from scipy.special import stdtr, stdtrit

from fastsiam.study.catalogue import Claim
from fastsiam.study.record import Result, StudyRecord
from fastsiam.train.guard import is_collapsed, lowest_spread

Outcome = Literal["holds", "contradicted", "cannot be told"]
Results = Sequence[Result]

LEVEL = 0.05
"""Significance level of the two-sided tests; for comparisons of rows, of all tests of a study."""
SHARE = 0.25
"""Share of the reference's gain below which a row fails."""
MARGIN = 1.0
"""Largest difference of top-1 between rows that are alike, in percentage points."""
ROUGHNESS = 1.5
"""Factor on the reference's change of the loss between log lines above which a row is unstable."""
DEGENERATE_LOSS, DEGENERATE_STD = -0.9, 0.1
"""Loss and z_std below which a run is degenerate."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a claim, and its reason."""

    outcome: Outcome
    reason: str
    comparison: float | None = None
    """p of a test that compares two rows, before correction; None for other verdicts."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and the ends of its 95% confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return ``mean [low, high]``."""
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def interval(values: Sequence[float]) -> Interval | None:
    """Return the 95% confidence interval of a mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = fmean(values)
    quantile = float(stdtrit(len(values) - 1, 1 - LEVEL / 2))
    half = quantile * stdev(values) / sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def judge_all(record: StudyRecord) -> dict[str, list[tuple[Claim, Verdict]]]:
    """Judge all claims of the paper about a study; return the verdicts by the variants' names."""
    rows = {row.variant: row.results for row in record.rows}
    found = {
        row.variant: [
            (claim, judge(claim, row.variant, rows, reference=record.reference))
            for claim in row.claims
        ]
        for row in record.rows
    }
    tests = [one.comparison for row in found.values() for _, one in row]
    corrected = holm([p for p in tests if p is not None])
    return {
        name: [(claim, _corrected(verdict, corrected)) for claim, verdict in row]
        for name, row in found.items()
    }


def holm(tests: Sequence[float]) -> dict[float, float]:
    """Return the corrected p of each test's p, by Holm's method."""
    corrected: dict[float, float] = {}
    highest = 0.0
    for place, p in enumerate(sorted(tests)):
        highest = max(highest, min(1.0, p * (len(tests) - place)))
        corrected.setdefault(p, highest)
    return corrected


def _corrected(verdict: Verdict, corrected: Mapping[float, float]) -> Verdict:
    if verdict.comparison is None:
        return verdict
    p = corrected[verdict.comparison]
    reason = f"{verdict.reason}; p {verdict.comparison:.2g}, corrected {p:.2g}"
    outcome = verdict.outcome if p < LEVEL else "cannot be told"
    return replace(verdict, outcome=outcome, reason=reason)


def judge(claim: Claim, row: str, rows: Mapping[str, Results], *, reference: str) -> Verdict:
    """Judge a claim about a row of a study, without correction for other tests.

    Args:
        claim: the paper's claim.
        row: name of the row's variant.
        rows: results of each row by its variant's name; rows without results may be missing.
        reference: name of the study's reference row.
    """
    own = rows.get(row, ())
    match claim.kind:
        case "collapses" | "stands":
            return _by_count(own, _is_collapsed, wanted=claim.kind == "collapses")
        case "degenerates":
            return _by_count(own, _is_degenerate, wanted=True)
        case "works":
            return _works(own)
        case "fails":
            return _fails(own, rows.get(reference, ()))
        case "unstable":
            return _is_unstable(own, rows.get(reference, ()))
        case _:
            return _compared(claim, own, rows.get(claim.than, ()))


def _by_count(own: Results, is_so: Callable[[Result], bool], *, wanted: bool) -> Verdict:
    """Judge by whether a condition is true in all finished seeds, in none, or in some."""
    ended = [one for one in own if None not in (one.z_std, one.rank, one.loss)]
    if not ended:
        return Verdict("cannot be told", "no seed came to its end")
    count = sum(map(is_so, ended))
    reason = (
        f"{count} of {len(ended)} seeds; loss {_range([one.loss for one in ended], 2)}, "
        f"std {_range([one.z_std for one in ended], 2)}, "
        f"rank {_range([one.rank for one in ended], 1)}"
    )
    if 0 < count < len(ended):
        return Verdict("cannot be told", reason)
    return Verdict("holds" if bool(count) == wanted else "contradicted", reason)


def _is_collapsed(one: Result) -> bool:
    assert one.z_std is not None and one.rank is not None
    first = one.z_std_curve[0] if one.initial_std is None else one.initial_std
    bound = lowest_spread(first, centred=one.centred)
    return is_collapsed(one.z_std, one.rank, batch=one.batch, bound=bound)


def _is_degenerate(one: Result) -> bool:
    assert one.z_std is not None and one.loss is not None
    return one.loss < DEGENERATE_LOSS and one.z_std < DEGENERATE_STD


def _works(own: Results) -> Verdict:
    verdict = _by_mean([one.gain for one in own], "gain {} points", low=0)
    return replace(verdict, comparison=None)


def _fails(own: Results, reference: Results) -> Verdict:
    reference_works = _works(reference)
    if reference_works.outcome != "holds":
        return Verdict("cannot be told", f"the reference itself: {reference_works.reason}")
    beyond = [one.gain - SHARE * other.gain for one, other in _comparable(own, reference)]
    return _by_mean(beyond, "gain minus a quarter of the reference's {} points", high=0)


def _compared(claim: Claim, own: Results, other: Results) -> Verdict:
    differences = [one.top1 - two.top1 for one, two in _comparable(own, other)]
    low = {"better": 0.0, "alike": -MARGIN}.get(claim.kind, -inf)
    high = {"worse": 0.0, "alike": MARGIN}.get(claim.kind, inf)
    return _by_mean(differences, "differs by {} points", low=low, high=high)


def _is_unstable(own: Results, reference: Results) -> Verdict:
    lost = {one.seed for one in own if one.diverged}
    if lost - {one.seed for one in reference if one.diverged}:
        return Verdict("holds", f"{len(lost)} of {len(own)} seeds diverged")
    ratios = [
        of_one / of_other
        for one, other in _pairs(own, reference)
        if not other.diverged
        and (of_one := roughness(one)) is not None
        and (of_other := roughness(other))
    ]
    return _by_mean(ratios, "loss {} times as rough", low=ROUGHNESS)


def roughness(result: Result) -> float | None:
    """Return the mean absolute change of the loss between log lines in the run's second half."""
    losses = result.loss_curve[len(result.loss_curve) // 2 :]
    return fmean(abs(b - a) for a, b in pairwise(losses)) if len(losses) > 1 else None


def _by_mean(
    values: Sequence[float], reason: str, *, low: float = -inf, high: float = inf
) -> Verdict:
    """Judge by whether the mean over seeds lies between two bounds.

    Args:
        values: one for each seed.
        reason: text with ``{}`` for the confidence interval.
        low: the lower bound.
        high: the upper bound.
    """
    found = interval(values)
    if found is None:
        return Verdict("cannot be told", f"seeds to judge by: {len(values)}; it takes two")
    distance = min(abs(found.mean - border) for border in (low, high))
    error = stdev(values) / sqrt(len(values))
    t = distance / error if error else inf * distance if distance else 0.0
    p = 2 * float(stdtr(len(values) - 1, -t))
    outcome: Outcome = "holds" if low < found.mean < high else "contradicted"
    return Verdict(outcome if p < LEVEL else "cannot be told", reason.format(found), p)


def _pairs(own: Results, other: Results) -> list[tuple[Result, Result]]:
    """Return the results of the seeds that both rows have."""
    of_seed = {one.seed: one for one in other}
    return [(one, of_seed[one.seed]) for one in own if one.seed in of_seed]


def _comparable(own: Results, other: Results) -> list[tuple[Result, Result]]:
    """Return the pairs in which at most one diverged: two diverged seeds are not comparable."""
    return [pair for pair in _pairs(own, other) if not all(one.diverged for one in pair)]


def _range(values: Sequence[float | None], digits: int) -> str:
    there = [value for value in values if value is not None]
    low, high = f"{min(there):.{digits}f}", f"{max(there):.{digits}f}"
    return low if low == high else f"{low} to {high}"
