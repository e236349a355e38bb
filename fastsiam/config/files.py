"""Settings in files: read, written, and merged, where recipe, method and files beat one another.

A settings file (TOML, YAML or JSON) has the sections of ``TrainConfig``, in each its settings by
their flags' names, and may name a recipe on top. A run's ``config.json`` is read as it is.
"""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastsiam.errors import FastSiamError, in_a_line
from fastsiam.files import explained, parsed_json

from .checks import check_name, or_nearest, require
from .flags import (
    flags_by_section,
    is_of_a_method,
    is_of_a_view,
    sections,
    to_flags,
    train_settings,
    with_method,
    without_method,
)
from .methods import METHOD_CONFIGS
from .recipes import RECIPES
from .setting import Setting, checked
from .train import TrainConfig

_OF_ONE_RUN = "out", "resume", "extend", "extend_schedule", "restarts"
"""Settings that say where a run is and how it continues: no other run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Some settings, such as a file names."""

    source: str = ""
    """Where they are from, for messages."""
    recipe: str = ""
    """The recipe that they are changes of; empty if they name none."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Values by their flags' names."""

    @property
    def method(self) -> str:
        """The method whose settings they hold; empty if they do not say."""
        if "method" in self.flags or not self.recipe:
            return str(self.flags.get("method", ""))
        return RECIPES[self.recipe]().model.method.name


def read_settings(path: Path, *, goes_on: bool = False) -> Settings:
    """Read a settings file, a run's config.json or a run's folder.

    Args:
        path: of the file or folder.
        goes_on: whether it is a run that continues; for another run, the settings that say where
            this one is and how it continues are left out.

    Raises:
        FastSiamError: the file cannot be read.
        ValueError: it holds no settings; names the file, and the setting if it is a single one.
    """
    file = path / "config.json" if path.is_dir() else path
    parse = _PARSERS.get(file.suffix)
    if parse is None:
        kinds = ", ".join(_PARSERS)
        raise ValueError(f"{file}: settings are in files {kinds}, or in a run's folder")
    with explained(FastSiamError, f"cannot read {file}"):
        text = file.read_bytes()
    try:
        content = parse(text.decode())
    except RecursionError:
        raise ValueError(f"{file}: settings are nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{file} cannot be read as {file.suffix[1:].upper()}: {error}") from None
    try:
        require(isinstance(content, dict), "settings must be a table of sections")
        recipe, flags = (_of_a_run if "config" in content else _of_a_file)(content)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if "config" in content and not goes_on:
        flags = {name: value for name, value in flags.items() if name not in _OF_ONE_RUN}
    return Settings(source=str(file), recipe=recipe, flags=flags)


def to_toml(config: TrainConfig, *, recipe: str) -> str:
    """Return all settings by section, the help of each as a comment above it."""
    lines = [
        *_comment("Settings of a training run: fastsiam train --config FILE. Flags beat them."),
        f"recipe = {_literal(recipe)}",
    ]
    method = type(config.model.method)
    for section, values in flags_by_section(config).items():
        settings = [x for x in sections()[section] if x.owner is method or not is_of_a_method(x)]
        lines += _section(section, settings, values)
    return "\n".join(lines) + "\n"


