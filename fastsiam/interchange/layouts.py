"""Names of weights in other programs, and ours: tables of prefixes, read from the programs' code.

- simsiam: facebookresearch/simsiam, simsiam/builder.py: torchvision's ResNet whose ``fc`` is the
  projector; its last layer has a bias that is never trained.
- mmselfsup: open-mmlab/mmselfsup and mmpretrain, models/necks/nonlinear_neck.py,
  models/heads/latent_pred_head.py; the ResNet has torchvision's names.
- solo-learn: vturrisi/solo-learn, solo/methods/base.py and simsiam.py; files of 2021 say
  ``encoder`` for ``backbone``.
- lightly: lightly/models/modules/heads.py. Its examples put a network's children into an
  ``nn.Sequential``, which numbers them; lightly/models/resnet.py has names of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from fastsiam.config import Stem

_WRAPPERS = ("module.", "model.")
"""Prefixes of DistributedDataParallel (AveragedModel too) and of LightningModules."""

_LAYERS = range(8)
"""More layers than any head has."""

Rules = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a program names the parts of SimSiam."""

    name: str
    marks: tuple[str, ...]
    """Patterns, each at the start of one key at least."""
    rules: Rules
    """Pattern at the start of a key, and what stands there with us; None leaves the key out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A file's weights by our names."""

    layout: str
    weights: dict[str, Tensor]
    origin: dict[str, str]
    """What each weight is called in the file."""
    left_out: list[str]
    """Keys that a rule leaves out."""
    small_stem: Stem
    """What a 3x3 first convolution means in this layout."""


_BACKBONE: Rules = ((r"(backbone|encoder)\.", "backbone."),)
_CLASSIFIERS: Rules = (
    (r"(backbone\.)?linear\.", None),
    (r"(online_)?classifier\.", None),
    (r"classification_head\.", None),
)
"""Of lightly's networks, and those that are trained beside an encoder to watch it."""

LAYOUTS = (
    Layout(
        name="simsiam",
        marks=(r"encoder\.fc\.0\.",),
        rules=((r"encoder\.fc\.", "projector."), *_BACKBONE, (r"predictor\.", "predictor.")),
    ),
    Layout(
        name="mmselfsup",
        marks=(r"neck\.fc0\.",),
        rules=(
            (r"encoder\.[01]\.", None),  # before 1.0: backbone and neck, once more
            *_BACKBONE,
            *((rf"neck\.fc{i}\.", f"projector.{3 * i}.") for i in _LAYERS),
            *((rf"neck\.bn{i}\.", f"projector.{3 * i + 1}.") for i in _LAYERS),
            *((rf"head\.predictor\.fc{i}\.", f"predictor.{3 * i}.") for i in _LAYERS),
            *((rf"head\.predictor\.bn{i}\.", f"predictor.{3 * i + 1}.") for i in _LAYERS),
            (r"data_preprocessor\.", None),
        ),
    ),
    Layout(
        name="lightly",
        marks=(r"(projection|prediction)_head\.layers\.",),
        rules=(
            *_CLASSIFIERS,
            *_BACKBONE,
            (r"projection_head\.layers\.", "projector."),
            (r"prediction_head\.layers\.", "predictor."),
        ),
    ),
    Layout(
        name="solo-learn",
        marks=(r"projector\.0\.",),
        rules=(
            *_CLASSIFIERS,
            *_BACKBONE,
            (r"projector\.", "projector."),
            (r"predictor\.", "predictor."),
        ),
    ),
    Layout(  # its linear evaluation
        name="solo-learn",
        marks=(r"backbone\.", r"classifier\.weight"),
        rules=(*_CLASSIFIERS, *_BACKBONE),
    ),
    Layout(
        name="torchvision",
        marks=(r"(backbone|encoder\.(conv1|0))\.",),
        rules=(*_CLASSIFIERS, *_BACKBONE, (r"(data_preprocessor|head)\.", None)),
    ),
    Layout(name="torchvision", marks=(), rules=((r"linear\.", None), ("", "backbone."))),
)
"""The layouts that are known, the most peculiar first."""

_CHILDREN = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4")
"""A ResNet's, as ``nn.Sequential`` numbers them."""

_DETECTRON2 = (
    (r"^(?=conv1|bn1)", "stem."),
    *((rf"^layer{i}\.", f"res{i + 1}.") for i in range(1, 5)),
    (r"bn(\d)\.", r"conv\1.norm."),
    (r"downsample\.0\.", "shortcut."),
    (r"downsample\.1\.", "shortcut.norm."),
)
"""torchvision's names to detectron2's (detectron2/modeling/backbone/resnet.py)."""


def translated(state: Mapping[str, Tensor], *, foreign: bool = False) -> Translation:
    """Give weights the names that they have with us; those that no rule knows keep their own.

    Args:
        state: what the file holds.
        foreign: the backbone is known to be none of our ResNets: it keeps its library's names.
    """
    state = _unwrapped(state)
    layout = next(x for x in LAYOUTS if all(_is_in(state, mark) for mark in x.marks))
    new = {key: _by_rules(key, layout.rules) for key in state}
    # In lightly's ResNetGenerator ReLU and pooling are no modules: its stages follow at once.
    lightlys = not foreign and "backbone.2.0.conv1.weight" in new.values()
    if not foreign and "backbone.0.weight" in new.values():
        new = {key: name and _unnumbered(name, lightlys) for key, name in new.items()}
    names = {key: name if foreign else _torchvisions(name) for key, name in new.items() if name}
    stems: dict[str, Stem] = {"solo-learn": "cifar-pad2"}
    return Translation(
        layout=layout.name,
        weights={name: state[key] for key, name in names.items()},
        origin={name: key for key, name in names.items()},
        left_out=[key for key in state if key not in names],
        small_stem="cifar-no-relu" if lightlys else stems.get(layout.name, "cifar"),
    )


def _unwrapped(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take away what wrappers add: torch.compile anywhere, the others before all keys."""
    state = {key.replace("_orig_mod.", ""): value for key, value in state.items()}
    while found := [x for x in _WRAPPERS if state and all(key.startswith(x) for key in state)]:
        state = {key.removeprefix(found[0]): value for key, value in state.items()}
    return state


def _is_in(state: Iterable[str], mark: str) -> bool:
    return any(re.match(mark, key) for key in state)


def _torchvisions(name: str) -> str:
    """Rename the shortcuts of lightly's ResNets."""
    return re.sub(r"^(backbone\.layer\d\.\d+)\.shortcut\.", r"\1.downsample.", name)


def _by_rules(key: str, rules: Rules) -> str | None:
    for pattern, ours in rules:
        if re.match(pattern, key):
            return None if ours is None else re.sub(f"^{pattern}", ours, key, count=1)
    return key


def _unnumbered(name: str, lightlys: bool) -> str:
    """Undo ``nn.Sequential``'s numbers."""
    children = [x for x in _CHILDREN if not (lightlys and x in ("relu", "maxpool"))]
    found = re.match(r"backbone\.(\d)\.", name)
    if not found or int(found[1]) >= len(children):
        return name
    return f"backbone.{children[int(found[1])]}.{name[found.end() :]}"


def to_detectron2(name: str) -> str:
    """Return detectron2's name of one of torchvision's ResNet's weights."""
    for pattern, theirs in _DETECTRON2:
        name = re.sub(pattern, theirs, name)
    return name
