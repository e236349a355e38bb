"""Tables of benchmark records, as lists of cells and as Markdown, with captions and notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastsiam.bench.libraries import PEERS
from fastsiam.bench.measurements import Record
from fastsiam.environment import hardware
from fastsiam.markdown import markdown

Column = tuple[str, Callable[[Record], str]]
"""A heading, and a function that formats a record's cell."""


def rows_of(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of a table, with one row per record.

    Empty columns are left out. If records have different baselines or ceilings, the cells name
    them.
    """
    has_several_cases = len({one.case for one in records}) > 1
    columns: list[Column] = [
        ("case", lambda one: one.case if has_several_cases else ""),
        ("", lambda one: one.name),
        *_SPEEDS,
        *_comparisons(records),
        *_REST,
    ]
    texts = [(head, [show(one) for one in records]) for head, show in columns]
    filled_columns = [(head, cells) for head, cells in texts if any(cells)]
    heads = [head for head, _ in filled_columns]
    return heads, [list(row) for row in zip(*(cells for _, cells in filled_columns), strict=True)]


def table(records: Sequence[Record]) -> str:
    """Format records as a Markdown table; see ``rows_of``."""
    return markdown(*rows_of(records))


def caption(records: Sequence[Record]) -> str:
    """Return a line that says how a table was measured, and on which machine."""
    first = records[0]
    packages = first.environment["packages"]
    own_version = f"fastsiam {first.environment['fastsiam']}"
    names = {"torch", "torchvision", "pillow", "ffcv", "nvidia-dali-cuda120", "nvidia-dali-cuda130"}
    versions = ", ".join([own_version, *(f"{x} {packages[x]}" for x in packages if x in names)])
    images = {one.images for one in records if one.images}
    images_text = f"{images.pop():,} images per repeat, " if len(images) == 1 else ""
    repeats = sorted({one.n for one in records})
    order = "consecutive" if any("apart" in one.facts for one in records) else "interleaved"
    counted = f"medians of {' or '.join(map(str, repeats))} {order} repeats"
    return (
        f"{images_text}{counted if repeats != [1] else 'one repeat'}; "
        f"{hardware(first.environment)}; {versions}; {first.date}"
    )


def differences(records: Sequence[Record]) -> list[str]:
    """Describe how the work of other libraries differs, as items of a Markdown list."""
    notes = {peer.title: peer.differs for peer in PEERS.values()}
    names: dict[tuple[str, str], list[str]] = {}
    for one in records:
        if "differs" in one.facts:
            text = f"(version {one.facts['version']}): {notes.get(one.name, one.facts['differs'])}"
            names.setdefault((one.name.partition(",")[0], text), []).append(one.name)
    return [
        f"- {group[0] if len(group) == 1 else library} {text}"
        for (library, text), group in names.items()
    ]


def number(value: float) -> str:
    """Format a number to two or three significant digits, or from 100 on as an integer."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 10 else f"{value:.1f}"


def _comparisons(records: Sequence[Record]) -> list[Column]:
    """Return the columns of ratios. If all records share a baseline, the heading names it."""
    baselines, ceilings = (
        {getattr(one, attribute) for one in records} - {""} for attribute in ("baseline", "ceiling")
    )
    baseline = baselines.pop() if len(baselines) == 1 else ""
    ceiling = ceilings.pop() if len(ceilings) == 1 else ""

    def ratio_text(one: Record) -> str:
        if one.ratio is None:
            return ""
        return number(one.ratio) + ("" if baseline else f" x {one.baseline}")

    def share(one: Record) -> str:
        if one.share_of_ceiling is None:
            return ""
        return f"{one.share_of_ceiling:.0%}" + ("" if ceiling else f" of {one.ceiling}")

    return [
        (f"times {baseline}" if baseline else "compared", ratio_text),
        (f"share of {ceiling}" if ceiling else "of the ceiling", share),
    ]


def _spread(one: Record) -> str:
    if one.n == 1:
        return "once"
    return f"±{one.spread:.0%}" + (" (unsteady)" if one.unsteady else "")


def _fact(name: str, form: str = "") -> Callable[[Record], str]:
    """Return a function that formats a fact of a record, empty if the record lacks it."""
    return lambda one: format(one.facts[name], form) if name in one.facts else ""


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f}" if count else ""


_SPEEDS: list[Column] = [
    ("ns per pixel", _fact("ns", ".2f")),
    ("cycles per pixel", _fact("cycles", ".2f")),
    ("images/s", lambda one: number(one.images_per_second) if one.images else ""),
    ("spread", _spread),
]
_REST: list[Column] = [
    ("rate", _fact("rate")),
    ("first batch (s)", _fact("first_batch", ".1f")),
    ("first epoch (s)", _fact("first_epoch", ".2f")),
    ("later epochs (s)", _fact("later_epoch", ".2f")),
    ("waiting for data", _fact("data_wait", ".0%")),
    ("top-1 (%)", _fact("top1", ".2f")),
    ("mean shift", _fact("moved", ".0%")),
    ("distance of neighbours", _fact("parted", ".2%")),
    ("largest class per batch, mean", _fact("usual", ".1%")),
    ("largest class per batch, maximum", _fact("largest", ".1%")),
    ("MB/s", _fact("megabytes_per_second", ",.0f")),
    (
        "CPU ms per image",
        lambda one: number(1000 * one.cpu_seconds_per_image) if one.images else "",
    ),
    ("CPU ms per batch", _fact("cpu_ms_of_a_batch", ",.3f")),
    ("% of step", _fact("percent_of_step", ".2g")),
    ("cores busy", lambda one: f"{one.cores_busy:.1f}"),
    ("host MB", lambda one: _megabytes(one.host_bytes)),
    ("GPU MB", lambda one: _megabytes(one.gpu_bytes)),
    ("peak GPU MB", lambda one: _megabytes(one.facts.get("peak_gpu_bytes", 0))),
    ("GPU busy", _fact("gpu_busy", ".0%")),
    ("longest gap (% of step)", _fact("gap_of_a_step", ".1%")),
]
