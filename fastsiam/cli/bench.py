"""``fastsiam bench``: benchmarks, and a report of their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import typer.core

from fastsiam.bench.cases import CASES, Case
from fastsiam.bench.config import BenchConfig, GpuConfig, HeadlineConfig, SoakConfig
from fastsiam.bench.libraries import require_lightly
from fastsiam.cli.options import Commands
from fastsiam.config import PipelineSetting, TrainConfig


class _BenchGroup(typer.core.TyperGroup):
    """``fastsiam bench`` alone, or followed by options, means ``fastsiam bench all``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] != "--help"):
            args = ["all", *args]
        return super().parse_args(ctx, args)


app = Commands(
    cls=_BenchGroup,
    help="Benchmark: how fast each pipeline is here, what limits training, what would be faster. "
    "Without a command: all.",
)


def _add(case: Case) -> None:
    """Add the command of a benchmark case."""

    def measure(config: BenchConfig) -> None:
        from fastsiam.bench.session import run

        run(case.name, config)

    measure.__doc__ = case.help
    app.command(case.name, options=case.options)(measure)


for _case in CASES.values():
    _add(_case)


_PROFILE_OPTIONS = {
    *("data", "image_column", "label_column", "recipe", "batch", "workers", "device", "json"),
}


@app.command(options=_PROFILE_OPTIONS)
def profile(
    config: BenchConfig,
    pipeline: Annotated[
        PipelineSetting,
        typer.Option(help="Pipeline that feeds training. auto: the one that train would choose."),
    ] = "auto",
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps to trace.")] = 5,
    out: Annotated[
        Path, typer.Option(help="Trace file to write, for ui.perfetto.dev or chrome://tracing.")
    ] = Path("trace.json"),
) -> None:
    """Trace a few training steps: reading, decoding, crops, copies, photometric, model."""
    from fastsiam.bench.cases.profile import profile as trace
    from fastsiam.bench.measurements import write
    from fastsiam.bench.session import session

    with session(config) as bench_session:
        text, record = trace(bench_session, pipeline, steps, out)
    print(text)
    if config.json:
        write(Path(config.json), [record])
    print(f"\nwrote {out}; open it at https://ui.perfetto.dev")


@app.command("lightly")
def _lightly(
    recipe: str,
    config: TrainConfig,
    loader: Annotated[
        Literal["lightly", "fastsiam"],
        typer.Option(help="lightly: its transform in a DataLoader; fastsiam: the run's pipeline."),
    ] = "lightly",
) -> None:
    """Train a method built from lightly's modules, with lightly's loader or fastsiam's.

    Settings are those of fastsiam train. The folder --out gets backbone.pt, for fastsiam eval, and
    result.json; the last line printed is its summary. --workers: lightly's loader processes.
    """
    require_lightly()
    if not config.run.out:
        raise typer.BadParameter("pass a folder for the weights: --out DIR")
    from fastsiam.bench.lightly import train

    print(json.dumps(train(config, recipe, loader=loader)))


@app.command("headline")
def _headline(config: HeadlineConfig) -> None:
    """Train FastSiam and SimSiam on CIFAR-10 to 90% kNN, a few minutes per call; draw the curve."""
    from fastsiam.bench.headline import PICTURE, RECORD, run

    run(config)
    print(f"wrote {config.out}/{RECORD} and {config.out}/{PICTURE}")


@app.command("gpu")
def _gpu(config: GpuConfig) -> None:
    """Run the GPU tests and benchmarks within a time limit, the most important first.

    Stages: tests, kernels, steps, loaders, training, a profile, CIFAR-10. Each runs in its own
    process, and its result is saved when it ends.
    """
    from fastsiam.bench.gpu import run

    print(f"wrote {run(config)}")


@app.command("soak")
def _soak(config: SoakConfig) -> None:
    """Kill and resume runs for hours, and compare them with uninterrupted ones.

    Every run must end with the log lines and weights of an uninterrupted one, and leave no process
    or file behind. Any deviation is an error.
    """
    from fastsiam.bench.soak import soak

    print(f"wrote {soak(config)}")


@app.command()
def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Record files, written with --json by the other commands."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for index.html, the charts and tables.md.")
    ] = Path("bench-report"),
    readme: Annotated[
        Path | None,
        typer.Option(
            help="Also update the tables in this Markdown file that are marked by "
            "<!-- bench: FILE CASE -->, <!-- study: FILE --> or <!-- soak: FILE -->."
        ),
    ] = None,
) -> None:
    """Write an HTML page, charts and Markdown tables of benchmark results."""
    from fastsiam.bench.report import renew, write_report

    if not files and not readme:
        raise typer.BadParameter("pass record files, or --readme")
    for path in write_report(files, out) if files else ():
        print(f"wrote {path}")
    if readme:
        for marker in renew(readme, readme.parent, study_table=_study_table):
            print(f"updated {marker} in {readme}")


def _study_table(path: Path) -> str:
    """Return the Markdown table of a study's record."""
    from fastsiam.study.record import read_record
    from fastsiam.study.result_table import as_markdown

    return as_markdown(read_record(path))
