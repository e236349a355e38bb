"""What was measured, for people: a page with charts, and the tables of a README.

It reads records and measures nothing: neither torch nor what times is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastsiam.bench import soak as soaks
from fastsiam.bench.cases import title_of
from fastsiam.bench.charts import charts, front_charts, plain_name, svg
from fastsiam.bench.finding import finding
from fastsiam.bench.records import Record, grouped, read
from fastsiam.bench.tables import caption, differences, rows_of, table
from fastsiam.errors import DataError
from fastsiam.files import explained, written_whole
from fastsiam.report.drawing import png
from fastsiam.report.page import Figure, Section, Table, flat, render
from fastsiam.study import record as studies_of
from fastsiam.study import table as studies

_OPEN = re.compile(r"<!--\s*bench:\s*(\S+)(?:\s+([^\s:]+))?(?::\s*(.+?))?\s*-->")
_OPEN_WHOLE = re.compile(r"<!--\s*(study|soak):\s*(\S+)\s*-->")
_WHOLE: dict[str, Callable[[Path], str]] = {
    "study": lambda path: studies.as_markdown(studies_of.read_record(path)),
    "soak": lambda path: soaks.as_markdown(soaks.read_record(path)),
}
"""What is shown of a record that has a file to itself."""
_CLOSE = {kind: f"<!-- /{kind} -->" for kind in ("bench", *_WHOLE)}


def write_report(files: Sequence[Path], out: Path) -> list[Path]:
    """Write a page about records, its charts as pictures, and its tables as Markdown.

    Args:
        files: of records. Those of one run, with a file for each case, belong together.
        out: the folder that gets ``index.html``, ``tables.md`` and a PNG for each chart; for the
            case "peers" also an SVG for light and one for dark pages.

    Returns:
        What was written.

    Raises:
        DataError: a file cannot be read or holds no records, or the folder cannot be written.
    """
    files = list(dict.fromkeys(files))
    runs = [_records(file) for file in files]
    pictures: dict[str, bytes] = {}
    sections, tables = [], []
    for file, prefix, records in zip(files, _prefixes(files), runs, strict=True):
        run = [
            one for other in runs for one in other if other is records or _same_run(one, records)
        ]
        for case, of_case in grouped(records, lambda one: one.case).items():
            drawn = {f"{prefix}{n}.png": png(f) for n, f in charts(of_case, run).items()}
            pictures |= drawn
            if case == "peers":
                pictures |= {f"{prefix}{n}.svg": svg(f) for n, f in front_charts(of_case).items()}
            title = f"{title_of(case)}{f' ({file})' if len(files) > 1 else ''}"
            sections.append(_section(title, of_case, drawn))
            tables.append(f"## {title}\n\n{records_block(of_case)}\n")
    facts = dict.fromkeys(
        f"{_where(one)}; fastsiam {one.environment['fastsiam']}; {one.date}" for one, *_ in runs
    )
    whole = render("fastsiam bench", " / ".join(facts), sections)
    written = {"index.html": whole.encode(), "tables.md": "\n".join(tables).encode(), **pictures}
    with explained(DataError, f"cannot write the report to {out}"):
        for name, content in written.items():
            with written_whole(out / name) as temporary:
                temporary.write_bytes(content)
    return [out / name for name in written]


def renew(readme: Path, root: Path) -> list[str]:
    """Make the tables in a text anew out of the records.

    A table and its caption stand between the lines ``<!-- bench: PATH CASE -->`` and
    ``<!-- /bench -->``. CASE may be left out if the file holds one; "finding" is the sentence that
    ``fastsiam bench`` ends with. ``<!-- bench: PATH CASE: NAME; NAME -->`` takes some rows alone.
    Between ``<!-- study: PATH -->`` and ``<!-- /study -->`` stands the table of a study's record,
    and likewise that of a soak.

    Args:
        readme: the text. All else in it stays as it is, byte for byte.
        root: the folder that each PATH starts from.

    Returns:
        "PATH CASE" of each table, as the text has it.

    Raises:
        DataError: a file or a case is not there, or a marker is not closed. Nothing is changed.
    """
    before = _text(readme)
    lines: list[str] = []
    renewed: list[str] = []
    opened, close = 0, ""
    for number, line in enumerate(before.splitlines(keepends=True), 1):
        place, mark = f"{readme}, line {number}", line.rstrip()
        if mark in _CLOSE.values():
            if mark != close:
                raise DataError(f"{place}: {mark} closes nothing")
            opened, close = 0, ""
        elif kind := next((kind for kind in _CLOSE if mark.startswith(f"<!-- {kind}:")), ""):
            if opened:
                break
            name, block = (_bench if kind == "bench" else _whole)(mark, root, place)
            end = "\r\n" if line.endswith("\r\n") else "\n"
            lines += [line, end, *(f"{text}{end}" for text in block.split("\n")), end]
            renewed.append(name)
            opened, close = number, _CLOSE[kind]
            continue
        if not opened:
            lines.append(line)
    if opened:
        raise DataError(f"{readme}, line {opened}: no {close} follows this marker")
    after = "".join(lines)
    if after != before:
        with explained(DataError, f"cannot write {readme}"), written_whole(readme) as temporary:
            temporary.write_bytes(after.encode())
    return renewed


def _bench(mark: str, root: Path, place: str) -> tuple[str, str]:
    """Return what a marker of measurements names, and what is to follow it."""
    found = _OPEN.fullmatch(mark)
    if not found:
        raise DataError(f"{place}: a marker is <!-- bench: PATH CASE -->, not {mark}")
    path, case = found[1], found[2] or ""
    name = f"{path} {case}".rstrip()
    if case == "finding":
        return name, finding(_records(root / path))
    records = _case(root / path, case, place)
    return name, records_block(_rows(records, found[3], place) if found[3] else records)


def _whole(mark: str, root: Path, place: str) -> tuple[str, str]:
    """Return what a marker of a study or a soak names, and what is to follow it."""
    found = _OPEN_WHOLE.fullmatch(mark)
    if not found:
        kind = mark.removeprefix("<!-- ").partition(":")[0]
        raise DataError(f"{place}: a marker is <!-- {kind}: PATH -->, not {mark}")
    return found[2], _WHOLE[found[1]](root / found[2])


def records_block(records: Sequence[Record]) -> str:
    """Return the table of a case, what it was measured on and how, and what is not comparable."""
    commands = ", ".join(f"`{command}`" for command in dict.fromkeys(r.command for r in records))
    parts = [f"{caption(records)}; {commands}", table(records), "\n".join(differences(records))]
    return "\n\n".join(filter(None, parts))


def _case(path: Path, case: str, place: str) -> list[Record]:
    cases = grouped(_records(path), lambda one: one.case)
    there = ", ".join(cases)
    if not case and len(cases) > 1:
        raise DataError(f"{place}: say which case of {path}: {there}")
    if case and case not in cases:
        raise DataError(f"{place}: {path} has no case {case!r}, only {there}")
    return cases[case or there]


def _rows(records: list[Record], names: str, place: str) -> list[Record]:
    """Return the records of some names, which semicolons part, in the names' order."""
    there = {one.name: one for one in records}
    wanted = [name.strip() for name in names.split(";")]
    if missing := [name for name in wanted if name not in there]:
        raise DataError(f"{place}: no row {missing[0]!r}, only {'; '.join(there)}")
    return [there[name] for name in wanted]


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a text in UTF-8") from error


