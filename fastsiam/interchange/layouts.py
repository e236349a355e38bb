"""Names of weights in other programs, and ours: tables of prefixes, read from the programs' code.

- simsiam: facebookresearch/simsiam, simsiam/builder.py: torchvision's ResNet whose ``fc`` is the
  projector; its last layer has a bias that is never trained.
- moco: facebookresearch/moco, moco/builder.py: the same, ``encoder_q`` and its copy ``encoder_k``.
- swav: facebookresearch/swav, src/resnet50.py: head and prototypes among the ResNet's children.
- mmselfsup: open-mmlab/mmselfsup and mmpretrain, models/necks, models/heads/latent_pred_head.py,
  models/algorithms, models/losses/swav_loss.py; the ResNet has torchvision's names.
- solo-learn: vturrisi/solo-learn, solo/methods; files of 2021 say ``encoder`` for ``backbone``.
- lightly: lightly/models/modules/heads.py, examples/pytorch, benchmarks/imagenet/resnet50. Its
  examples put a network's children into an ``nn.Sequential``, which numbers them;
  lightly/models/resnet.py has names of its own.

The authors' SimCLR and BYOL are files of TensorFlow and JAX. What tonylins/simclr-converter and
chigur/byol-convert make of them has torchvision's names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from fastsiam.config import Stem

from .foreign_heads import numbered

_WRAPPERS = ("module.", "model.")
"""Prefixes of DistributedDataParallel (AveragedModel too) and of LightningModules."""

_LAYERS = range(8)
"""More layers than any head has."""

Rules = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a program names the parts of a method."""

    name: str
    marks: tuple[str, ...]
    """Patterns, each at the start of one key at least."""
    rules: Rules
    """Pattern at the start of a key, and what stands there with us; None leaves the key out."""
    method: str = ""
    """The only method that it is of; empty if there are several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A file's weights by our names."""

    layout: str
    weights: dict[str, Tensor]
    origin: dict[str, str]
    """What each weight is called in the file."""
    left_out: list[str]
    """Keys that a rule leaves out."""
    method: str
    """The method that the layout is of; empty if there are several."""
    momentum: bool
    """Whether a momentum encoder, or the queue of its projections, is left out."""
    small_stem: Stem
    """What a 3x3 first convolution means in this layout."""


_BACKBONE: Rules = ((r"(backbone|encoder)\.", "backbone."),)
_CLASSIFIERS: Rules = (
    (r"(backbone\.)?linear\.", None),
    (r"(online_)?classifier\.", None),
    (r"classification_head\.", None),
)
"""Of lightly's networks, and those that are trained beside an encoder to watch it."""
_MOMENTUM: Rules = (
    (r"(key|teacher|momentum)_(backbone|encoder|projection_head|projector|classifier)\.", None),
    (r"(backbone|projection_head)_momentum\.", None),
    (r"(encoder_k|target_net)\.", None),
    (r"(queue|queue_ptr)$", None),
)
"""What follows an encoder while it is trained, and the projections that are kept of it."""

LAYOUTS = (
    Layout(
        name="simsiam",
        marks=(r"encoder\.fc\.0\.",),
        rules=((r"encoder\.fc\.", "projector."), *_BACKBONE, (r"predictor\.", "predictor.")),
        method="simsiam",
    ),
    Layout(
        name="moco",
        marks=(r"encoder_q\.(conv1|fc)\.",),
        rules=(
            *_MOMENTUM,
            (r"encoder_q\.fc\.(?=weight|bias)", "projector.0."),  # of the first version
            (r"encoder_q\.fc\.", "projector."),
            (r"encoder_q\.", "backbone."),
        ),
        method="mocov2",
    ),
    Layout(
        name="swav",
        marks=(r"projection_head\.(\d\.)?weight", r"conv1\."),
        rules=(
            (r"projection_head\.(?=weight|bias)", "projector.0."),
            (r"projection_head\.", "projector."),
            (r"prototypes\.prototypes\d+\.", None),  # several sets of them, which we have not
            (r"prototypes\.", "prototypes."),
            ("", "backbone."),
        ),
        method="swav",
    ),
    Layout(
        name="mmselfsup",
        marks=(r"neck\.(fc0?|mlp\.0|projection_neck\.0)\.",),
        rules=(
            (r"(encoder|encoder_q|online_net)\.[01]\.", None),  # before 1.0: all of it once more
            *_MOMENTUM,
            *_BACKBONE,
            (r"neck\.fc\.", "projector.0."),
            (r"neck\.(mlp|projection_neck)\.", "projector."),
            (r"neck\.bn\.", None),  # SwAV's, which is in its Sequential, too
            (r"head\.loss\.prototypes\.", "prototypes."),
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
            *_MOMENTUM,
            *_BACKBONE,
            (r"projection_head\.layers\.", "projector."),
            (r"prediction_head\.layers\.", "predictor."),
            (r"prototypes\.heads\.0\.weight", "prototypes.weight"),
            (r"prototypes\.heads\.", None),  # a bias, and other sets of prototypes
        ),
    ),
    Layout(
        name="solo-learn",
        marks=(r"projector\.0\.",),
        rules=(
            *_CLASSIFIERS,
            *_MOMENTUM,
            *_BACKBONE,
            (r"projector\.", "projector."),
            (r"predictor\.", "predictor."),
            # torch's weight_norm, old and new; its lengths are all 1 there
            (r"prototypes\.(weight_v|parametrizations\.weight\.original1)", "prototypes.weight"),
            (r"prototypes\.(weight_g|parametrizations\.weight\.original0)", None),
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
    names = numbered(names, state)
    left_out = [key for key in state if key not in names]
    stems: dict[str, Stem] = {"solo-learn": "cifar-pad2"}
    return Translation(
        layout=layout.name,
        weights={name: state[key] for key, name in names.items()},
        origin={name: key for key, name in names.items()},
        left_out=left_out,
        method=layout.method,
        momentum=any(_by_rules(key, _MOMENTUM) is None for key in left_out),
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
