"""The table of a study: the paper's results, measured results, and verdicts on the claims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from fastsiam.environment import hardware
from fastsiam.markdown import format_mean, markdown
from fastsiam.study.catalogue import ORIGINAL, Claim
from fastsiam.study.record import RowRecord, StudyRecord
from fastsiam.study.verdicts import judge_all


def as_text(record: StudyRecord) -> str:
    """Format a study's table for a terminal: results, then the verdicts with their reasons."""
    heads, rows = cells(record)
    # The verdicts, in the last column, are in the reasons below.
    table = markdown(heads[:-1], [row[:-1] for row in rows])
    parts = [f"{record.title} ({record.source})", table, "\n".join(reasons(record))]
    return "\n\n".join(filter(None, [*parts, caption(record), _other_images(record)]))


def as_markdown(record: StudyRecord) -> str:
    """Format a study's table as Markdown, with the verdicts' reasons in a collapsed section."""
    items = "".join(f"<li>{escape(line)}</li>" for line in reasons(record))
    folded = f"<details><summary>The verdicts' figures</summary><ul>{items}</ul></details>"
    table = markdown(*cells(record))
    parts = [caption(record), _other_images(record), table, folded if items else ""]
    return "\n\n".join(filter(None, parts))


def cells(record: StudyRecord) -> tuple[list[str], list[list[str]]]:
    """Return the table's header and rows; results are mean ± standard deviation over seeds."""
    verdicts = judge_all(record)
    has_originals = any(row.original is not None for row in record.rows)
    columns: list[tuple[str, Callable[[RowRecord], str]]] = [
        ("", lambda row: row.title),
        ("setting", lambda row: row.setting or "as the recipe"),
        *([("original: linear top-1, %", lambda row: _figure(row.original))] * has_originals),
        ("paper: linear top-1, %", lambda row: _figure(row.paper)),
        (f"ours: {record.measure}, %", lambda row: format_mean([x.top1 for x in row.results], 1)),
        *([("ours: linear top-1, %", lambda row: format_mean(row.linear, 1))] * record.has_linear),
        ("seeds", _seeds),
        ("std", lambda row: format_mean([x.z_std for x in row.results], 2)),
        ("rank", lambda row: format_mean([x.rank for x in row.results], 1)),
        ("loss", lambda row: format_mean([x.loss for x in row.results], 3)),
        ("verdict", lambda row: "; ".join(
            f"{_claim_text(record, claim)}: {verdict.outcome}"
            for claim, verdict in verdicts[row.variant]
        )),
    ]  # fmt: skip
    heads = [head for head, _ in columns]
    return heads, [[cell(row) for _, cell in columns] for row in record.rows]


def reasons(record: StudyRecord) -> list[str]:
    """Return one line for each verdict: row, claim, outcome and reason."""
    verdicts = judge_all(record)
    return [
        f"{row.title}: {_claim_text(record, claim)}: {verdict.outcome} ({verdict.reason})"
        for row in record.rows
        for claim, verdict in verdicts[row.variant]
    ]


def caption(record: StudyRecord) -> str:
    """Return the caption: what the numbers measure, the machines, the date and the command."""
    images = sorted({one.images for one in record.every_result if one.images})
    images_text = " or ".join(f"{count:,}" for count in images)
    images_text = f" ({images_text} training images)" if images else ""
    seeds = f"the seeds {spelled_seeds(record.seeds) or 'that will be done'}"
    seeds = seeds if record.has_equal_seeds else "each row's seeds"
    facts = [f"Ours: {record.measure} of {record.network}{images_text}, {record.trained_epochs}"]
    if record.precisions:
        facts.append(f"precision: {' and '.join(record.precisions)}")
    facts.append(f"mean ± standard deviation over {seeds}")
    if record.has_linear:
        protocol = "cached features of central crops" if record.cached else "random crops and flips"
        facts.append(f"linear evaluation on {protocol}, at the best of several rates")
    if record.pixels is not None:
        untrained = format_mean([one.untrained for one in record.every_result], 1)
        facts.append(
            f"kNN of raw pixels: {record.pixels:.1f}%, of untrained networks: {untrained}%"
        )
    facts.append(f"chance is {record.chance:g}%")
    machines = " and ".join(dict.fromkeys(map(_machine, record.environments)))
    return (
        f"The paper's figures: {record.figure}. {'; '.join(facts)}. "
        f"{machines or 'no machine yet'}; {record.date}; `{record.command}`"
    )


def _other_images(record: StudyRecord) -> str:
    """Return a warning that names runs trained on other images than the first; "" if none did."""
    runs = {
        f"{row.title}, seed {one.seed}": one.images_digest
        for row in record.rows
        for one in row.results
        if one.images_digest
    }
    names = ", ".join(run for run in runs if runs[run] != next(iter(runs.values())))
    return f"Not comparable: trained on other images than the first run: {names}" if names else ""


def spelled_seeds(seeds: Sequence[int]) -> str:
    """Format sorted seeds: "0, 2, 3", or "0 to 9" if they are consecutive."""
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))


def _seeds(row: RowRecord) -> str:
    diverged = sum(one.diverged for one in row.results)
    return f"{len(row.results)}" + (f", {diverged} diverged" if diverged else "")


def _figure(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.1f}"


def _claim_text(record: StudyRecord, claim: Claim) -> str:
    """Format a claim, such as "better than 'SimCLR'"."""
    if not claim.than:
        return "does not collapse" if claim.kind == "stands" else claim.kind
    titles = {row.variant: repr(row.title) for row in record.rows} | {ORIGINAL: "the original"}
    preposition = "to" if claim.kind in ("alike", "comparable") else "than"
    return f"{claim.kind} {preposition} {titles[claim.than]}"


def _machine(environment: dict[str, Any]) -> str:
    return (
        f"{hardware(environment)}, fastsiam {environment['fastsiam']}, "
        f"torch {environment['packages']['torch']}"
    )
