"""Settings as flat names, which is how the command line has them: ``--crop``, ``--lr``.

A setting of the views holds for all of them (``--crop 224``), or has a value for each
(``--crop 224,224,96``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from .checks import require
from .docs import field_docs, heading
from .methods import METHOD_CONFIGS, MethodConfig
from .model import BackboneConfig, ModelConfig
from .train import TrainConfig
from .views import AugmentConfig, ViewConfig

FIXED_SECTIONS = ("augment", "model", "optim", "numerics")
"""Sections that define what is trained. The others say how it is run and may change on resume."""
FIXED_SETTINGS = {"data": ("holdout", "shuffle", "exif", "alpha", "image_column")}
"""Settings of the other sections that define what is trained."""
FIXED_IN_PLACE = ("image_column",)
"""Those of them that may change if the data move: they may lie in another form there."""
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

_SECTIONS = {ViewConfig: AugmentConfig, BackboneConfig: ModelConfig}
"""Sections of settings that other dataclasses than the section's own hold."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting of a training run, by its flat name."""

    name: str
    owner: type
    """The dataclass that has it as a field."""
    kind: Any
    """Its type; of a setting of the views, that of one view."""

    @property
    def for_each_view(self) -> bool:
        """Whether views may differ in it."""
        return self.owner is ViewConfig

    @property
    def help(self) -> str:
        """What it is for."""
        if self.owner is AugmentConfig and self.name == "views":
            return "Views of each image; settings of views: one for all, or a,b."
        if self.owner is ModelConfig and self.name == "method":
            return f"What is trained on the backbone: {', '.join(METHOD_CONFIGS)}."
        return field_docs(self.owner)[self.name]

    @property
    def heading(self) -> str:
        """What the settings beside it are about: those of its section, or of its method."""
        if issubclass(self.owner, MethodConfig):
            return f"Method {heading(self.owner)}"
        return heading(_SECTIONS.get(self.owner, self.owner))


def train_flags() -> list[Flag]:
    """Return all flags of a training run, section by section; those of every method are there."""
    found: dict[str, Flag] = {}
    for flags in section_flags().values():
        for flag in flags:
            known = found.setdefault(flag.name, flag)
            both = issubclass(known.owner, MethodConfig) and issubclass(flag.owner, MethodConfig)
            assert known is flag or both, f"{flag.name} is in two sections; flags are flat"
    return list(found.values())


def section_flags() -> dict[str, list[Flag]]:
    """Return the flags of each section; a setting of several methods is there once for each."""
    return {name: _flags_of_section(kind) for name, kind in get_type_hints(TrainConfig).items()}


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
        flags: as ``to_flags`` returns them. Flags of other methods than ``method`` are None.

    Raises:
        ValueError: a value makes no sense, or is of another method.
    """
    method = flags["method"]
    require(method in METHOD_CONFIGS, unknown_method(method))
    chosen = METHOD_CONFIGS[method]
    own = {f.name for f in fields(chosen)}
    for flag in train_flags():
        if issubclass(flag.owner, MethodConfig) and flag.name not in own:
            given = flags.get(flag.name) is not None
            require(not given, f"{flag.name.replace('_', '-')} is no setting of {method}")
    sections: dict[str, Any] = {}
    for section, kind in get_type_hints(TrainConfig).items():
        if kind is AugmentConfig:
            sections[section] = augment_from_flags(flags)
        elif kind is ModelConfig:
            backbone = {f.name: flags[f.name] for f in fields(BackboneConfig)}
            settings = chosen(**{name: flags[name] for name in own})
            sections[section] = ModelConfig(**backbone, method=settings)
        else:
            sections[section] = kind(**{f.name: flags[f.name] for f in fields(kind)})
    return TrainConfig(**sections)


def unknown_method(name: Any) -> str:
    """Say that there is no such method, and which there are."""
    return f"unknown method {name!r}; there are {', '.join(METHOD_CONFIGS)}"


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


def _flags_of_section(kind: type) -> list[Flag]:
    if kind is AugmentConfig:
        hints = get_type_hints(AugmentConfig)
        count = Flag("views", AugmentConfig, int)
        rest = [Flag(name, AugmentConfig, hints[name]) for name in ("mean", "std")]
        return [count, *_flags_of(ViewConfig), *rest]
    if kind is ModelConfig:
        methods = [flag for config in METHOD_CONFIGS.values() for flag in _flags_of(config)]
        return [Flag("method", ModelConfig, str), *_flags_of(BackboneConfig), *methods]
    return _flags_of(kind)


def _flags_of(kind: Any) -> list[Flag]:
    hints = get_type_hints(kind)
    return [Flag(f.name, kind, hints[f.name]) for f in fields(kind)]


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
    count, hints = flags["views"], get_type_hints(ViewConfig)
    columns = {
        f.name: _for_each_view(f.name, flags[f.name], hints[f.name], count)
        for f in fields(ViewConfig)
    }
    views = tuple(
        ViewConfig(**{name: column[i] for name, column in columns.items()}) for i in range(count)
    )
    return AugmentConfig(views=views, mean=flags["mean"], std=flags["std"])


def _for_each_view(name: str, value: Any, kind: Any, count: int) -> list[Any]:
    """Read one value for all views, or as many as there are views."""
    flag = name.replace("_", "-")
    try:
        values = [kind(part) for part in str(value).split(",")]
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{flag} takes {what}, or one for each view (a,b): {value!r}") from None
    require(
        len(values) in (1, count),
        f"{flag} has {len(values)} values for {count} views: give one, or one for each",
    )
    return values * count if len(values) == 1 else values
