"""``fastsiam export``: weights for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fastsiam.cli.options import Commands, usage_errors

app = Commands()


@app.command()
def export(
    run: Annotated[
        Path,
        typer.Argument(
            help="Run folder, checkpoint, or weights file: plain, or of the authors of SimSiam, "
            "MoCo or SwAV, or of mmselfsup, solo-learn, lightly, torchvision or timm."
        ),
    ],
    layout: Annotated[
        Literal["plain", "torchvision", "timm", "simsiam", "moco", "swav", "detectron2"],
        typer.Option(
            "--format",
            help="plain: a state dict of any network, with Python code that rebuilds it. Others: "
            "with the parameter names that these libraries expect.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="File to write: .safetensors (not simsiam, moco, swav), .pt, .pth, .pth.tar or "
            ".bin; detectron2: .pkl. A model card, FILE.md, is written next to it."
        ),
    ],
    backbone: Annotated[
        str,
        typer.Option(
            help="Network of a weights file, if the names in it do not identify it, such as "
            "convnext_tiny or timm/NAME. Not needed for plain ResNets."
        ),
    ] = "",
    stem: Annotated[
        str,
        typer.Option(
            help="First layers of a ResNet in a weights file, as for train; the weights do not "
            "show the padding. Default: those of the program that wrote the file, else cifar."
        ),
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the file and its model card if they exist.")
    ] = False,
) -> None:
    """Write the backbone's weights for use elsewhere, with a model card.

    simsiam, moco and swav are the formats of these methods' authors. They include the heads if the
    run used that method. If a format does not support the network, the error lists those that do.
    """
    from fastsiam.evaluate.features import own_records
    from fastsiam.interchange import export_weights, load_pretrained

    with usage_errors():
        pretrained = load_pretrained(run, backbone=backbone, stem=stem)
        print(f"read {pretrained}")
        results = own_records(pretrained)
        paths = export_weights(pretrained, format=layout, out=out, results=results, force=force)
    for path in paths:
        print(f"wrote {path}")
