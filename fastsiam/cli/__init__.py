"""The command line: wiring only.

torch is imported by the commands that need it, never for ``--help``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, cast

import typer
import typer.core

import fastsiam
from fastsiam.bench.cases import CASES as BENCH_CASES
from fastsiam.bench.cases import Case
from fastsiam.bench.config import BenchConfig
from fastsiam.cli.options import command_of, recipe_named, train_command
from fastsiam.config import ConvertConfig, DataConfig, Pipeline, RunConfig, TrainConfig
from fastsiam.config.evaluate import (
    EvalConfig,
    FeaturesConfig,
    FinetuneConfig,
    KnnConfig,
    LinearConfig,
    NeighboursConfig,
)
from fastsiam.errors import FastSiamError, Interrupted

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: in 80 columns rich cuts the options' names
    help="SimSiam pre-training at the speed of the hardware.",
)
eval_app = typer.Typer(no_args_is_help=True, help="Measure the quality of a trained encoder.")
app.add_typer(eval_app, name="eval")
convert_app = typer.Typer(
    no_args_is_help=True,
    help="Turn a data set into one verified file that every pipeline reads.",
)
app.add_typer(convert_app, name="convert")


def main() -> None:
    """Run the command line; an error of the user's world is one line and exit code 1."""
    try:
        app()
    except (FastSiamError, OSError) as error:
        if os.environ.get("FASTSIAM_DEBUG"):
            raise
        rank = os.environ.get("RANK", "0")
        if isinstance(error, Interrupted):
            if rank == "0":
                print(error, file=sys.stderr)
            _leave(error.exit_code)
        print(f"{'error' if rank == '0' else f'error on rank {rank}'}: {error}", file=sys.stderr)
        _leave(1)
    except RuntimeError as error:
        from fastsiam.distributed import peer_is_gone

        if not peer_is_gone(error):
            raise
        _leave(1)


def _leave(code: int) -> NoReturn:
    """Exit; as one of several ranks at once, for parting from the others would wait for them."""
    sys.stderr.flush()
    if "LOCAL_RANK" in os.environ:
        os._exit(code)
    sys.exit(code)


def _version(show: bool) -> None:
    if show:
        print(f"fastsiam {fastsiam.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if os.environ.get("RANK", "0") == "0":
        logging.basicConfig(format="%(message)s")
        logging.getLogger("fastsiam").setLevel(logging.INFO)


def train(recipe: str, config: TrainConfig) -> None:
    """Train SimSiam. The defaults shown are those of --recipe."""
    from fastsiam import distributed
    from fastsiam.jobs import train as jobs

    world = int(os.environ["WORLD_SIZE"]) if distributed.is_worker() else config.run.gpus
    try:
        jobs.preflight(config, world=world)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if world > 1 and not distributed.is_worker():
        folder = jobs.run_folder(config, recipe)
        sys.exit(distributed.launch(world, [*sys.argv[1:], "--out", str(folder)]))
    jobs.train_here(config, recipe)


app.command("train")(train_command(train))


def imagenet(config: ConvertConfig) -> None:
    """ImageNet: the official archives, folders, WebDataset shards or Hugging Face's parquet."""
    from fastsiam.jobs.convert import convert_data

    convert_data("imagenet", config)


def cifar10(config: ConvertConfig) -> None:
    """CIFAR-10: its authors' python archive, or its images as files."""
    from fastsiam.jobs.convert import convert_data

    convert_data("cifar10", config)


def folder(config: ConvertConfig) -> None:
    """Whatever --data of the train command takes: folders of images, tars, .beton files or parts.

    Class folders or none; train/ beside val/ or test/, or training images alone.
    """
    from fastsiam.jobs.convert import convert_data

    convert_data("folder", config)


def parquet(config: ConvertConfig) -> None:
    """Parquet files with an image column (a struct of bytes and path) and a label."""
    from fastsiam.jobs.convert import convert_data

    convert_data("parquet", config)


def demo_images(config: ConvertConfig) -> None:
    """Small images that are made on the spot, for trying things out."""
    from fastsiam.jobs.convert import convert_demo

    convert_demo(config)


for _command in (imagenet, cifar10, folder, parquet):
    convert_app.command(_command.__name__)(command_of(_command, ConvertConfig))
convert_app.command("demo")(command_of(demo_images, ConvertConfig))


@convert_app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="Converted folder, or one .beton file.")],
    decode: Annotated[
        bool, typer.Option("--decode", help="Also decode every image, and compare its size.")
    ] = False,
    workers: Annotated[int, typer.Option(min=-1, help="Processes; -1 is one for each core.")] = -1,
) -> None:
    """Check converted files: every byte against its checksum, the files against the manifest."""
    from fastsiam.jobs.convert import verify_data

    if not verify_data(path, decode=decode, workers=workers):
        raise typer.Exit(1)


