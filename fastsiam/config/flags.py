"""Settings as flat names, which is how the command line has them: ``--crop``, ``--lr``.

A setting of the views holds for all of them (``--crop 224``), or has a value for each
(``--crop 224,224,96``).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from .checks import check_name, require
from .methods import METHOD_CONFIGS, MethodConfig
from .model import ModelConfig
from .setting import Setting, checked, settings_of, title
from .train import TrainConfig
from .views import AugmentConfig, ViewConfig

FIXED_SECTIONS = ("augment", "model", "optim", "numerics")
"""Sections that define what is trained. The others say how it is run and may change on resume."""
FIXED_SETTINGS = {"data": ("weights", "holdout", "shuffle", "exif", "alpha", "image_column")}
"""Settings of the other sections that define what is trained."""
FIXED_IN_PLACE = ("image_column",)
"""Those of them that may change if the data move: they may lie in another form there."""
SEVERAL = {"data": "mixed_with"}
"""Options that may be given several times, and the settings that hold all values but the first."""
BRANCH_SETTINGS = (
    "epochs",
    "lr",
    "momentum",
    "weight_decay",
    "lars_trust",
    "lars_all",
    "warmup_epochs",
    "warmup_from",
    "lr_end",
    "accumulate",
    "predictor_lr",
)
"""Settings of these that a branch of a run may change: the weights, the momenta and the number of
steps done mean the same under other values. They do not under another batch or optimizer."""


def sections() -> dict[str, list[Setting]]:
    """Return the settings of each section; those of several methods are there once for each."""
    found = {
        name: [*settings_of(kind, title(kind)).values()]
        for name, kind in get_type_hints(TrainConfig).items()
    }
    count, *of_all_views = found["augment"]
    of_each = settings_of(ViewConfig, title(AugmentConfig)).values()
    found["augment"] = [count, *of_each, *of_all_views]
    backbone, (method,) = found["model"][:-1], found["model"][-1:]
    of_methods = [
        one
        for config in METHOD_CONFIGS.values()
        for one in settings_of(config, f"Method {title(config)}").values()
    ]
    found["model"] = [method, *backbone, *of_methods]
    return found


def train_settings() -> dict[str, Setting]:
    """Return all settings of a training run by name; a name of several methods is the first's."""
    found: dict[str, Setting] = {}
    for one in itertools.chain(*sections().values()):
        found.setdefault(one.name, one)
    return found


def is_of_a_method(one: Setting) -> bool:
    """Tell whether a setting is that of a method."""
    return issubclass(one.owner, MethodConfig)


def is_of_a_view(one: Setting) -> bool:
    """Tell whether each view has a value of the setting."""
    return one.owner is ViewConfig


def to_flags(config: TrainConfig) -> dict[str, Any]:
    """Return every setting by its flag's name; one in which views differ as ``a,b``, as text."""
    return {
        name: value
        for settings in flags_by_section(config).values()
        for name, value in settings.items()
    }


def flags_by_section(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Return what ``to_flags`` does, apart for each section."""
    return {f.name: _settings(getattr(config, f.name)) for f in fields(config)}


def from_flags(flags: Mapping[str, Any]) -> TrainConfig:
    """Build the settings out of every flag's value.

    Args:
        flags: as ``to_flags`` returns them. Flags that belong to other methods have the value None.

    Raises:
        ValueError: a value makes no sense, or is of another method.
    """
    check_name("method", method := flags["method"], METHOD_CONFIGS)
    own = METHOD_CONFIGS[method]
    for one in train_settings().values():
        given = flags.get(one.name) is not None
        foreign = is_of_a_method(one) and one.name not in settings_of(own)
        require(not (given and foreign), f"{one.flag} is no setting of {method}")

    def built(kind: type, **others: Any) -> Any:
        values = {name: flags[name] for name in settings_of(kind) if name not in others}
        return kind(**values, **others)

    special = {"augment": augment_from_flags(flags), "model": built(ModelConfig, method=built(own))}
    sections = get_type_hints(TrainConfig).items()
    return TrainConfig(**{name: special.get(name) or built(kind) for name, kind in sections})


def with_method(flags: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return the flags with a method's defaults for the settings of the method they are of."""
    if method == flags["method"]:
        return dict(flags)
    own = {one.name: one.default for one in settings_of(METHOD_CONFIGS[method]).values()}
    return without_method(flags, flags["method"]) | own | {"method": method}


def without_method(flags: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return the flags without those that are a method's settings."""
    own = settings_of(METHOD_CONFIGS[method])
    return {name: value for name, value in flags.items() if name not in own}


def as_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Return settings as the words of a command line.

    Args:
        flags: as ``to_flags`` returns them.
    """
    words = []
    for one in train_settings().values():
        value = flags.get(one.name)
        if one.name in SEVERAL.values():
            (option,) = (first for first, others in SEVERAL.items() if others == one.name)
            words += [word for item in value or () for word in (f"--{option}", item)]
        elif isinstance(value, bool) and one.option:
            words.append(f"--{one.flag}" if value else f"--no-{one.flag}")
        elif value is not None:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [f"--{one.flag}", text] if one.option else ["--set", f"{one.name}={text}"]
    return words


def differences(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two runs train something different, as name: (old, new)."""
    found = {}
    moved = not old.data.has_same_root(new.data)
    for section in (*FIXED_SECTIONS, *FIXED_SETTINGS):
        before, after = (_settings(getattr(config, section)) for config in (old, new))
        for name in FIXED_SETTINGS.get(section, before | after):
            may_differ = moved and name in FIXED_IN_PLACE
            if before.get(name) != after.get(name) and not may_differ:
                found[name] = before.get(name), after.get(name)
    return found


def changes_text(changed: Mapping[str, tuple[Any, Any]], *, between: str = "; ") -> str:
    """Return changed settings for a message, as ``name: old -> new``, in one line."""

    def text(value: Any) -> Any:
        return "none" if value == "" else value

    return between.join(
        f"{name.replace('_', '-')}: {text(old)} -> {text(new)}"
        for name, (old, new) in changed.items()
    )


def _settings(section: Any) -> dict[str, Any]:
    """Return a section's settings by their flags' names."""
    settings = {f.name: getattr(section, f.name) for f in fields(section)}
    if isinstance(section, AugmentConfig):
        views = section.views
        settings["views"] = len(views)
        settings |= {
            f.name: _joined([getattr(v, f.name) for v in views]) for f in fields(ViewConfig)
        }
    if isinstance(section, ModelConfig):
        settings["method"] = section.method.name
        settings |= {f.name: getattr(section.method, f.name) for f in fields(section.method)}
    return settings


def _joined(values: list[Any]) -> Any:
    alike = all(value == values[0] for value in values)
    return values[0] if alike else ",".join(map(str, values))


def augment_from_flags(flags: Mapping[str, Any]) -> AugmentConfig:
    """Build the settings of the views alone; flags and errors as of ``from_flags``."""
    count = flags["views"]
    columns = {
        name: _for_each_view(one, flags[name], count)
        for name, one in settings_of(ViewConfig).items()
    }
    views = tuple(
        ViewConfig(**{name: column[i] for name, column in columns.items()}) for i in range(count)
    )
    return AugmentConfig(views=views, mean=flags["mean"], std=flags["std"])


def _for_each_view(one: Setting, value: Any, count: int) -> list[Any]:
    """Read one value for all views, or as many as there are views."""
    values = [checked(one.kind, part, one.flag, text=True) for part in str(value).split(",")]
    require(
        len(values) in (1, count),
        f"{one.flag} has {len(values)} values for {count} views: give one, or one for each",
    )
    return values * count if len(values) == 1 else values
