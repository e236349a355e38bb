"""Verdicts on the paper's claims.

A claim *holds*, is *contradicted*, or *cannot be told* at this scale with these seeds.

Some claims are judged by counting seeds; if it is so in some of them, it cannot be told:

- **collapses**: at the end of every seed, z_std is below 0.5 or the effective rank below 4
  (``fastsiam.train.guard``, which warns of it in a run). **stands**, that is, does not collapse,
  is the reverse. Where no BN centres the projections z_std is below 1 from the start; then the
  bound is half of the untrained network's, or 0.1 if that is more. Runs of older versions did not
  measure it: theirs is half of the first log line's.
- **degenerates**: every seed ends with a loss below -0.9 and z_std below 0.1.

The others are judged by a mean over seeds, in Student's t test (two-sided) against a border; so
they need two seeds at least. *Gain* is top-1 after training minus top-1 of the same network
untrained (minus chance where that was not measured).

- **works**: the gain is above 0; below: contradicted. This depends on the row's own runs alone.
- **fails**: the gain is below a quarter of the gain of the study's reference row; above:
  contradicted. Unless the reference itself works, it cannot be told.
- **better**, **worse** than another row: the difference of top-1 is on that side of 0; on the
  other: contradicted.
- **alike** to another row: the difference is within 1 point either way; outside: contradicted.
- **unstable**: the mean absolute change of the loss from log line to log line, over the second half
  of the run, is more than 1.5 times the reference's; less: contradicted. It holds, too, if a seed
  diverged that did not diverge in the reference.

A row is compared with another one seed by seed; a seed that diverged in both is left out. Tests
that compare rows are corrected for their number in the study by Holm's method: the chance that any
of them holds or is contradicted by accident is 5%. Whether a row works is tested at 5% by itself,
so that the same runs get the same verdict in every study.

A seed that diverged, its loss not being finite, has the top-1 of chance. It says nothing about
collapse: "a model with a diverging loss, which is another pattern of failure, may also exhibit a
chance-level accuracy" (section 4.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import atan, cos, inf, pi, sin, sqrt
from statistics import fmean, stdev
from typing import Literal

from fastsiam.study.catalogue import Claim
from fastsiam.study.record import Result, StudyRecord
from fastsiam.train.guard import is_collapsed, lowest_spread

Outcome = Literal["holds", "contradicted", "cannot be told"]
Results = Sequence[Result]

LEVEL = 0.05
"""Of the tests: of their two sides together, and of all that compare rows of a study together."""
SHARE = 0.25
"""Of the reference's gain: less is failing."""
MARGIN = 1.0
"""Points of top-1 within which two rows are alike."""
ROUGHNESS = 1.5
"""Times the reference's change of the loss between log lines: more is unstable."""
DEGENERATE_LOSS, DEGENERATE_STD = -0.9, 0.1
"""Nearer to -1 and to 0 a run has degenerated."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a claim holds, and by which figures."""

    outcome: Outcome
    reason: str
    comparison: float | None = None
    """p of the test that compares two rows, before it is corrected; None where there is no such."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and the ends of its 95% confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        """Write it as ``mean [low, high]``."""
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def interval(values: Sequence[float]) -> Interval | None:
    """Return the 95% confidence interval of a mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = fmean(values)
    half = _quantile(len(values) - 1) * stdev(values) / sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def within(t: float, freedom: int) -> float:
    """Return the probability that Student's t is between -t and t.

    For whole degrees of freedom this is a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    angle, odd = atan(t / sqrt(freedom)), freedom % 2
    term, total = cos(angle) ** odd, 0.0
    for k in range(odd, freedom - 1, 2):
        if k > 1:
            term *= (k - 1) / k * cos(angle) ** 2
        total += term
    total *= sin(angle)
    return 2 / pi * (angle + total) if odd else total


@cache
def _quantile(freedom: int) -> float:
    """Return the t with which an interval covers 95%."""
    low, high = 1.0, 13.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < 1 - LEVEL else (low, middle)
    return low


def judge_all(record: StudyRecord) -> dict[str, list[tuple[Claim, Verdict]]]:
    """Judge each of the paper's claims on a study; by the variants' names."""
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
    """Return the p of tests, and what each is when all of them are judged together."""
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
    """Judge a claim on a row of a study by itself.

    Args:
        claim: what the paper says.
        row: name of the row's variant.
        rows: results of every row, by its variant's name; none where nothing is done.
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
    """Judge by whether something is so in every seed that came to its end, or in none."""
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
    beyond = [one.gain - SHARE * other.gain for one, other in _pairs(own, reference)]
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
        for one, other in _comparable(own, reference)
        if (of_one := roughness(one)) is not None and (of_other := roughness(other))
    ]
    return _by_mean(ratios, "loss {} times as rough", low=ROUGHNESS)


def roughness(result: Result) -> float | None:
    """Return the mean absolute change of the loss between log lines of the second half.

    None for fewer than two lines.
    """
    losses = result.loss_curve[len(result.loss_curve) // 2 :]
    return fmean(abs(b - a) for a, b in pairwise(losses)) if len(losses) > 1 else None


def _by_mean(
    values: Sequence[float], reason: str, *, low: float = -inf, high: float = inf
) -> Verdict:
    """Judge by whether the mean over seeds lies between two borders.

    Args:
        values: of the seeds.
        reason: has ``{}`` where the interval goes.
        low: the lower border.
        high: the upper border.
    """
    found = interval(values)
    if found is None:
        return Verdict("cannot be told", f"seeds to judge by: {len(values)}; it takes two")
    distance = min(abs(found.mean - border) for border in (low, high))
    error = stdev(values) / sqrt(len(values))
    t = distance / error if error else inf * distance if distance else 0.0
    p = 1 - within(t, len(values) - 1)
    outcome: Outcome = "holds" if low < found.mean < high else "contradicted"
    return Verdict(outcome if p < LEVEL else "cannot be told", reason.format(found), p)


def _pairs(own: Results, other: Results) -> list[tuple[Result, Result]]:
    """Return the results of the seeds that both rows have."""
    of_seed = {one.seed: one for one in other}
    return [(one, of_seed[one.seed]) for one in own if one.seed in of_seed]


def _comparable(own: Results, other: Results) -> list[tuple[Result, Result]]:
    """Return the pairs of which one at least did not diverge: two at chance are not alike."""
    return [pair for pair in _pairs(own, other) if not all(one.diverged for one in pair)]


def _range(values: Sequence[float | None], digits: int) -> str:
    there = [value for value in values if value is not None]
    low, high = f"{min(there):.{digits}f}", f"{max(there):.{digits}f}"
    return low if low == high else f"{low} to {high}"