_NETWORK = "run", "Run folder, a checkpoint, or a weights file of another program."


def knn(run: Path, config: KnnConfig) -> None:
    """Classify the validation images by their nearest training images (pool5 features, cosine)."""
    _evaluate("evaluate_knn", run, config)


def linear(run: Path, config: LinearConfig) -> None:
    """Train a linear classifier on the frozen features (pool5), and validate it."""
    _evaluate("evaluate_linear", run, config)


def finetune(run: Path, config: FinetuneConfig) -> None:
    """Train the whole network with labels, of 1% or 10% of the images for instance; validate it."""
    _evaluate("evaluate_finetuned", run, config)


def _evaluate(name: str, run: Path, config: EvalConfig) -> None:
    from fastsiam import distributed
    from fastsiam.jobs import evaluate as jobs

    where = RunConfig(gpus=config.gpus, device=config.device)
    if config.gpus > 1 and not distributed.is_worker():
        distributed.check_devices(where)
        jobs.preflight(run, config)
        sys.exit(distributed.launch(config.gpus, sys.argv[1:]))
    place = distributed.start(where)
    record = getattr(jobs, name)(run, config, place)
    distributed.finish()
    if place.leads:
        print("\n".join(record["summary"]))
        if isinstance(config, KnnConfig) and config.per_class:
            print(f"of each class, {record['summary'][-len(record['protocol']['votes'])]}:")
            for name, top1 in record["per_class"].items():
                print(f"  {name}: " + ("no images" if top1 is None else f"{top1:.2f}%"))


eval_app.command("knn")(command_of(knn, KnnConfig, argument=_NETWORK))
eval_app.command("linear")(command_of(linear, LinearConfig, argument=_NETWORK))
eval_app.command("finetune")(command_of(finetune, FinetuneConfig, argument=_NETWORK))


def features(run: Path, config: FeaturesConfig) -> None:
    """Write the features of every image to a file, for work of your own."""
    from fastsiam import distributed
    from fastsiam.jobs import features as embed

    place = distributed.start(RunConfig(device=config.device))
    for path in embed.write_features(run, config, place):
        print(f"wrote {path}")


def neighbours(run: Path, config: NeighboursConfig) -> None:
    """Draw some images and those whose features are nearest to theirs."""
    from PIL import Image

    from fastsiam import distributed
    from fastsiam.evaluate.records import check_targets
    from fastsiam.jobs import features as embed

    out = Path(config.out)
    if out.suffix.lower() not in Image.registered_extensions():
        raise typer.BadParameter(f"--out {out}: no picture's ending; .png is one")
    check_targets(out)
    place = distributed.start(RunConfig(device=config.device))
    embed.draw_neighbours(run, config, place).save(out)
    print(f"wrote {config.out}: each row an image, and the training images nearest to it")


for _run, _config in ((features, FeaturesConfig), (neighbours, NeighboursConfig)):
    _options = {f.name for f in fields(_config)} - {"gpus", "json"}  # one process, no record
    app.command(_run.__name__)(command_of(_run, _config, options=_options, argument=_NETWORK))


