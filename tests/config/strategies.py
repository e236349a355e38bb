"""Settings of any training run, for properties that hold for all of them."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from hypothesis import reject
from hypothesis import strategies as st

from fastsiam.config import METHOD_CONFIGS, TrainConfig, ViewConfig
from fastsiam.config.files import Settings, merge
from fastsiam.config.recipes import RECIPES
from fastsiam.config.setting import Setting, settings_of
from fastsiam.config.train import train_settings

TEXTS = {
    "data": ["", 's3://a/b"', 'a "b"\\c\té'],
    "holdout": ["", "10%"],
    "shuffle": ["full", "window:8"],
    "backbone": ["resnet18", "convnext_tiny", "timm/x"],
    "rendezvous": ["", "node1:29500"],
    "resume": ["auto", "never"],
    "tracker": ["none", "wandb,mlflow"],
}
"""Values of the texts that are not arbitrary."""


@st.composite
def configs(draw: st.DrawFn) -> TrainConfig:
    """Return a recipe, perhaps with another method, and a few settings changed."""
    recipe = draw(st.sampled_from([*RECIPES]))
    views = len(RECIPES[recipe]().augment.views)
    methods = [*METHOD_CONFIGS] if views == 2 else ["fastsiam", "swav"]
    method = draw(st.sampled_from(methods))
    flags = dict(merge(Settings(recipe=recipe, flags={"method": method})).flags)
    known = train_settings() | settings_of(METHOD_CONFIGS[method])
    names = sorted(flags.keys() - {"views", "method", "nodes", "weights"})
    for name in draw(st.lists(st.sampled_from(names), max_size=4, unique=True)):
        one = value(known[name])
        if name in settings_of(ViewConfig):
            several = st.lists(one, min_size=views, max_size=views)
            one = one | several.map(lambda each: ",".join(map(str, each)))
        flags[name] = draw(one)
    try:
        return TrainConfig.from_flags(flags)
    except ValueError:  # settings that contradict each other
        reject()


def value(setting: Setting) -> st.SearchStrategy[Any]:
    """Return any value of a setting's type and range."""
    kind, bounds = setting.kind, setting.bounds
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if kind is bool:
        return st.booleans()
    if kind is str:
        return st.sampled_from(TEXTS[setting.name]) if setting.name in TEXTS else st.text()
    if kind == tuple[str, ...]:
        return st.lists(st.text(min_size=1), max_size=2).map(tuple)
    if kind in (int, int | str):
        first = int(bounds.get("at_least", 0))
        return st.integers(first, int(bounds.get("at_most", first + 1000)))
    least = bounds.get("at_least", bounds.get("above", 0.0))
    most = bounds.get("at_most", bounds.get("below", least + 1e6))
    number = st.floats(least, most).filter(setting.allows)
    return number if kind is float else st.tuples(*[number] * len(get_args(kind)))