def parse_assignments(texts: Iterable[str]) -> dict[str, Any]:
    """Return the settings that ``--set`` gives, as ``NAME=VALUE``.

    Raises:
        ValueError: there is no such setting, or it has no such value.
    """
    known, flags = train_settings(), {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        require(bool(equals), f"--set takes NAME=VALUE, not {text!r}")
        if name not in known:
            raise ValueError(or_nearest(f"unknown setting {in_a_line(name)}", name, known))
        flags[name] = _value(known[name], value.strip(), known[name].flag)
    return flags


def run_folder(path: Path) -> Path | None:
    """Return the folder of the run that a path is, or that a checkpoint lies in; None if in none.

    Args:
        path: what ``--resume`` names.
    """
    if path.is_dir():
        return path
    lies_in = path.resolve().parent
    if lies_in.name != "checkpoints":
        return None
    named = path.parent.parent  # "." of a checkpoint that is named from within, or through a link
    return named if named.resolve() == lies_in.parent else lies_in.parent


def recorded(path: Path) -> Path | None:
    """Return the config.json of the run or checkpoint, in the run's folder or beside it, if any."""
    folders = run_folder(path), path.parent
    files = [folder / "config.json" for folder in folders if folder is not None]
    return next((file for file in files if file.is_file()), None)


def merge(*, recipe: str = "", method: str = "", files: Iterable[Settings] = ()) -> Settings:
    """Merge the settings of a recipe, a method and files: each beats the one before.

    A file's settings of another method than the chosen one are left out.

    Args:
        recipe: by name; by default what a file names, else the first.
        method: by name; by default what a file names, else the recipe's.
        files: from the weakest to the strongest.

    Returns:
        Every setting, and the recipe.

    Raises:
        ValueError: there is no such recipe or method.
    """
    files = list(files)
    for file in files[::-1]:
        recipe, method = recipe or file.recipe, method or file.method
    recipe = recipe or next(iter(RECIPES))
    check_name("recipe", recipe, RECIPES)
    flags = to_flags(RECIPES[recipe]())
    method = method or flags["method"]
    check_name("method", method, METHOD_CONFIGS)
    flags = with_method(flags, method)
    for file in files:
        other = file.method and file.method != method
        flags |= without_method(file.flags, file.method) if other else file.flags
    source = " and ".join(file.source for file in files)
    return Settings(source=source, recipe=recipe, flags=flags | {"method": method})


def _of_a_run(content: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the recipe and the flags of a run's config.json."""
    config, recipe = content["config"], content.get("recipe")
    require(isinstance(config, dict), f"config must be a table of sections, not {config!r}")
    known = recipe if isinstance(recipe, str) and recipe in RECIPES else ""
    return known, to_flags(TrainConfig.from_dict(config))


def _of_a_file(content: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the recipe and the flags of a settings file."""
    recipe, flags = content.pop("recipe", ""), dict[str, Any]()
    if recipe != "":
        check_name("recipe", recipe, RECIPES)
    known = {  # of a name that several methods have the first, as in train_settings
        f"{section}.{one.name}": one
        for section, settings in sections().items()
        for one in reversed(settings)
    }
    for section, values in content.items():
        if section not in sections():
            require(section not in train_settings(), _unknown_setting(str(section), known))
            check_name("section", section, sections())
        require(isinstance(values, dict), f"{section} must be a table of settings, not {values!r}")
        for key, value in values.items():
            dotted = f"{section}.{in_a_line(key).replace('-', '_')}"
            require(dotted in known, _unknown_setting(dotted, known))
            name = known[dotted].name
            require(name not in flags, f"{dotted} is there twice")
            flags[name] = _value(known[dotted], value, dotted)
    if "method" in flags:
        check_name("method", flags["method"], METHOD_CONFIGS)
    return recipe, flags


def _value(setting: Setting, value: Any, where: str) -> Any:
    """Check the type of a setting's value; of a setting of the views, of each one's."""
    if not is_of_a_view(setting):
        return checked(setting.kind, value, where, text=True)
    if isinstance(value, str):
        return value  # a,b as on the command line
    each = value if isinstance(value, list) else [value]
    return ",".join(str(checked(setting.kind, one, where, text=True)) for one in each)


def _unknown_setting(name: str, known: Mapping[str, Setting]) -> str:
    """Refuse a name: suggest the same one in another section, else the nearest."""
    refusal, last = f"unknown setting {name}", name.rpartition(".")[2]
    same = next((dotted for dotted, one in known.items() if one.name == last), "")
    return f"{refusal}; did you mean {same}?" if same else or_nearest(refusal, name, known)


def _yaml(text: str) -> Any:
    """Read YAML with all values as text: what a number or a word is follows from the setting."""
    import yaml

    try:
        return yaml.load(text, yaml.BaseLoader) or {}  # text, lists and tables alone  # nosec B506
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _section(section: str, settings: list[Setting], values: dict[str, Any]) -> Iterator[str]:
    above = ""
    for one in settings:
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
    """Write a value as TOML does: as JSON, except for one character."""
    if isinstance(value, float):
        return repr(value)  # inf, too
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, 98, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".json": parsed_json,
}
