"""``fastsiam config``: all settings as a file."""

from __future__ import annotations

from fastsiam.cli.options import Commands
from fastsiam.config import TrainConfig

app = Commands()


@app.command("config")
def write_config(recipe: str, config: TrainConfig) -> None:
    """Print a settings file with comments, for train --config: the recipe's, changed by flags."""
    from fastsiam.config.files import to_toml

    print(to_toml(config, recipe=recipe), end="")
