"""Commands that look at what there is: views of images, a run's page, this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from fastsiam.cli.options import picture_path, recipe_named
from fastsiam.config import DataConfig, Pipeline
from fastsiam.files import write_json

app = typer.Typer()


@app.command()
def views(
    out: Annotated[Path, typer.Option(help="Picture to write.")] = Path("views.png"),
    data: Annotated[
        str, typer.Option(help="Data as of train; default: $FASTSIAM_DATA, else ./data.")
    ] = "",
    pipeline: Annotated[
        str, typer.Option(help="Pipeline that makes the views; a,b shows several side by side.")
    ] = "torchvision",
    recipe: Annotated[str, typer.Option(help="Recipe whose augmentation is shown.")] = "imagenet",
    images: Annotated[int, typer.Option(min=1, help="How many images.")] = 12,
    epoch: Annotated[
        int, typer.Option(min=0, help="Epoch whose first images and draws are shown.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the run.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the drawn parameters of every view there.")
    ] = None,
) -> None:
    """Show images beside the views that pipelines make of each, as training sees them."""
    from fastsiam.jobs.views import show_views
    from fastsiam.report.pictures import save_picture

    out = picture_path(out)
    augment = recipe_named(recipe).augment
    names = cast("list[Pipeline]", pipeline.split(","))
    try:
        sources = [DataConfig(data=data, pipeline=name, workers=0) for name in names]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    sheet, record = show_views(sources, augment, images=images, epoch=epoch, seed=seed)
    save_picture(sheet, out)
    print(
        f"wrote {out}: source and {len(augment.views)} views of {len(record)} images, "
        f"epoch {epoch}, seed {seed}"
    )
    if json_file:
        write_json(json_file, record)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folder; more runs are drawn beside it.")],
    out: Annotated[
        Path | None, typer.Option(help="Page to write; default: report.html in the first run.")
    ] = None,
) -> None:
    """Write one self-contained HTML page: loss, std, rank, kNN, images/s, data wait, settings."""
    from fastsiam.report.run import write_report

    print(f"wrote {write_report(runs, out or runs[0] / 'report.html')}")


@app.command()
def info(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write it there as JSON too.")
    ] = None,
    warm: Annotated[
        bool, typer.Option(help="Compile now what the first run would compile when it starts.")
    ] = False,
) -> None:
    """Print versions, GPUs, and which pipelines can run here."""
    from fastsiam.environment import environment
    from fastsiam.kernels import library
    from fastsiam.pipelines.backends import readiness

    if warm:
        from fastsiam.jobs.warm import warm as compile_all

        for line in compile_all():
            print(line)

    found, ready = environment(), readiness()
    packages = found.pop("packages")
    for name, value in {**found, "gpus": ", ".join(found["gpus"]) or "none"}.items():
        print(f"{name:12} {value}")
    print(f"{'JPEGs by':12} {library.decoder_name()}")
    for name, version in packages.items():
        print(f"{name:20} {version}")
    for name, state in ready.items():
        print(f"--pipeline {name:12} {state}")
    if json_file:
        write_json(json_file, {**found, "packages": packages, "pipelines": ready})
