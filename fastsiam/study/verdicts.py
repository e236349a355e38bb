"""Verdicts on the paper's claims, by criteria that were written down before the runs.

A claim *holds*, is *contradicted*, or *cannot be told* at this scale with these seeds. A claim
about accuracy or about the loss is judged by a 95% confidence interval (Student's t) of a
difference, or ratio, that is paired over seeds; so it needs two seeds at least.

- **collapses**: at the end of every seed, z_std is below 0.5 or the effective rank below 4
  (``fastsiam.train.guard``, which warns of it in a run). In none: contradicted. In some: cannot
  be told. **stands**, that is, does not collapse, is the reverse. Where no BN centres the
  projections z_std is below 1 from the start; in place of 0.5 stands half of what it was at the
  first log line, or 0.1 if that is more. (So does the guard since it met methods without that BN;
  the rule was added after the runs of Table 3 and before those of the related methods.)
- *Gain* is top-1 after training minus top-1 of the same network untrained (minus chance where that
  was not measured). The study's reference row is what the paper compares with.
- **works**: a row's gain is above a quarter of the reference's gain, by the whole interval; wholly
  below: contradicted. **fails** is the reverse. Unless the reference itself gains, its whole
  interval being above 0, neither can be told.
- **better**, **worse** than another row: the interval of the difference of top-1 lies on that side
  of 0; on the other: contradicted. Here and below a seed that diverged in both rows is left out.
- **alike** to another row: the interval lies within 1 point either way; wholly outside:
  contradicted.
- **no better** than another row: the interval lies below 1 point; wholly above: contradicted.
- **diverges**: every seed's loss ceased to be finite; no seed's: contradicted.
- **unstable**: the mean absolute change of the loss from log line to log line, over the second half
  of the run, is more than 1.5 times the reference's, by the whole interval; or a seed diverged that
  did not diverge in the reference. Wholly below: contradicted.

A seed that diverged, its loss not being finite, has the top-1 of chance. It says nothing about
collapse: "a model with a diverging loss, which is another pattern of failure, may also exhibit a
chance-level accuracy" (section 4.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import fmean, stdev
from typing import Literal

from fastsiam.study.results import Result
from fastsiam.study.tables import Claim
from fastsiam.train.guard import is_collapsed, lowest_spread

Outcome = Literal["holds", "contradicted", "cannot be told"]

SHARE = 0.25
"""Of the reference's gain: more is working, less is failing."""
MARGIN = 1.0
"""Points of top-1 within which two rows are alike."""
ROUGHNESS = 1.5
"""Times the reference's change of the loss between log lines: more is unstable."""
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t for 95%, two-sided, with 1, 2, ... degrees of freedom; with more, the last is a
little too wide."""

Results = Sequence[Result]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a claim holds, and by which figures."""

    outcome: Outcome
    reason: str


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
    mean, t = fmean(values), _T[min(len(values) - 2, len(_T) - 1)]
    half = t * stdev(values) / sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def judge(claim: Claim, row: str, rows: Mapping[str, Results], *, reference: str) -> Verdict:
    """Judge a claim on a row of a study.

    Args:
        claim: what the paper says.
        row: name of the row's variant.
        rows: results of every row, by its variant's name; none where nothing is done.
        reference: name of the study's reference row.
    """
    own = rows.get(row, ())
    match claim.kind:
        case "collapses" | "stands":
            return _of_collapse(own, collapses=claim.kind == "collapses")
        case "works" | "fails":
            return _of_gain(own, rows.get(reference, ()), works=claim.kind == "works")
        case "better" | "worse":
            return _of_order(own, rows.get(claim.than, ()), better=claim.kind == "better")
        case "alike":
            return _of_likeness(own, rows.get(claim.than, ()))
        case "no better":
            return _of_no_help(own, rows.get(claim.than, ()))
        case "unstable":
            return _of_stability(own, rows.get(reference, ()))
        case "diverges":
            return _of_divergence(own)


def _of_collapse(own: Results, *, collapses: bool) -> Verdict:
    ended = [
        (one, one.z_std, one.rank) for one in own if one.z_std is not None and one.rank is not None
    ]
    if not ended:
        return _unknown("no seed came to its end")
    fallen = [one for one, spread, rank in ended if _is_collapsed(one, spread, rank)]
    said = (
        f"{len(fallen)} of {len(ended)} seeds collapsed; "
        f"std {_range([spread for _, spread, _ in ended], 2)}, "
        f"rank {_range([rank for *_, rank in ended], 1)}"
    )
    if 0 < len(fallen) < len(ended):
        return _unknown(said)
    return Verdict("holds" if bool(fallen) == collapses else "contradicted", said)