class _BenchGroup(typer.core.TyperGroup):
    """``fastsiam bench`` alone, or followed by options, means ``fastsiam bench all``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] != "--help"):
            args = ["all", *args]
        return super().parse_args(ctx, args)


bench_app = typer.Typer(
    cls=_BenchGroup,
    help="Measure: how fast each pipeline is here, what bounds training, what would be faster. "
    "Without a command: all.",
)
app.add_typer(bench_app, name="bench")


def _bench_command(case: Case) -> None:
    def run(config: BenchConfig) -> None:
        from fastsiam.bench.suite import run

        run(case.name, config)

    run.__doc__ = case.help
    bench_app.command(case.name)(command_of(run, BenchConfig, options=case.options))


for _case in BENCH_CASES.values():
    _bench_command(_case)


@bench_app.command("profile")
def bench_profile(
    pipeline: Annotated[
        Pipeline, typer.Option(help="Pipeline that feeds the training.")
    ] = "torchvision",
    data: Annotated[str, typer.Option(help="Data as of train; default as of fastsiam bench.")] = "",
    recipe: Annotated[str, typer.Option(help="Recipe that is trained.")] = "imagenet",
    batch: Annotated[int, typer.Option(min=0, help="Images of a batch; 0 chooses.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Training steps that are traced.")] = 5,
    workers: Annotated[int, typer.Option(min=-1, help="Loader's processes or threads.")] = -1,
    device: Annotated[
        Literal["auto", "cuda", "cpu"], typer.Option(help="auto takes the GPU if there is one.")
    ] = "auto",
    out: Annotated[
        Path, typer.Option(help="Trace to write, for ui.perfetto.dev or chrome://tracing.")
    ] = Path("trace.json"),
) -> None:
    """Trace a few training steps: reading, decoding, crops, copies, photometric, model."""
    from fastsiam.bench.cases.profile import profile
    from fastsiam.bench.session import session

    try:
        config = BenchConfig(data=data, recipe=recipe, batch=batch, workers=workers, device=device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with session(config) as own:
        print(profile(own, pipeline, steps, out))
    print(f"\nwrote {out}; open it at https://ui.perfetto.dev")


@bench_app.command("report")
def bench_report(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Files that --json of the other commands wrote.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for index.html, the charts and tables.md.")
    ] = Path("bench-report"),
    readme: Annotated[
        Path | None,
        typer.Option(help="Also renew the tables in this file, between <!-- bench: FILE CASE -->."),
    ] = None,
) -> None:
    """Make a page, charts and Markdown tables of measurements."""
    from fastsiam.bench.report import renew, write_report

    if not files and not readme:
        raise typer.BadParameter("name files of records, or a --readme")
    for path in write_report(files, out) if files else ():
        print(f"wrote {path}")
    if readme:
        for marker in renew(readme, readme.parent):
            print(f"renewed {marker} in {readme}")


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
    """Show images beside the two views that pipelines make of each, as training sees them."""
    from fastsiam.jobs.views import show_views

    augment = recipe_named(recipe).augment
    names = cast("list[Pipeline]", pipeline.split(","))
    try:
        sources = [DataConfig(data=data, pipeline=name, workers=0) for name in names]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    sheet, record = show_views(sources, augment, images=images, epoch=epoch, seed=seed)
    try:
        sheet.save(out)
    except ValueError as error:
        raise typer.BadParameter(f"--out {out}: {error}") from error
    print(
        f"wrote {out}: source and two views of {len(record)} images, "
        f"pipeline {', '.join(names)}, epoch {epoch}, seed {seed}"
    )
    if json_file:
        json_file.write_text(json.dumps(record, indent=2) + "\n")


@app.command("export")
def export(
    run: Annotated[
        Path,
        typer.Argument(
            help="Run folder, checkpoint, or a file of weights: of simsiam's authors, mmselfsup, "
            "solo-learn, lightly, torchvision or timm."
        ),
    ],
    layout: Annotated[
        Literal["torchvision", "timm", "simsiam", "detectron2"],
        typer.Option("--format", help="Library whose names the weights shall have."),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="File to write: .safetensors, .pt, .pth, .pth.tar or .bin (simsiam: not the "
            "first; detectron2: .pkl). A model card, FILE.md, comes beside it."
        ),
    ],
    backbone: Annotated[
        str,
        typer.Option(
            help="Network of a file whose names do not tell: convnext_tiny, timm/NAME. "
            "Default: found out; plain ResNets are."
        ),
    ] = "",
    stem: Annotated[
        str,
        typer.Option(
            help="First layers of a ResNet out of a file: imagenet, cifar, cifar-pad2 or "
            "cifar-no-relu. Weights do not tell the last three apart: default is cifar, or what "
            "the file's program has."
        ),
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the file and its card if they are there.")
    ] = False,
) -> None:
    """Write the backbone's weights for another library, with a model card.

    simsiam takes the heads too.
    """
    from fastsiam.evaluate.features import fingerprint
    from fastsiam.evaluate.records import read_records
    from fastsiam.interchange import export_weights, load_pretrained

    try:
        pretrained = load_pretrained(run, backbone=backbone, stem=stem)
        print(f"read {pretrained}")
        results = read_records(pretrained.run) if pretrained.run else []
        own = fingerprint(pretrained.network()) if results else ""
        results = [record for record in results if record["network"]["fingerprint"] == own]
        written = export_weights(pretrained, format=layout, out=out, results=results, force=force)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    for path in written:
        print(f"wrote {path}")


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
) -> None:
    """Print versions, GPUs, and which pipelines can run here."""
    from fastsiam.environment import environment
    from fastsiam.pipelines.backends import readiness

    found, ready = environment(), readiness()
    packages = found.pop("packages")
    for name, value in {**found, "gpus": ", ".join(found["gpus"]) or "none"}.items():
        print(f"{name:12} {value}")
    for name, version in packages.items():
        print(f"{name:20} {version}")
    for name, state in ready.items():
        print(f"--pipeline {name:12} {state}")
    if json_file:
        json_file.write_text(
            json.dumps({**found, "packages": packages, "pipelines": ready}, indent=2) + "\n"
        )


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the images, the run and the report.")
    ] = Path("runs/demo"),
) -> None:
    """Make small images, train on them, and show that the features beat raw pixels.

    Takes a few minutes on a laptop.
    """
    from fastsiam.jobs.demo import run_demo

    run_demo(out)
