"""``fastsiam verify``: whether a run was trained on what its log and its settings say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastsiam.cli.options import Commands
from fastsiam.config.run import VerifyConfig

app = Commands()


@app.command()
def verify(run: Annotated[Path, typer.Argument(help="Run folder.")], config: VerifyConfig) -> None:
    """Compute the digests of a run again from seed, settings and data, and compare with its log.

    Writes nothing. Exits with 1 at the first line that differs.
    """
    from fastsiam.train.verify import verify

    for line in verify(run, config):
        print(line, flush=True)
