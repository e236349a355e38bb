"""``fastsiam convert``: data sets as files that every pipeline reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastsiam.cli.options import Commands
from fastsiam.config import ConvertConfig

if TYPE_CHECKING:
    from fastsiam.pipelines.convert import Kind

app = Commands(
    no_args_is_help=True,
    help="Turn a data set into one verified file that every pipeline reads.",
)


@app.command()
def imagenet(config: ConvertConfig) -> None:
    """ImageNet: the official archives, folders, WebDataset shards or Hugging Face's parquet."""
    _convert("imagenet", config)


@app.command()
def cifar10(config: ConvertConfig) -> None:
    """CIFAR-10: its authors' python archive, or its images as files."""
    _convert("cifar10", config)


@app.command()
def folder(config: ConvertConfig) -> None:
    """Whatever --data of the train command takes: images, tars, Hugging Face's, .beton or parts.

    Class folders or none; train/ beside val/ or test/, or training images alone.
    """
    _convert("folder", config)


@app.command()
def parquet(config: ConvertConfig) -> None:
    """Parquet files with an image column (a struct of bytes and path) and a label."""
    _convert("parquet", config)


@app.command("demo")
def demo_images(config: ConvertConfig) -> None:
    """Small images that are made on the spot, for trying things out."""
    from fastsiam.demo import convert_demo

    convert_demo(config)


def _convert(kind: Kind, config: ConvertConfig) -> None:
    if config.parts:
        from fastsiam.pipelines.convert.parts import convert_parts

        convert_parts(kind, config, sys.argv[1:])
        return
    from fastsiam.pipelines.convert.command import convert_data

    convert_data(kind, config)


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="Converted folder, or one .beton file.")],
    decode: Annotated[
        bool, typer.Option("--decode", help="Also decode every image, and compare its size.")
    ] = False,
    workers: Annotated[int, typer.Option(min=-1, help="Processes; -1 is one for each core.")] = -1,
) -> None:
    """Check converted files: every byte against its checksum, the files against the manifest."""
    from fastsiam.pipelines.convert.command import verify_data

    if not verify_data(path, decode=decode, workers=workers):
        raise typer.Exit(1)
