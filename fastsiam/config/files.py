"""Settings in files, and how they add up: recipe, method, files, each beating the one before.

A settings file (TOML, YAML or JSON) has the sections of ``TrainConfig``, in each its settings by
their flags' names, and may name a recipe on top. A run's ``config.json`` is read as it is.
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fastsiam.errors import FastSiamError, in_a_line
from fastsiam.files import explained, parsed_json

from .checks import or_nearest, require
from .flags import is_of_a_view, sections, to_flags, train_settings, unknown_method
from .methods import METHOD_CONFIGS
from .plain import from_plain
from .recipes import RECIPES
from .setting import Setting
from .train import TrainConfig

_OF_ONE_RUN = "out", "resume", "extend", "extend_schedule", "restarts"
"""Settings that say where a run is and how it goes on: no other run's."""


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
        goes_on: whether it is a run that goes on; for another run, what says where this one is and
            how it goes on is left out.

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
            read = _of_a_run(content, str(file))
            return read if goes_on else _for_another_run(read)
        return _of_a_file(content, str(file))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def assigned(texts: Iterable[str]) -> dict[str, Any]:
    """Return the settings that ``--set`` gives, as ``NAME=VALUE`` with values as in a TOML file.

    Raises:
        ValueError: there is no such setting, or it has no such value.
    """
    known, found = {one.name: one for one in train_settings()}, {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        require(bool(equals), f"--set takes NAME=VALUE, not {text!r}")
        require(name in known, or_nearest(f"unknown setting {in_a_line(name)}", name, known))
        read: Any = value.strip()
        if known[name].kind is not str:
            with contextlib.suppress(tomllib.TOMLDecodeError):  # a word without quotes
                read = tomllib.loads(f"x = {value}")["x"]
        found[name] = _value(known[name], read, known[name].flag)
    return found


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


def layered(*, recipe: str = "", method: str = "", files: Iterable[Settings] = ()) -> Settings:
    """Add up settings: those of the recipe, of the method, of the files; later files beat earlier.

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
    values = to_flags(RECIPES[recipe]())
    method = method or _last(file.method for file in files) or values["method"]
    require(method in METHOD_CONFIGS, unknown_method(method))
    if method != values["method"]:
        values = _without(values, values["method"]) | {
            f.name: f.default for f in fields(METHOD_CONFIGS[method])
        }
    for file in files:
        other = file.method and file.method != method
        values |= _without(file.flags, file.method) if other else file.flags
    sources = " and ".join(file.source for file in files)
    return Settings(source=sources, recipe=recipe, flags=values | {"method": method})


def _for_another_run(settings: Settings) -> Settings:
    """Leave out what says where a run is and how it goes on."""
    flags = {name: x for name, x in settings.flags.items() if name not in _OF_ONE_RUN}
    return replace(settings, flags=flags)


def _of_a_run(content: dict[str, Any], source: str) -> Settings:
    config, recipe = TrainConfig.from_dict(content["config"]), content.get("recipe")
    known = recipe if isinstance(recipe, str) and recipe in RECIPES else ""
    return Settings(source=source, recipe=known, flags=to_flags(config))


def _of_a_file(content: dict[str, Any], source: str) -> Settings:
    recipe = content.pop("recipe", "")
    require(not recipe or (isinstance(recipe, str) and recipe in RECIPES), _unknown_recipe(recipe))
    known: dict[str, Setting] = {}
    for section, settings in sections().items():
        for one in settings:  # of a name that several methods have the first, as in train_settings
            known.setdefault(f"{section}.{one.name}", one)
    found: dict[str, Any] = {}
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
            require(name not in found, f"{dotted} is there twice")
            found[name] = _value(known[dotted], value, dotted)
    method = found.get("method")
    require(method is None or method in METHOD_CONFIGS, unknown_method(method))
    return Settings(source=source, recipe=recipe, flags=found)


def _value(setting: Setting, value: Any, dotted: str) -> Any:
    """Check the type of a setting's value; of a setting of the views, of each one's."""
    if not is_of_a_view(setting):
        return from_plain(setting.kind, value, where=dotted)
    if isinstance(value, str):
        return value  # a,b as on the command line
    each = value if isinstance(value, list) else [value]
    return ",".join(str(from_plain(setting.kind, one, where=dotted)) for one in each)


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
    own = {f.name for f in fields(METHOD_CONFIGS[method])}
    return {name: value for name, value in flags.items() if name not in own}


def _yaml(text: str) -> Any:
    """Read YAML as its version 1.2 has it: 1e-4 is a number, and off is a word."""
    import re

    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.yaml_implicit_resolvers = {
        first: [(tag, like) for tag, like in found if not tag.endswith((":bool", ":float"))]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    number = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    word = re.compile("(true|false)$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", word, list("tf"))
    try:
        return yaml.load(text, Loader) or {}  # a SafeLoader  # nosec B506
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".json": parsed_json,
}
