"""Reports of benchmark records: a page with charts, and the tables of a README.

Only reads records: imports neither torch nor any code that measures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fastsiam.bench import soak as soaks
from fastsiam.bench.cases import title_of
from fastsiam.bench.charts import chart, front_charts, plain_name
from fastsiam.bench.finding import finding
from fastsiam.bench.measurements import Record, read
from fastsiam.bench.tables import caption, differences, rows_of, table
from fastsiam.console import text_of
from fastsiam.errors import DataError
from fastsiam.files import (
    as_utf8,
    atomic_write,
    os_errors_as,
    require_local,
    value_errors_as_data_error,
)
from fastsiam.report.drawing import png
from fastsiam.report.page import Figure, Section, Table, flat, render

_OPENING = re.compile(r"<!-- (bench|study|soak): (\S+?)(?: ([^\s:]+))?(?:: (.+?))? -->")
"""The marker above a table: kind, path, case and rows."""
_TABLE = re.compile(r"^(<!-- (bench|study|soak):[^\n]*?-->)\n(.*?)^(<!-- /\2 -->)$", re.S | re.M)
"""An opening marker, the text below it, and the closing marker."""


def write_report(files: Sequence[Path], out: Path) -> list[Path]:
    """Write a page about records, its charts as pictures, and its tables as Markdown.

    Args:
        files: files of records.
        out: folder for ``index.html``, ``tables.md`` and a PNG of each chart; the case "peers" also
            gets an SVG for light and one for dark pages.

    Returns:
        The files that were written.

    Raises:
        DataError: a file cannot be read or has no records, or the folder cannot be written.
        FastSiamError: the folder is a URL.
    """
    require_local(out)
    runs = [read(file) for file in files]
    pictures: dict[str, bytes] = {}
    sections, tables, facts = [], [], []
    for number, (file, run) in enumerate(zip(files, runs, strict=True), 1):
        with value_errors_as_data_error(file):
            prefix = f"{number}-{plain_name(file.stem)}-" if len(files) > 1 else ""
            for case, records in _group_by(run, "case").items():
                figure = chart(records)
                case_pictures = {f"{prefix}{plain_name(case)}.png": png(figure)} if figure else {}
                pictures |= case_pictures
                if case == "peers":
                    front = front_charts(records)
                    pictures |= {f"{prefix}{name}": picture for name, picture in front.items()}
                title = f"{title_of(case)}{f' ({file})' if len(files) > 1 else ''}"
                sections.append(_section(title, records, case_pictures))
                tables.append(f"## {title}\n\n{records_block(records)}\n")
            machine = run[0].environment
            facts.append(f"{machine['cpu']}; fastsiam {machine['fastsiam']}; {run[0].date}")
    page = render("fastsiam bench", " / ".join(dict.fromkeys(facts)), sections)
    texts = {"index.html": page, "tables.md": "\n".join(tables)}
    contents = {name: as_utf8(text).encode() for name, text in texts.items()} | pictures
    with os_errors_as(DataError, f"cannot write the report to {out}"):
        for name, content in contents.items():
            with atomic_write(out / name) as temporary:
                temporary.write_bytes(content)
    return [out / name for name in contents]


def renew(readme: Path, root: Path, *, study_table: Callable[[Path], str]) -> list[str]:
    """Regenerate the tables in a Markdown file from records.

    A table and its caption are between the lines ``<!-- bench: PATH CASE -->`` and
    ``<!-- /bench -->``. CASE is optional if the file has only one; "finding" is the text that
    ``fastsiam bench`` ends with. ``<!-- bench: PATH CASE: NAME; NAME -->`` selects rows by name.
    ``<!-- study: PATH -->`` and ``<!-- /study -->`` enclose the table of a study's record; ``soak``
    works the same way.

    Args:
        readme: the Markdown file. Only its tables change.
        root: the folder that each PATH is relative to.
        study_table: returns the table of a study's record.

    Returns:
        "PATH CASE" of each table, as written in the file.

    Raises:
        DataError: a file or a case is missing, or a marker is not closed. Nothing is changed.
    """
    try:
        with os_errors_as(DataError, f"cannot read {readme}"):
            old_text = readme.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{readme} is not UTF-8 text") from error
    renewed: list[str] = []

    def table_of(match: re.Match[str]) -> str:
        opening = _OPENING.fullmatch(match[1])
        location = f"{readme}, line {old_text.count(chr(10), 0, match.start()) + 1}"
        if opening is None or re.search("^<!-- /?(bench|study|soak)", match[3], re.M):
            raise DataError(f"{location}: not a table marker, or not closed: {match[1]}")
        kind, path, case, rows = opening.groups()
        renewed.append(f"{path} {case}" if case else path)
        with value_errors_as_data_error(root / path):
            if kind == "study":
                block = study_table(root / path)
            elif kind == "soak":
                block = soaks.as_markdown(soaks.read_record(root / path))
            elif case == "finding":
                block = finding(read(root / path))
            else:
                block = records_block(_select_records(root / path, case, rows, location))
        return f"{match[1]}\n\n{block}\n\n{match[4]}"

    new_text = as_utf8(_TABLE.sub(table_of, old_text))
    if 2 * len(renewed) != len(re.findall(r"^<!-- /?(?:bench|study|soak)\b", old_text, re.M)):
        raise DataError(f"{readme}: a table marker is not closed, or not opened")
    if new_text != old_text:
        with os_errors_as(DataError, f"cannot write {readme}"), atomic_write(readme) as temporary:
            temporary.write_text(new_text, "utf-8")
    return renewed


def records_block(records: Sequence[Record]) -> str:
    """Return the table of a case with its caption, commands and notes on differences."""
    commands = ", ".join(f"`{command}`" for command in dict.fromkeys(r.command for r in records))
    parts = [f"{caption(records)}; {commands}", table(records), "\n".join(differences(records))]
    return "\n\n".join(filter(None, parts))


def _select_records(path: Path, case: str | None, rows: str | None, location: str) -> list[Record]:
    """Return the records of a case, or those of some rows, whose names semicolons separate."""
    cases = _group_by(read(path), "case")
    case_names = ", ".join(cases)
    if case is None and len(cases) > 1:
        raise DataError(f"{location}: name a case of {path}: {case_names}")
    if case and case not in cases:
        raise DataError(f"{location}: {path} has no case {case!r}, only {case_names}")
    records = cases[case or case_names]
    if not rows:
        return records
    by_name = _group_by(records, "name")
    names = [name.strip() for name in rows.split(";")]
    if missing := [name for name in names if name not in by_name]:
        raise DataError(f"{location}: no row {missing[0]!r}, only {'; '.join(by_name)}")
    return [one for name in names for one in by_name[name]]


def _group_by(records: Sequence[Record], attribute: str) -> dict[str, list[Record]]:
    """Group records by an attribute, in the order in which its values first appear."""
    groups: dict[str, list[Record]] = {}
    for one in records:
        groups.setdefault(getattr(one, attribute), []).append(one)
    return groups


def _section(title: str, records: Sequence[Record], pictures: Mapping[str, bytes]) -> Section:
    heads, rows = rows_of(records)
    details = []
    for one in records:
        origin = {"command": one.command, "date": one.date, "in the clock": one.in_the_clock}
        settings = {**origin, **one.config, **one.facts, **one.environment}
        text = "; ".join(f"{name} {text_of(value)}" for name, value in flat(settings).items())
        details.append((one.name, text))
    return Section(
        title=title,
        facts=caption(records),
        figures=[
            Figure(picture, "image/png", f"{title}: {Path(name).stem}")
            for name, picture in pictures.items()
        ],
        tables=[Table(rows, heads)],
        details=[Table(details)],
    )