def _records(path: Path) -> list[Record]:
    records = read(path)
    if not records:
        raise DataError(f"{path} holds no records of fastsiam bench")
    return records


def _same_run(one: Record, records: Sequence[Record]) -> bool:
    return any(
        (one.command, one.date, one.environment) == (own.command, own.date, own.environment)
        for own in records
    )


def _prefixes(files: Sequence[Path]) -> list[str]:
    """Return what the names of each file's charts begin with: nothing, if there is one file."""
    if len(files) == 1:
        return [""]
    for parts in (1, 2):
        names = ["-".join(file.with_suffix("").parts[-parts:]) for file in files]
        names = [f"{plain_name(name)}-" for name in names]
        if len(set(names)) == len(names):
            return names
    return [f"{number}-{name}" for number, name in enumerate(names, 1)]


def _where(one: Record) -> str:
    machine = one.environment
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    return f"{machine['cores']} cores of {machine['cpu']}, {gpus}"


def _section(title: str, records: Sequence[Record], drawn: Mapping[str, bytes]) -> Section:
    heads, rows = rows_of(records)
    facts = [(one.name, _said(one.facts)) for one in records if one.facts]
    return Section(
        title=title,
        facts=caption(records),
        figures=[
            Figure(picture, "image/png", f"{title}: {Path(name).stem}")
            for name, picture in drawn.items()
        ],
        columns=False,
        tables=[Table(rows, heads)],
        details=[Table(_conditions(records)), Table(facts)],
    )


def _conditions(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return what the figures depend on; where records differ in it, with their names."""
    told: dict[str, Callable[[Record], str]] = {
        "command": lambda one: one.command,
        "date": lambda one: one.date,
        "in the clock": lambda one: one.in_the_clock,
        "settings": lambda one: _said(one.config),
        "machine": _where,
        "versions": lambda one: _said(
            {k: v for k, v in one.environment.items() if k not in {"cpu", "cores", "gpus"}}
        ),
    }
    rows = []
    for label, tell in told.items():
        groups = grouped(records, tell)
        for text, of in groups.items():
            names = f" ({'; '.join(one.name for one in of)})" if len(groups) > 1 else ""
            if text:
                rows.append((f"{label}{names}", text))
    return rows


def _said(values: Mapping[str, Any]) -> str:
    return "; ".join(f"{name} {_value(value)}" for name, value in flat(values).items())


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)
