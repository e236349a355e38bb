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

from .checks import or_nearest, require
from .flags import (
    flags_by_section,
    is_of_a_method,
    is_of_a_view,
    sections,
    to_flags,
    train_settings,
    unknown_method,
)
from .methods import METHOD_CONFIGS, MethodConfig
from .plain import from_plain
from .recipes import RECIPES
from .setting import Setting, from_text, settings_of
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
        if "config" in content:
            return _of_a_run(content, str(file), goes_on=goes_on)
        return _of_a_file(content, str(file))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def to_toml(config: TrainConfig, *, recipe: str) -> str:
    """Return all settings by section, the help of each as a comment above it."""
    lines = [
        *_comment("Settings of a training run: fastsiam train --config FILE. Flags beat them."),
        f"recipe = {_literal(recipe)}",
    ]
    for section, values in flags_by_section(config).items():
        lines += _section(section, values, type(config.model.method))
    return "\n".join(lines) + "\n"


def parse_assignments(texts: Iterable[str]) -> dict[str, Any]:
    """Return the settings that ``--set`` gives, as ``NAME=VALUE``.

    Raises:
        ValueError: there is no such setting, or it has no such value.
    """
    known, flags = {one.name: one for one in train_settings()}, {}
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
    recipe = recipe or _last(file.recipe for file in files) or next(iter(RECIPES))
    require(recipe in RECIPES, _unknown_recipe(recipe))
    flags = to_flags(RECIPES[recipe]())
    method = method or _last(file.method for file in files) or flags["method"]
    require(method in METHOD_CONFIGS, unknown_method(method))
    if method != flags["method"]:
        own = settings_of(METHOD_CONFIGS[method]).values()
        flags = _without(flags, flags["method"]) | {one.name: one.default for one in own}
    for file in files:
        other = file.method and file.method != method
        flags |= _without(file.flags, file.method) if other else file.flags
    source = " and ".join(file.source for file in files)
    return Settings(source=source, recipe=recipe, flags=flags | {"method": method})


def _of_a_run(content: dict[str, Any], source: str, *, goes_on: bool) -> Settings:
    config, recipe = content["config"], content.get("recipe")
    require(isinstance(config, dict), f"config must be a table of sections, not {config!r}")
    flags = to_flags(TrainConfig.from_dict(config))
    if not goes_on:
        flags = {name: value for name, value in flags.items() if name not in _OF_ONE_RUN}
    known = recipe if isinstance(recipe, str) and recipe in RECIPES else ""
    return Settings(source=source, recipe=known, flags=flags)


def _of_a_file(content: dict[str, Any], source: str) -> Settings:
    recipe = content.pop("recipe", "")
    require(not recipe or (isinstance(recipe, str) and recipe in RECIPES), _unknown_recipe(recipe))
    known = {  # of a name that several methods have the first, as in train_settings
        f"{section}.{one.name}": one
        for section, settings in sections().items()
        for one in reversed(settings)
    }
    flags: dict[str, Any] = {}
    for section, values in content.items():
        if section not in sections():
            what = "setting" if any(section == one.name for one in known.values()) else "section"
            raise ValueError(_unknown(what, in_a_line(section), known))
        require(isinstance(values, dict), f"{section} must be a table of settings, not {values!r}")
        for key, value in values.items():
            dotted = f"{section}.{in_a_line(key).replace('-', '_')}"
            if dotted not in known:
                raise ValueError(_unknown("setting", dotted, known))
            name = known[dotted].name
            require(name not in flags, f"{dotted} is there twice")
            flags[name] = _value(known[dotted], value, dotted)
    method = flags.get("method")
    require(method is None or method in METHOD_CONFIGS, unknown_method(method))
    return Settings(source=source, recipe=recipe, flags=flags)


def _value(setting: Setting, value: Any, where: str) -> Any:
    """Check the type of a setting's value; of a setting of the views, of each one's."""

    def checked(one: Any) -> Any:
        return from_plain(setting.kind, from_text(setting.kind, one), where=where)

    if not is_of_a_view(setting):
        return checked(value)
    if isinstance(value, str):
        return value  # a,b as on the command line
    return ",".join(str(checked(one)) for one in (value if isinstance(value, list) else [value]))


def _unknown(what: str, name: str, known: Mapping[str, Setting]) -> str:
    """Refuse a name: suggest the same one in another section, else the nearest."""
    refusal = f"unknown {what} {name}"
    if same := [other for other, one in known.items() if one.name == name.rpartition(".")[2]]:
        return f"{refusal}; did you mean {same[0]}?"
    if what == "section":
        return or_nearest(f"{refusal}; there are {', '.join(sections())}", name, sections())
    return or_nearest(refusal, name, known)


def _unknown_recipe(name: Any) -> str:
    there_are = f"unknown recipe {name!r}; there are {', '.join(RECIPES)}"
    return or_nearest(there_are, str(name), RECIPES)


def _last(names: Iterable[str]) -> str:
    return next((name for name in reversed(list(names)) if name), "")


def _without(flags: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Leave out a method's settings."""
    own = settings_of(METHOD_CONFIGS[method])
    return {name: value for name, value in flags.items() if name not in own}


def _yaml(text: str) -> Any:
    """Read YAML with all values as text: what a number or a word is follows from the setting."""
    import yaml

    try:
        return yaml.load(text, yaml.BaseLoader) or {}  # text, lists and tables alone  # nosec B506
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


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


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".json": parsed_json,
}
