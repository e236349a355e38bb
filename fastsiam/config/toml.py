"""Settings as a TOML file with comments, which ``fastsiam train --config`` reads back."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from .flags import flags_by_section, is_of_a_method, sections
from .methods import MethodConfig
from .train import TrainConfig


def to_toml(config: TrainConfig, *, recipe: str) -> str:
    """Return all settings by section, the help of each as a comment above it."""
    lines = [
        *_comment("Settings of a training run: fastsiam train --config FILE. Flags beat them."),
        f"recipe = {_literal(recipe)}",
    ]
    for section, values in flags_by_section(config).items():
        lines += _section(section, values, type(config.model.method))
    return "\n".join(lines) + "\n"


def _section(section: str, values: dict[str, Any], method: type[MethodConfig]) -> Iterator[str]:
    above = ""
    for one in sections()[section]:
        if is_of_a_method(one) and one.owner is not method:
            continue
        if one.section != above:
            yield from ["", "", *_comment(one.section)]
        if not above:
            yield f"[{section}]"
        above = one.section
        yield from ["", *_comment(one.help)]
        value = values[one.name]
        # TOML has no word for nothing: a setting that is left out has its default.
        yield f"# {one.name} =" if value is None else f"{one.name} = {_literal(value)}"


def _literal(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case tuple():
            return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, 98, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )
