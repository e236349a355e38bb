"""Settings of a training run under flat names, as on the command line: ``crop``, ``lr``.

A setting of the views has one value for all of them (``224``), or one for each (``224,224,96``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from itertools import chain
from typing import Any, get_type_hints

from .methods import METHOD_CONFIGS
from .model import ModelConfig
from .setting import Config, Setting, check_name, checked, require, settings_of
from .train import TrainConfig
from .views import AugmentConfig, ViewConfig

FIXED_SECTIONS = ("augment", "model", "optim", "numerics")
"""Sections that define what is trained. The others say how it is run and may change on resume."""
FIXED_SETTINGS = {"data": ("weights", "holdout", "shuffle", "exif", "alpha", "image_column")}
"""Settings of the other sections that define what is trained."""
FIXED_IN_PLACE = ("image_column",)
"""Fixed settings that may change if the data move, because the new place may be another format."""
BRANCH_SETTINGS = (
    "epochs", "lr", "momentum", "weight_decay", "lars_trust", "lars_all", "warmup_epochs",
    "warmup_from", "lr_end", "accumulate", "predictor_lr",
)  # fmt: skip
"""Fixed settings that a branch of a run may change: weights, momenta and the number of finished
steps keep their meaning. With another batch or optimizer they do not."""


def sections() -> dict[str, list[Setting]]:
    """Return the settings of each section; a name that several methods share occurs repeatedly."""
    hints = get_type_hints(TrainConfig)
    found = {name: [*settings_of(kind).values()] for name, kind in hints.items()}
    found["augment"] += settings_of(ViewConfig).values()
    for config in METHOD_CONFIGS.values():
        found["model"] += settings_of(config).values()
    return found


def train_settings() -> dict[str, Setting]:
    """Return all settings by name; of a name that several methods share, the first method's."""
    found: dict[str, Setting] = {}
    for one in chain(*sections().values()):
        found.setdefault(one.name, one)
    return found


def flags_by_section(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Return every setting's value by section and name."""
    return {f.name: _flags(getattr(config, f.name)) for f in fields(config)}


def to_flags(config: TrainConfig) -> dict[str, Any]:
    """Return every setting's value by name; if the views differ, as text ``a,b``."""
    return {k: v for section in flags_by_section(config).values() for k, v in section.items()}


def _flags(section: Any) -> dict[str, Any]:
    own = {f.name: getattr(section, f.name) for f in fields(section)}
    if isinstance(section, AugmentConfig):
        own["views"] = len(section.views)
        for name in settings_of(ViewConfig):
            values = [getattr(view, name) for view in section.views]
            own[name] = values[0] if len(set(values)) == 1 else ",".join(map(str, values))
    if isinstance(section, ModelConfig):
        own |= _flags(section.method) | {"method": section.method.name}
    return own


def from_flags(flags: Mapping[str, Any]) -> TrainConfig:
    """Build the settings of a run.

    Args:
        flags: values by name, as ``to_flags`` returns them or as text; missing ones get their
            defaults. Settings of other methods must be missing or None.

    Raises:
        ValueError: a value is not allowed, or belongs to another method.
    """
    check_name("method", method := flags["method"], METHOD_CONFIGS)
    foreign = {name for other in METHOD_CONFIGS.values() for name in settings_of(other)}
    for name in foreign - settings_of(METHOD_CONFIGS[method]).keys():
        require(flags.get(name) is None, f"{name.replace('_', '-')} is no setting of {method}")
    sections = get_type_hints(TrainConfig).items()
    return TrainConfig(**{name: section_from_flags(kind, flags) for name, kind in sections})


def section_from_flags(kind: type[Config], flags: Mapping[str, Any]) -> Any:
    """Build one section of the settings; arguments and errors are those of ``from_flags``."""
    own = {name: flags[name] for name in settings_of(kind) if name in flags}
    if kind is ModelConfig:
        own["method"] = section_from_flags(METHOD_CONFIGS[flags["method"]], flags)
    if kind is AugmentConfig:
        count = checked(int, own["views"], "views")
        columns = {x: _of_each_view(x, flags[x], count) for x in settings_of(ViewConfig)}
        own["views"] = tuple(
            ViewConfig(**{name: column[i] for name, column in columns.items()})
            for i in range(count)
        )
    return kind(**own)


def _of_each_view(name: str, value: Any, count: int) -> list[Any]:
    values = value.strip("[]").split(",") if isinstance(value, str) else value
    values = list(values) if isinstance(values, list | tuple) else [values]
    require(
        len(values) in (1, count),
        f"{name.replace('_', '-')} has {len(values)} values for {count} views; give one, or one "
        "for each",
    )
    return values * (count // len(values))


def with_method(flags: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return the flags with another method, whose own settings have their defaults."""
    if method == flags["method"]:
        return dict(flags)
    own = {one.name: one.default for one in settings_of(METHOD_CONFIGS[method]).values()}
    return without_method(flags, flags["method"]) | own | {"method": method}


def without_method(flags: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return the flags without a method's own settings."""
    own = settings_of(METHOD_CONFIGS[method])
    return {name: value for name, value in flags.items() if name not in own}


def as_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Return the values of ``to_flags`` as words of a command line."""
    words = []
    for one in train_settings().values():
        value = flags.get(one.name)
        if one.name == "mixed_with":
            words += [word for item in value or () for word in ("--data", item)]
        elif isinstance(value, bool) and one.option:
            words.append(f"--{one.flag}" if value else f"--no-{one.flag}")
        elif value is not None:
            text = as_text(value)
            words += [f"--{one.flag}", text] if one.option else ["--set", f"{one.name}={text}"]
    return words


def differences(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two runs train something different, as name: (old, new)."""
    found = {}
    moved = not old.data.has_same_root(new.data)
    for section in (*FIXED_SECTIONS, *FIXED_SETTINGS):
        before, after = _flags(getattr(old, section)), _flags(getattr(new, section))
        for name in FIXED_SETTINGS.get(section, before | after):
            may_differ = moved and name in FIXED_IN_PLACE
            if before.get(name) != after.get(name) and not may_differ:
                found[name] = before.get(name), after.get(name)
    return found


def changes_text(changed: Mapping[str, tuple[Any, Any]], *, between: str = "; ") -> str:
    """Return the result of ``differences`` as text."""
    texts = []
    for name, values in changed.items():
        old, new = (as_text(value) or "none" for value in values)
        texts.append(f"{name.replace('_', '-')}: {old} -> {new}")
    return between.join(texts)


def as_text(value: Any) -> str:
    """Return a setting's value as on the command line: a tuple as ``a,b``."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
