"""Print docs/settings-reference.md: `python docs/scripts/settings.py > page.md`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from fastsiam.config.methods import METHOD_CONFIGS
from fastsiam.config.recipes import CHANGES
from fastsiam.config.setting import Setting, as_text, settings_of
from fastsiam.config.train import TrainConfig, all_settings
from fastsiam.config.views import ViewConfig

_OPENING = (
    "# All settings",
    "Every setting of a training run, with its default. Those with a flag can be passed as "
    "`--name`; all can be passed as `--set name=value` or in a [settings file](settings.md). "
    'A setting "per view" takes one value for all views, or one for each.',
    "This page is generated from the definitions in `fastsiam/config`. `fastsiam config --recipe "
    "NAME` prints the settings of a recipe.",
)


def page() -> str:
    """Return the page: a table for each section, each method and the recipes."""
    parts, defaults = [*_OPENING], TrainConfig().to_flags()
    of_methods = {name for kind in METHOD_CONFIGS.values() for name in settings_of(kind)}
    common = [one for one in all_settings() if one.name not in of_methods]
    for section, settings in groupby(common, key=lambda one: one.section):
        parts.append(f"## {section}\n\n{_table(settings, defaults)}")
    parts.append("## Methods\n\nThese settings belong to the named method.")
    for kind in METHOD_CONFIGS.values():
        table = _table(settings_of(kind).values(), kind().to_flags())
        parts.append(f"### {kind.title}\n\n{table}")
    recipes = [
        (f"`{name}`", ", ".join(f"`{key}={as_text(value)}`" for key, value in changes.items()))
        for name, changes in CHANGES.items()
    ]
    parts.append(f"## Recipes\n\n{_rows(('recipe', 'settings that it changes'), recipes)}")
    return "\n\n".join(parts) + "\n"


def _table(settings: Iterable[Setting], defaults: Mapping[str, Any]) -> str:
    rows = []
    for one in settings:
        kind = _kind(one.kind) + (f", {one.range}" if one.bounds else "")
        kind += ", per view" if one.name in settings_of(ViewConfig) else ""
        default = as_text(defaults[one.name])
        rows.append(
            (
                f"`--{one.flag}`" if one.option else f"`{one.name}`",
                kind,
                f"`{default}`" if default else "",
                one.help,
            )
        )
    return _rows(("setting", "values", "default", "meaning"), rows)


def _rows(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table without padding, which would double the size of the page."""
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (heads, *rows)]
    lines.insert(1, " | ".join("---" for _ in heads))
    return "\n".join(f"| {line} |" for line in lines)


def _kind(kind: Any) -> str:
    """Describe a setting's type for users."""
    items = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{item}`" if item else "empty" for item in items)
    if get_origin(kind) is tuple:
        return f"list of {_kind(items[0])}s"
    if items:
        return " or ".join(_kind(item) for item in items if item is not NoneType)
    names = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    return names.get(kind, "text")


if __name__ == "__main__":
    print(page(), end="")