def _is_collapsed(one: Result, spread: float, rank: float) -> bool:
    bound = lowest_spread(one.z_std_curve[0], centred=one.centred)
    return is_collapsed(spread, rank, batch=one.batch, bound=bound)


def _of_gain(own: Results, reference: Results, *, works: bool) -> Verdict:
    pairs = _pairs(own, reference)
    beyond = interval([one.gain - SHARE * other.gain for one, other in pairs])
    gained = interval([other.gain for _, other in pairs])
    if beyond is None or gained is None:
        return _too_few(pairs)
    said = (
        f"gain {fmean(one.gain for one, _ in pairs):.2f} points; minus a quarter of the "
        f"reference's ({SHARE * gained.mean:.2f}): {beyond}"
    )
    if gained.low <= 0:
        return _unknown(f"the reference's own gain is not above 0: {gained}; {said}")
    return _by_side(beyond, 0, above=works, said=said)


def _of_order(own: Results, other: Results, *, better: bool) -> Verdict:
    pairs, sign = _comparable(own, other), 1 if better else -1
    found = interval([sign * (one.top1 - two.top1) for one, two in pairs])
    if found is None:
        return _too_few(pairs)
    said = f"{'better' if better else 'worse'} by {found} points"
    return _by_side(found, 0, above=True, said=said)


def _of_likeness(own: Results, other: Results) -> Verdict:
    pairs = _comparable(own, other)
    found = interval([one.top1 - two.top1 for one, two in pairs])
    if found is None:
        return _too_few(pairs)
    said = f"differs by {found} points"
    if found.low >= -MARGIN and found.high <= MARGIN:
        return Verdict("holds", said)
    if found.low > MARGIN or found.high < -MARGIN:
        return Verdict("contradicted", said)
    return _unknown(said)


def _of_no_help(own: Results, other: Results) -> Verdict:
    pairs = _comparable(own, other)
    found = interval([one.top1 - two.top1 for one, two in pairs])
    if found is None:
        return _too_few(pairs)
    return _by_side(found, MARGIN, above=False, said=f"differs by {found} points")


def _of_divergence(own: Results) -> Verdict:
    if not own:
        return _unknown("no seed came to its end")
    lost = sum(one.diverged for one in own)
    said = f"{lost} of {len(own)} seeds diverged"
    if 0 < lost < len(own):
        return _unknown(said)
    return Verdict("holds" if lost else "contradicted", said)


def _of_stability(own: Results, reference: Results) -> Verdict:
    lost = {one.seed for one in own if one.diverged}
    if lost - {one.seed for one in reference if one.diverged}:
        return Verdict("holds", f"{len(lost)} of {len(own)} seeds diverged")
    ratios = [
        of_one / of_other
        for one, other in _comparable(own, reference)
        if (of_one := roughness(one)) is not None and (of_other := roughness(other))
    ]
    found = interval(ratios)
    if found is None:
        return _too_few(ratios)
    return _by_side(found, ROUGHNESS, above=True, said=f"loss {found} times as rough")


def roughness(result: Result) -> float | None:
    """Return the mean absolute change of the loss between log lines of the second half.

    None for fewer than two lines.
    """
    losses = result.loss_curve[len(result.loss_curve) // 2 :]
    return fmean(abs(b - a) for a, b in pairwise(losses)) if len(losses) > 1 else None


def _pairs(own: Results, other: Results) -> list[tuple[Result, Result]]:
    """Return the results of the seeds that both rows have."""
    of_seed = {one.seed: one for one in other}
    return [(one, of_seed[one.seed]) for one in own if one.seed in of_seed]


def _comparable(own: Results, other: Results) -> list[tuple[Result, Result]]:
    """Return the pairs of which one at least did not diverge: two at chance are not alike."""
    return [pair for pair in _pairs(own, other) if not all(one.diverged for one in pair)]


def _by_side(found: Interval, border: float, *, above: bool, said: str) -> Verdict:
    """Judge an interval that should lie above a border, or below it."""
    if found.low > border or found.high < border:
        return Verdict("holds" if (found.low > border) == above else "contradicted", said)
    return _unknown(said)


def _unknown(reason: str) -> Verdict:
    return Verdict("cannot be told", reason)


def _too_few(pairs: Sequence[object]) -> Verdict:
    if not pairs:
        return _unknown("no seed of both rows can be compared")
    return _unknown(f"{len(pairs)} seed of both rows: an interval takes two")


def _range(values: Sequence[float], digits: int) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"
