"""``fastsiam study``: the paper's tables and figures by name."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastsiam.cli.options import Commands, usage_errors
from fastsiam.config import DataConfig
from fastsiam.config.detect import DetectConfig
from fastsiam.config.setting import check_name, settings_of
from fastsiam.config.study import (
    StudyConfig,
    StudyDetectConfig,
    StudyRunConfig,
    StudyTableConfig,
)

if TYPE_CHECKING:
    from fastsiam.study.catalogue import Study
    from fastsiam.study.record import StudyRecord

_DETECTION_OPTIONS = {
    *settings_of(StudyDetectConfig), "task", "detector", "trials", "steps", "batch_size",
    "weight_decay", "warmup", "short_side", "long_side", "rois", "precise_bn", "precision", "seed",
    "data", "workers", "gpus", "device", "json",
}  # fmt: skip
"""Options of ``fastsiam study detect``; other settings are those of the networks' runs."""

app = Commands(
    no_args_is_help=True,
    help="Repeat the paper's experiments: run what is missing, and compare the results with the "
    "paper's, with a verdict on each of its claims.",
)


Names = Annotated[
    list[str], typer.Argument(help="Names of studies, as listed by fastsiam study list, or all.")
]


@app.command("list")
def show_list() -> None:
    """List the studies: name, place in the paper, rows."""
    from fastsiam.study.catalogue import STUDIES

    width = max(map(len, STUDIES))
    for study in STUDIES.values():
        print(f"{study.name:{width}}  {study.title} ({study.source})")
        print(f"{'':{width}}    {'; '.join(row.title for row in study.rows)}")


@app.command()
def run(names: Names, config: StudyRunConfig) -> None:
    """Run all runs of studies that are not finished.

    Finished runs are skipped, interrupted ones resume, and rows shared by several studies run once.
    """
    from fastsiam.study.execution import check, execute_runs
    from fastsiam.study.runs import folder_of, runs_of
    from fastsiam.study.scales import scale

    studies = _studies(names)
    size = scale(config.scale, epochs=config.epochs)
    size = size.on(_images(config), gpus=config.gpus, device=config.device)
    seeds = range(config.seeds or size.seeds)
    runs = runs_of(studies, size, folder_of(config), seeds=seeds, linear=config.linear)
    with usage_errors():
        check(runs)
    execute_runs(runs, config)


def _images(config: StudyRunConfig) -> str:
    """Return the folder of a scale's images; generate the demo's images if they are missing.

    Raises:
        DataError: the images cannot be generated.
    """
    if config.scale != "demo":
        return str(DataConfig(data=config.data).root)
    from fastsiam.demo import make_images_once

    folder = Path(config.out) / "images"
    make_images_once(folder)
    return str(folder)


@app.command()
def table(names: Names, config: StudyTableConfig) -> None:
    """Show the tables of studies: the paper's results, fastsiam's, and a verdict on each claim."""
    from fastsiam.files import value_errors_as_data_error
    from fastsiam.study.record import read_record, write_record
    from fastsiam.study.result_table import as_markdown, as_text

    studies = _studies(names)
    if len(studies) > 1 and (config.json or config.record or config.picture):
        raise typer.BadParameter("--picture, --json and --record apply to a single study: name one")
    if config.picture and Path(config.picture).suffix.lower() != ".png":
        raise typer.BadParameter(f"--picture {config.picture}: its name must end in .png")
    show = as_markdown if config.markdown else as_text
    for study in studies:
        record = read_record(Path(config.record)) if config.record else _collect(study, config)
        if record.name != study.name:
            raise typer.BadParameter(f"{config.record} is a record of {record.name}")
        with value_errors_as_data_error(Path(config.record)) if config.record else nullcontext():
            text = show(record)
            if config.picture:
                from fastsiam.study.pictures import write_picture

                write_picture(Path(config.picture), record)
        if config.json:
            write_record(Path(config.json), record)
        print(text, end="\n\n" if study is not studies[-1] else "\n")


@app.command(options=_DETECTION_OPTIONS)
def detect(rows: StudyDetectConfig, config: DetectConfig) -> None:
    """Train detectors on the networks of Table 5, each at the best of several learning rates.

    The networks are those of the studies related-2x and transfer; run these first. Finished
    evaluations are skipped.
    """
    from fastsiam.study.detection import detection_rows, run_detection, table, write_detection
    from fastsiam.study.runs import folder_of
    from fastsiam.study.scales import scale

    if not config.data:
        raise typer.BadParameter(
            f"--data is missing: the folder that contains {config.task}'s folders"
        )
    folder = folder_of(rows)
    networks = detection_rows(scale(rows.scale, epochs=rows.epochs), folder, rows)
    results = run_detection(networks, rows, config, folder / "detection")
    if config.json:
        write_detection(Path(config.json), results, rows, config)
    print(table(results, config))


def _collect(study: Study, config: StudyConfig) -> StudyRecord:
    """Return a record of the current results of a study's runs."""
    from fastsiam.study.record import collect
    from fastsiam.study.runs import folder_of, runs_of, seeds_in
    from fastsiam.study.scales import scale

    size, folder = scale(config.scale, epochs=config.epochs), folder_of(config)
    runs = runs_of([study], size, folder, seeds=seeds_in(folder))
    for one in runs:
        one.check_settings()
    return collect(study, size, runs, config)


def _studies(names: list[str]) -> list[Study]:
    """Return studies by name, without duplicates; an unknown name is a usage error."""
    from fastsiam.study.catalogue import STUDIES

    with usage_errors():
        for name in names:
            check_name("study", name, [*STUDIES, "all"])
    all_names = chain(*(STUDIES if name == "all" else [name] for name in names))
    return [STUDIES[name] for name in dict.fromkeys(all_names)]
