"""``fastsiam convert``: convert data sets to files that every pipeline reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastsiam.cli.options import Commands, usage_errors
from fastsiam.config import ConvertConfig

if TYPE_CHECKING:
    from fastsiam.pipelines.convert import Kind

app = Commands(
    no_args_is_help=True,
    help="Convert a data set to one verified file per split, which every pipeline reads.",
)


_KINDS: dict[Kind, str] = {
    "imagenet": "ImageNet: the official archives, folders, WebDataset shards or Hugging Face "
    "parquet files.",
    "cifar10": "CIFAR-10: its authors' Python archive, or its images as files.",
    "folder": "Any data that fastsiam train --data takes: images, tars, Hugging Face data sets, "
    ".beton files or parts.\n\nClass folders are optional, and so are validation images (val/ or "
    "test/ next to train/).",
    "parquet": "Parquet files with an image column (a struct of bytes and path) and a label "
    "column.",
}


def _add(kind: Kind, help: str) -> None:
    """Add the command for a kind of data."""

    def convert(config: ConvertConfig) -> None:
        if config.parts:
            from fastsiam.pipelines.convert.parts import convert_parts

            convert_parts(kind, config, sys.argv[1:])
            return
        from fastsiam.pipelines.convert.command import convert_data

        convert_data(kind, config)

    convert.__doc__ = help
    app.command(kind)(convert)


for _kind, _help in _KINDS.items():
    _add(_kind, _help)


@app.command("demo")
def demo_images(config: ConvertConfig) -> None:
    """Small generated images, for trying things out."""
    from fastsiam.demo import convert_demo

    convert_demo(config)


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="Converted folder, or one .beton file.")],
    decode: Annotated[
        bool, typer.Option("--decode", help="Also decode every image and check its size.")
    ] = False,
    workers: Annotated[int, typer.Option(min=-1, help="Processes. -1: one per core.")] = -1,
) -> None:
    """Check converted files: every byte against its checksum, the files against the manifest."""
    from fastsiam.pipelines.convert.command import verify_data

    with usage_errors():
        ConvertConfig(workers=workers)
    if not verify_data(path, decode=decode, workers=workers):
        raise typer.Exit(1)
