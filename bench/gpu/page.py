"""The page of a campaign: what was expected beside what was found, and what is not done yet."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree  # of our own tests  # nosec B405

from fastsiam.bench.gpu.expected import Found, table
from fastsiam.bench.gpu.stages import Setup, Stage, pytest_results_of, records_of
from fastsiam.bench.records import read
from fastsiam.bench.report import records_block
from fastsiam.errors import DataError
from fastsiam.files import written_for_user
from fastsiam.report.markdown import markdown
from fastsiam.training.log import read_metrics

_LINES = 25
"""Of the output of a stage that failed."""


def write_page(setup: Setup, stages: Sequence[Stage], status: Mapping[str, str]) -> Path:
    """Write ``page.md`` into the campaign's folder; return its path.

    Args:
        setup: of the campaign.
        stages: all of them.
        status: of those that were begun.

    Raises:
        FastSiamError: the page cannot be written.
    """
    page = setup.out / "page.md"
    found = _found(setup, stages)
    parts = [
        "# What a GPU says" if setup.gpu else "# What a CPU says: everything small, for trying out",
        _room(),
        setup.float32_batch_note,
        "## Expected, and measured",
        table(found, gpu=setup.gpu_name),
        "## Stages",
        markdown(
            ["stage", "", "command"],
            [
                [one.name, status.get(one.name, "not yet"), f"python {' '.join(one.arguments)}"]
                for one in stages
            ],
        ),
        *_tests(setup, stages),
        *(_log(setup, name) for name, how in status.items() if how != "done"),
    ]
    for name, records in found.records.items():
        parts += [f"## {name}", records_block(records)]
    if evaluations := [line for line in found.metrics if line["kind"] == "knn"]:
        cells = [
            [f"{line['epoch']:g}", f"{line['top1']:.2f}", str(line["k"]), str(line["temperature"])]
            for line in evaluations
        ]
        parts += ["## kNN on CIFAR-10", markdown(["epoch", "top-1", "k", "T"], cells)]
    with written_for_user(page) as temporary:
        temporary.write_text("\n\n".join(filter(None, parts)) + "\n")
    return page


def _found(setup: Setup, stages: Sequence[Stage]) -> Found:
    records = {}
    for one in stages:
        with contextlib.suppress(DataError):  # none yet, or not whole
            records[one.name] = read(records_of(setup.out, one.name))
    return Found(records, read_metrics(setup.run) if setup.cifar10 and setup.gpu else ())


def _room() -> str:
    """Say how much shared memory loaders have."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return ""
    usage = shutil.disk_usage(shared)
    return f"/dev/shm: {usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB are free."


def _log(setup: Setup, stage: str) -> str:
    """Return the end of a stage's output, and before it what could not be measured."""
    log = setup.out / "logs" / f"{stage}.txt"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    shown = [line for line in lines[:-_LINES] if "not measured" in line] + lines[-_LINES:]
    end = "\n".join(f"    {line[:200]}" for line in shown)
    return f"## The end of {stage}'s output\n\n{end}"


def has_skipped_tests(out: Path, stage: Stage) -> bool:
    """Tell whether pytest skipped tests of a stage: what they need may be there another time."""
    return any(case.find("skipped") is not None for case in _cases(out, stage))


def _cases(out: Path, stage: Stage) -> list[ElementTree.Element]:
    """Return pytest's results of a stage; none if there are none yet, or not whole."""
    try:
        file = ElementTree.parse(pytest_results_of(out, stage.name))  # as above  # nosec B314
    except (OSError, ElementTree.ParseError):
        return []
    return list(file.iter("testcase"))


def _tests(setup: Setup, stages: Sequence[Stage]) -> Iterator[str]:
    """Yield a table of what pytest found, and its failures."""
    rows, failures = [], []
    skips: Counter[str] = Counter()
    for stage in stages:
        if not (cases := _cases(setup.out, stage)):
            continue
        failed = [
            (case, what) for case in cases for what in case if what.tag in ("failure", "error")
        ]
        reasons = [one for case in cases if (one := case.find("skipped")) is not None]
        skips.update(one.get("message") or "" for one in reasons)
        skipped = len(reasons)
        passed = len(cases) - skipped - len({id(case) for case, _ in failed})
        rows.append([stage.name, str(passed), str(len(failed)), str(skipped)])
        for case, what in failed:
            line = (what.get("message") or "").strip().split("\n")[0][:200]
            failures.append(f"- {case.get('classname')}::{case.get('name')}: {line}")
    if rows:
        yield "## Tests"
        yield markdown(["file", "passed", "failed", "skipped"], rows)
        yield "\n".join(failures)
        yield "\n".join(f"- skipped {count}: {why}" for why, count in skips.items())
