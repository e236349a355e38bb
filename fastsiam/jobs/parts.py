"""A conversion in parts, each a task of an engine: begun again if it is lost, and told of."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from fastsiam.config import ConvertConfig
from fastsiam.console import duration
from fastsiam.errors import DataError
from fastsiam.files import quoted
from fastsiam.jobs.convert import lossy_line, stoppable
from fastsiam.jobs.engines import Engine, Outcome, Task, engine_of, tasks_of
from fastsiam.pipelines.convert import beside, read_manifests
from fastsiam.pipelines.remote.path import opened


def convert_parts(config: ConvertConfig, words: Sequence[str]) -> None:
    """Make the parts of a conversion by the engine that is asked for.

    Args:
        config: of the whole conversion.
        words: the arguments that it came by, after ``fastsiam``.

    Raises:
        FastSiamError: the engine is not there.
        DataError: a part cannot be made; the others are, and the same command goes on.
        Interrupted: Ctrl-C or SIGTERM.
    """
    out = Path(config.out) if config.out else beside(opened(config.root))
    engine = engine_of(config, out)
    # A worker that somebody else started has an environment of its own.
    whole = [*words, "--source", str(config.root), "--out", str(out)]
    tasks = tasks_of(whole, range(1, config.parts + 1), config.parts)
    with stoppable("the same command goes on with the parts that are missing"):
        failed = _made(engine, tasks, config)
    for task, outcome in failed:
        sys.stderr.write("".join(f"part {task.number}: {x}\n" for x in outcome.said.splitlines()))
    if failed:
        task, outcome = failed[0]
        number = f"part {task.number} of {config.parts}"
        raise DataError(
            f"{number}: {outcome.error}; {len(failed)} of {config.parts} parts are missing, and "
            "the same command makes these alone"
        )
    _, abouts = read_manifests(out)
    if lossy := lossy_line(list(abouts.values()), config):
        print(lossy)
    here = quoted(out)
    print(
        f"{config.parts} parts in {here} are one data set: use it with --data {here}; one file of "
        f"them: fastsiam convert folder --source {here} --out FOLDER"
    )


def _made(
    engine: Engine, tasks: Sequence[Task], config: ConvertConfig
) -> list[tuple[Task, Outcome]]:
    """Have all tasks done, lost ones again; return those that failed for good."""
    failed, left, done = [], list(tasks), 0
    for attempt in range(config.retries + 1):
        lost = []
        with closing(engine.run(left)) as outcomes:  # type: ignore[type-var]
            for task, outcome in outcomes:
                if not outcome.code:
                    done += 1
                    _say(f"{_part(task, config)} is made{_facts(outcome)}; {done} of {len(tasks)}")
                elif outcome.is_lost and attempt < config.retries:
                    lost.append(task)
                    _say(
                        f"{_part(task, config)} is lost ({_why(outcome)}): it is begun again, "
                        f"{attempt + 1} of {config.retries} times"
                    )
                else:
                    failed.append((task, outcome))
                    _say(f"{_part(task, config)} cannot be made: {_why(outcome)}")
        left = lost
        if not left:
            break
    return sorted(failed, key=lambda one: one[0].number)


def _part(task: Task, config: ConvertConfig) -> str:
    return f"part {task.number} of {config.parts}"


def _facts(outcome: Outcome) -> str:
    """Say where a part was made, and what that took, as far as it is known."""
    where = f" on {outcome.host}" if outcome.host else ""
    if not outcome.seconds:
        return where
    return f"{where} in {duration(outcome.seconds)}, {outcome.megabytes:,.0f} MB"


def _why(outcome: Outcome) -> str:
    if outcome.said:
        return outcome.error
    return f"ended by signal {abs(outcome.code) % 128}" if outcome.is_lost else outcome.error


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
