"""``fastsiam config``: all settings as a file."""

from __future__ import annotations

from fastsiam.cli.help import Commands
from fastsiam.cli.options import settings_command
from fastsiam.config import TrainConfig

app = Commands()


def config(recipe: str, settings: TrainConfig) -> None:
    """Print a settings file with comments, for train --config: the recipe's, changed by flags."""
    from fastsiam.config.toml import to_toml

    print(to_toml(settings, recipe=recipe), end="")


app.command()(settings_command(config))
