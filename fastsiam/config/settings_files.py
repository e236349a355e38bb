"""Settings files, and the precedence of recipe, method, run, settings file and options.

A settings file (TOML, YAML or JSON) has settings by name, optionally grouped in the sections of
``TrainConfig``, and may name a recipe. A run's ``config.json`` is a settings file, too.
"""

from __future__ import annotations

import json
import stat
import textwrap
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from fastsiam.console import format_number
from fastsiam.errors import DataError, FastSiamError
from fastsiam.files import os_errors_as, parse_json, require_local

from .methods import METHOD_CONFIGS, SimSiamConfig
from .recipes import CHANGES, RECIPES
from .setting import check_name, convert_value, require, settings_of
from .train import REMOVED, TrainConfig, all_settings, changes_text, train_settings

_NOT_COPIED = "out", "resume", "extend"
"""Settings of a run's folder and of resuming it, which are not copied to another run."""
_SUFFIXES = ".toml", ".yaml", ".yml", ".json"
_NULL = None, "null", "Null", "NULL", "~"
"""Null, in JSON and YAML."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Some settings, such as those in a file, and their source."""

    source: str = ""
    """Name of the source, for messages."""
    recipe: str = ""
    """Recipe that they are based on; empty if not named."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Values by name, as in the source; ``TrainConfig.from_flags`` converts and checks them."""

    @property
    def method(self) -> str:
        """Name of their method, or of their recipe's method; empty if they name neither."""
        of_recipe = CHANGES.get(self.recipe, {"method": ""})
        return str(self.flags.get("method", of_recipe.get("method", SimSiamConfig.name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """A run's settings and environment, from the ``config.json`` of this or an older version."""

    recipe: str
    config: TrainConfig
    """The settings as they were used."""
    user_config: TrainConfig
    """The settings as the user passed them; those used, if that is not recorded."""
    environment: dict[str, Any]
    """Versions and machine (``fastsiam.environment``)."""
    branch: Mapping[str, Any] | None
    """Run and step that this run branched off from; None if it is not a branch."""
    extensions: Sequence[Mapping[str, Any]]
    """Epoch and numbers of epochs of each ``--extend``."""
    compiled: bool | None
    """Whether the steps were compiled; None if that is not recorded."""
    restarts: bool
    """Whether version 0.2 extended the run with ``--extend-schedule restart``."""

    @classmethod
    def read(cls, run: Path) -> RunSettings:
        """Read ``config.json`` in a run's folder.

        Raises:
            DataError: the file is missing or invalid.
        """
        path = run / "config.json"
        with os_errors_as(DataError, f"cannot read the settings of the run, {path}"):
            content = path.read_bytes()
        try:
            values = parse_json(content)
            return cls(
                recipe=values["recipe"],
                config=TrainConfig.from_dict(values["config"]),
                user_config=TrainConfig.from_dict(values.get("asked", values["config"])),
                environment=_machine(values["environment"]),
                branch=values.get("branch"),
                extensions=values.get("extensions", ()),
                compiled=values.get("compiled"),
                restarts=bool(values["config"].get("optim", {}).get("restarts")),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"cannot read the settings of the run, {path}: {error}") from error

    def history(self, *, full_paths: bool) -> list[str]:
        """Describe where the run branched off, and each ``--extend``; the settings do not show it.

        Args:
            full_paths: name the original run by its path, which may reveal private information.
        """
        lines = []
        if origin := self.branch:
            changes = {name: (x["from"], x["to"]) for name, x in origin["changed"].items()}
            lines.append(
                f"branch of {origin['run'] if full_paths else Path(origin['run']).name} after step "
                f"{origin['step']:,} (epoch {format_number(origin['epoch'])}): "
                f"{changes_text(changes, between=', ') or 'the same settings'}"
            )
        return lines + [
            f"extended from {one['from']} to {one['to']} epochs after epoch "
            f"{format_number(one['epoch'])}"
            for one in self.extensions
        ]


def _machine(environment: dict[str, Any]) -> dict[str, Any]:
    """Return a run's ``environment`` after checking the entries that reports and tables use."""
    kinds = {"gpus": tuple[str, ...], "cpu": str, "cores": int, "fastsiam": str}
    for name, kind in kinds.items():
        convert_value(kind, environment[name], name)
    convert_value(str, environment["packages"]["torch"], "packages.torch")
    return environment


def read_settings(path: Path, *, resumes: bool = False) -> Settings:
    """Read a settings file, a run's config.json or a run's folder.

    Args:
        path: the file or folder.
        resumes: whether the run is resumed. Otherwise ``out``, ``resume`` and ``extend`` are left
            out.

    Raises:
        FastSiamError: the file cannot be read.
        ValueError: it is not a settings file, or has an unknown setting.
    """
    require_local(path, reads=True)
    with os_errors_as(FastSiamError, f"cannot read {path}"):
        file = path / "config.json" if stat.S_ISDIR(path.stat().st_mode) else path
    if file.suffix not in _SUFFIXES:
        suffixes = ", ".join(_SUFFIXES)
        raise ValueError(
            f"{file}: settings must be in a file ending in {suffixes}, or in a run's folder"
        )
    with os_errors_as(FastSiamError, f"cannot read {file}"):
        text = file.read_bytes()
    try:
        content = _parse(text.decode("utf-8-sig"), file.suffix)
        require(isinstance(content, Mapping), "it must be a table of settings")
        recipe, flags = content.pop("recipe", ""), {}
        if "config" in content:
            flags = TrainConfig.from_dict(content["config"]).to_flags()
            recipe = recipe if recipe in [*RECIPES] else ""
            for name in () if resumes else _NOT_COPIED:
                del flags[name]
        else:
            settings = train_settings()
            for section, value in content.items():
                table = value if isinstance(value, Mapping) else {section: value}
                require(not table.get("restarts"), _removed("restarts"))
                for key in [x for x in table if _as_name(x) not in REMOVED]:
                    name = _setting_name(key, settings)
                    require(name not in flags, f"{name} occurs twice")
                    require(table[key] not in _NULL, f"{name} has no value: leave it out")
                    flags[name] = table[key]
            check_name("recipe", recipe, ["", *RECIPES])
            check_name("method", flags.get("method", ""), ["", *METHOD_CONFIGS])
    except UnicodeDecodeError:
        raise ValueError(f"{file}: its text is not UTF-8; save it as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from error
    return Settings(source=str(file), recipe=recipe, flags=flags)


def _parse(text: str, suffix: str) -> Any:
    """Parse a file's text. YAML values stay text, which the settings convert to their types."""
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix == ".json":
        return parse_json(text, table=_table)
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
    """Return pairs as a dictionary; raise if a name occurs twice, as TOML does."""
    for name, count in Counter(name for name, _ in pairs).items():
        require(count == 1, f"{name} occurs twice")
    return dict(pairs)


def _as_name(text: object) -> str:
    return str(text).strip().replace("-", "_")


def _setting_name(text: object, settings: Collection[str]) -> str:
    name = _as_name(text)
    require(name not in REMOVED, _removed(name))
    check_name("setting", name, settings)
    return name


def _removed(name: str) -> str:
    return f"{name} was removed in version 0.3; leave it out (CHANGELOG.md says what replaces it)"


def parse_assignments(texts: Iterable[str]) -> dict[str, Any]:
    """Parse the arguments ``NAME=VALUE`` of ``--set``.

    Raises:
        ValueError: "=" is missing, or the setting is unknown.
    """
    flags, settings = {}, train_settings()
    for text in texts:
        name, equals, value = text.partition("=")
        require(bool(equals), f"--set takes NAME=VALUE, not {text!r}")
        flags[_setting_name(name, settings)] = value.strip()
    return flags


def to_toml(config: TrainConfig, *, recipe: str) -> str:
    """Return all settings as TOML, by section, with each setting's help as a comment above it."""
    lines = [
        "# Settings of a training run: fastsiam train --config FILE. Flags override them.",
        f"recipe = {json.dumps(recipe)}",
    ]
    settings = all_settings(config.model.method.name)
    for section, values in config.flags_by_section().items():
        lines += ["", "", f"[{section}]"]
        section_settings = [one for one in settings if one.name in values]
        for heading, group in groupby(section_settings, key=lambda one: one.section):
            lines += ["", *_comment(f"{heading}.")]
            for one in group:
                # JSON values are valid TOML, except for null and the character DEL.
                text = json.dumps(values[one.name], ensure_ascii=False).replace("\x7f", "\\u007f")
                line = f"# {one.name} is not set" if text == "null" else f"{one.name} = {text}"
                lines += ["", *_comment(one.help), line]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, 98, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


def run_folder(path: Path) -> Path | None:
    """Return the folder of a run, given the folder or a checkpoint in it; None for other files.

    Raises:
        FastSiamError: the path cannot be read.
    """
    with os_errors_as(FastSiamError, f"cannot read {path}"):
        if path.is_dir():
            return path
        # First without resolving symlinks: the folder or its files may be on another disk.
        files = [x for x in (path.absolute(), path.resolve()) if x.parent.name == "checkpoints"]
        folders = [file.parents[1] for file in files]
        runs = [folder for folder in folders if (folder / "config.json").exists()]
    return next(iter(runs or folders), None)


def merge(*sources: Settings, recipe: str = "") -> Settings:
    """Merge settings: each source overrides the previous ones, and all override the recipe.

    The last source that names a method or a recipe determines it. Settings of other methods are
    left out.

    Args:
        sources: in order of increasing precedence.
        recipe: name of the recipe, instead of those that sources name; default: that of the last
            source with one, else the first recipe. It determines the method if no source names one.

    Returns:
        All settings, and the name of the recipe.

    Raises:
        ValueError: there is no such recipe or method.
    """
    method, is_named = "", bool(recipe)
    for source in sources[::-1]:
        method = method or (str(source.flags.get("method", "")) if is_named else source.method)
        recipe = recipe or source.recipe
    recipe = recipe or next(iter(RECIPES))
    check_name("recipe", recipe, RECIPES)
    of_recipe = Settings(recipe=recipe, flags=CHANGES[recipe])
    method = method or of_recipe.method
    check_name("method", method, METHOD_CONFIGS)
    defaults = Settings(flags=TrainConfig().to_flags())
    flags = METHOD_CONFIGS[method]().to_flags()
    for source in (defaults, of_recipe, *sources):
        is_other_method = source.method and source.method != method
        excluded_names = settings_of(METHOD_CONFIGS[source.method]) if is_other_method else {}
        flags |= {name: x for name, x in source.flags.items() if name not in excluded_names}
    files = " and ".join(source.source for source in sources if source.source)
    return Settings(source=files, recipe=recipe, flags=flags | {"method": method})
