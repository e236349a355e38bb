"""Commands that inspect views of images, a run's results and digests, or this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fastsiam.cli.options import Commands, usage_errors
from fastsiam.config import AugmentConfig, DataConfig, NumericsConfig, ViewConfig
from fastsiam.config.run import VerifyConfig
from fastsiam.config.setting import settings_of
from fastsiam.files import write_json

app = Commands()


_VIEW_OPTIONS = {
    *("data", "holdout", "image_column", "label_column", "exif", "alpha", "seed"),
    *settings_of(AugmentConfig),
    *settings_of(ViewConfig),
}


@app.command(options=_VIEW_OPTIONS)
def views(
    recipe: str,
    data: DataConfig,
    augment: AugmentConfig,
    numerics: NumericsConfig,
    *,
    out: Annotated[Path, typer.Option(help="Picture to write.")] = Path("views.png"),
    pipeline: Annotated[
        str,
        typer.Option(
            help="Pipeline that makes the views, or several to show side by side: a,b. auto: the "
            "fastest here, except memory. Default: that of --config, else auto."
        ),
    ] = "",
    images: Annotated[int, typer.Option(min=1, help="Number of images.")] = 12,
    epoch: Annotated[
        int, typer.Option(min=0, help="Epoch whose first images and random draws are shown.")
    ] = 0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the drawn parameters of every view to this file."),
    ] = None,
) -> None:
    """Show images next to the views that pipelines make from them, as training sees them.

    --config RUN shows the views of a run.
    """
    from fastsiam.contact_sheets import check_outside, check_picture, save_picture
    from fastsiam.report.view_sheet import show_views

    names: list[Any] = (pipeline or data.pipeline).split(",")
    seed = numerics.seed
    with usage_errors():
        check_picture(out)
        sources = [replace(data, pipeline=name, workers=0) for name in names]
    check_outside(out, data.places)
    sheet, record, pipelines = show_views(sources, augment, images=images, epoch=epoch, seed=seed)
    save_picture(sheet, out)
    print(
        f"wrote {out}: source and {len(augment.views)} views of {len(record)} images, "
        f"pipeline {', '.join(pipelines)}, epoch {epoch}, seed {seed}"
    )
    if json_file:
        write_json(json_file, record)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folder, and other runs to compare it with.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Page to write. Default: report.html in the first run folder."),
    ] = None,
) -> None:
    """Write one self-contained HTML page: loss, std, rank, kNN, images/s, data wait, settings."""
    from fastsiam.report.run_report import write_report

    print(f"wrote {write_report(runs, out or runs[0] / 'report.html')}")


@app.command()
def info(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write it to this file as JSON.")
    ] = None,
) -> None:
    """Print versions, GPUs, and which pipelines can run here."""
    from fastsiam.environment import environment
    from fastsiam.kernels import library
    from fastsiam.pipelines.backends import readiness

    facts, states = environment(), readiness()
    packages = facts.pop("packages")
    for name, value in {**facts, "gpus": ", ".join(facts["gpus"]) or "none"}.items():
        print(f"{name:12} {value}")
    print(f"{'JPEG decoder':12} {library.decoder_name()}")
    for name, version in packages.items():
        print(f"{name:20} {version}")
    for name, state in states.items():
        print(f"--pipeline {name:12} {state}")
    if json_file:
        write_json(json_file, {**facts, "packages": packages, "pipelines": states})


@app.command()
def verify(run: Annotated[Path, typer.Argument(help="Run folder.")], config: VerifyConfig) -> None:
    """Recompute a run's digests from seed, settings and data, and compare them with its log.

    Writes no files. Exits with code 1 at the first log line that differs.
    """
    from fastsiam.train.verify import verify

    for line in verify(run, config):
        print(line, flush=True)
