"""Settings files, and the order in which recipe, method, run and files override one another.

A settings file (TOML, YAML or JSON) has settings by name, perhaps grouped in the sections of
``TrainConfig``, and may name a recipe. A run's ``config.json`` is read as it is.
"""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from fastsiam.errors import DataError, FastSiamError
from fastsiam.files import explained, parsed_json, require_local

from .methods import METHOD_CONFIGS, SimSiamConfig
from .recipes import CHANGES, RECIPES
from .setting import check_name, checked, require, settings_of
from .train import REMOVED, TrainConfig, all_settings, train_settings

_OF_ONE_RUN = "out", "resume", "extend"
"""Settings that say where a run is and how it continues; another run does not take them over."""
_SUFFIXES = ".toml", ".yaml", ".yml", ".json"
_NULL = None, "null", "Null", "NULL", "~"
"""No value, in JSON and YAML."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Some settings, such as those in a file."""

    source: str = ""
    """Where they are from, for messages."""
    recipe: str = ""
    """The recipe that they change; empty if they name none."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Values by name, as in the source: ``TrainConfig.from_flags`` checks their types."""

    @property
    def method(self) -> str:
        """The method whose settings they hold; empty if they do not say."""
        of_recipe = CHANGES.get(self.recipe, {"method": ""})
        return str(self.flags.get("method", of_recipe.get("method", SimSiamConfig.name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """A run's settings and machine, written by this version or an older one."""

    recipe: str
    config: TrainConfig
    """The settings as they were used."""
    environment: dict[str, Any]
    """Versions and machine (``fastsiam.environment``)."""
    branch: Mapping[str, Any] | None
    """Where the run branched off another; None if it did not."""
    compiled: bool | None
    """Whether the steps were compiled; None if that is not recorded."""

    @classmethod
    def read(cls, run: Path) -> RunSettings:
        """Read the file in a run's folder.

        Raises:
            DataError: it is missing or damaged.
        """
        path = run / "config.json"
        with explained(DataError, f"cannot read the settings of the run, {path}"):
            content = path.read_bytes()
        try:
            found = parsed_json(content)
            return cls(
                recipe=found["recipe"],
                config=TrainConfig.from_dict(found["config"]),
                environment=_machine(found["environment"]),
                branch=found.get("branch"),
                compiled=found.get("compiled"),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"cannot read the settings of the run, {path}: {error}") from error


def _machine(environment: dict[str, Any]) -> dict[str, Any]:
    """Return a run's ``environment`` if it has what reports and tables name."""
    kinds = {"gpus": tuple[str, ...], "cpu": str, "cores": int, "fastsiam": str}
    for name, kind in kinds.items():
        checked(kind, environment[name], name)
    checked(str, environment["packages"]["torch"], "packages.torch")
    return environment


def read_settings(path: Path, *, resumes: bool = False) -> Settings:
    """Read a settings file, a run's config.json or a run's folder.

    Args:
        path: of the file or folder.
        resumes: whether to resume the run; otherwise the settings that say where it is and how it
            continues are left out.

    Raises:
        FastSiamError: the file cannot be read.
        ValueError: it holds no settings, or one of an unknown name.
    """
    require_local(path, reads=True)
    with explained(FastSiamError, f"cannot read {path}"):
        file = path / "config.json" if path.is_dir() else path
    if file.suffix not in _SUFFIXES:
        known = ", ".join(_SUFFIXES)
        raise ValueError(f"{file}: settings are in files {known}, or in a run's folder")
    with explained(FastSiamError, f"cannot read {file}"):
        text = file.read_bytes()
    try:
        content = _parsed(text.decode("utf-8-sig"), file.suffix)
        require(isinstance(content, Mapping), "it must be a table of settings")
        recipe, flags = content.pop("recipe", ""), {}
        if "config" in content:
            flags = TrainConfig.from_dict(content["config"]).to_flags()
            recipe = recipe if recipe in [*RECIPES] else ""
            for name in () if resumes else _OF_ONE_RUN:
                del flags[name]
        else:
            for section, value in content.items():
                table = value if isinstance(value, Mapping) else {section: value}
                require(not table.get("restarts"), "restarts was removed after version 0.2")
                for key in [key for key in table if key not in REMOVED]:
                    require((name := _known_name(key)) not in flags, f"{name} is there twice")
                    require(table[key] not in _NULL, f"{name} has no value: leave it out")
                    flags[name] = table[key]
            check_name("recipe", recipe, ["", *RECIPES])
            check_name("method", flags.get("method", ""), ["", *METHOD_CONFIGS])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from error
    return Settings(source=str(file), recipe=recipe, flags=flags)


def _parsed(text: str, suffix: str) -> Any:
    """Parse a file; the values of YAML stay text, so that the settings decide their types."""
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix == ".json":
        return parsed_json(text, table=_table)
    import yaml

    class Loader(yaml.BaseLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _table([(str(name.value), value) for name, value in node.value])
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader) or {}  # nosec B506
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a table of names and values, as TOML has it: each name is there once."""
    for name, count in Counter(name for name, _ in pairs).items():
        require(count == 1, f"{name} is there twice")
    return dict(pairs)


def _known_name(text: object) -> str:
    name = str(text).strip().replace("-", "_")
    check_name("setting", name, train_settings())
    return name


def parse_assignments(texts: Iterable[str]) -> dict[str, Any]:
    """Return the settings that ``--set`` gives, as ``NAME=VALUE``.

    Raises:
        ValueError: there is no such setting.
    """
    flags = {}
    for text in texts:
        name, equals, value = text.partition("=")
        require(bool(equals), f"--set takes NAME=VALUE, not {text!r}")
        flags[_known_name(name)] = value.strip()
    return flags


def to_toml(config: TrainConfig, *, recipe: str) -> str:
    """Return all settings by section, with the help of each as a comment above it."""
    lines = [
        "# Settings of a training run: fastsiam train --config FILE. Flags override them.",
        f"recipe = {json.dumps(recipe)}",
    ]
    settings = all_settings(config.model.method.name)
    for section, values in config.flags_by_section().items():
        lines += ["", "", f"[{section}]"]
        own = [one for one in settings if one.name in values]
        for heading, group in groupby(own, key=lambda one: one.section):
            lines += ["", *_comment(f"{heading}.")]
            for one in group:
                # JSON's text is TOML's, except for one character.
                text = json.dumps(values[one.name], ensure_ascii=False).replace("\x7f", "\\u007f")
                lines += ["", *_comment(one.help), f"{one.name} = {text}"]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, 98, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


def run_folder(path: Path) -> Path | None:
    """Return the folder of a run, given it or a checkpoint in it; None if in no run's folder.

    Raises:
        FastSiamError: the path cannot be read.
    """
    with explained(FastSiamError, f"cannot read {path}"):
        if path.is_dir():
            return path
    # First without following links: the folder or its files may lie on another disk.
    files = [x for x in (path.absolute(), path.resolve()) if x.parent.name == "checkpoints"]
    folders = [file.parents[1] for file in files]
    with explained(FastSiamError, f"cannot read {path}"):
        runs = [folder for folder in folders if (folder / "config.json").exists()]
    return next(iter(runs or folders), None)


def merge(*sources: Settings, recipe: str = "") -> Settings:
    """Merge settings: each source overrides the ones before, and all override the recipe.

    The last source that names a method, or a recipe, decides it; settings of other methods are left
    out.

    Args:
        sources: from the weakest to the strongest.
        recipe: name; by default that of the last source with one, else the first recipe. It decides
            the method only if no source does.

    Returns:
        Every setting, and the recipe.

    Raises:
        ValueError: there is no such recipe or method.
    """
    method = ""
    for source in sources[::-1]:
        recipe, method = recipe or source.recipe, method or source.method
    recipe = recipe or next(iter(RECIPES))
    check_name("recipe", recipe, RECIPES)
    of_recipe = Settings(recipe=recipe, flags=CHANGES[recipe])
    method = method or of_recipe.method
    check_name("method", method, METHOD_CONFIGS)
    defaults = Settings(flags=TrainConfig().to_flags())
    flags = METHOD_CONFIGS[method]().to_flags()
    for source in (defaults, of_recipe, *sources):
        of_another = source.method and source.method != method
        left_out = settings_of(METHOD_CONFIGS[source.method]) if of_another else {}
        flags |= {name: x for name, x in source.flags.items() if name not in left_out}
    files = " and ".join(source.source for source in sources if source.source)
    return Settings(source=files, recipe=recipe, flags=flags | {"method": method})
