"""Weight names of other programs, as tables of prefixes taken from the programs' source code.

- simsiam: facebookresearch/simsiam, simsiam/builder.py: torchvision's ResNet whose ``fc`` is the
  projector. The projector's last layer has a bias that is never trained.
- moco: facebookresearch/moco, moco/builder.py: the same, as ``encoder_q`` and a copy ``encoder_k``.
- swav: facebookresearch/swav, src/resnet50.py: head and prototypes are children of the ResNet.
- mmselfsup: open-mmlab/mmselfsup and mmpretrain, models/necks, models/heads/latent_pred_head.py,
  models/algorithms, models/losses/swav_loss.py; the ResNet has torchvision's names.
- solo-learn: vturrisi/solo-learn, solo/methods; files of 2021 say ``encoder`` for ``backbone``.
- lightly: lightly/models/modules/heads.py, examples/pytorch, benchmarks/imagenet/resnet50. Its
  examples put a network's children into an ``nn.Sequential``, which numbers them;
  lightly/models/resnet.py has its own names.

The authors' SimCLR and BYOL checkpoints are TensorFlow and JAX files. tonylins/simclr-converter and
chigur/byol-convert convert them to torchvision's names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fastsiam.config import MethodConfig, SimSiamConfig, Stem
from fastsiam.config.methods.mocov2 import MoCoV2Config
from fastsiam.config.methods.swav import SwAVConfig

from .head_weights import Head, renumber

_WRAPPERS = ("module.", "model.")
"""Prefixes that DistributedDataParallel and AveragedModel, and LightningModules, add to keys."""

Rules = tuple[tuple[str, str | None], ...]
"""Pairs of a regular expression, matched at the start of a key, and fastsiam's replacement for the
match. None leaves the key out. The first match applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A program's naming scheme for the weights of a method's parts."""

    name: str
    marks: tuple[str, ...] = ()
    """Patterns that identify the layout: each must match the start of at least one key."""
    rules: Rules = ()
    """Renaming rules; they take precedence over ``parts``."""
    small_stem: Stem = "cifar"
    """The stem that a 3x3 first convolution implies."""
    method: type[MethodConfig] | None = None
    """The method whose authors use this layout; such layouts can also be exported."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """The authors' prefix of each part, without "module."; the backbone's must come last."""
    heads: Mapping[str, Head] = field(default_factory=dict)
    """The authors' heads. A width of 0 is the backbone's feature width, -1 is any width."""
    zero_bias: str = ""
    """Layer before a BN that has a bias in the authors' model, but not in fastsiam's."""
    renamed: tuple[str, str] = ("", "")
    """Prefix of a layer in fastsiam's and in the authors' numbering, which skips missing BNs."""
    program: str = ""
    """Command of the authors' linear evaluation."""


_BACKBONE: Rules = ((r"(backbone|encoder)\.", "backbone."),)
_CLASSIFIERS: Rules = (
    (r"(backbone\.)?linear\.", None),
    (r"(online_)?classifier\.", None),
    (r"classification_head\.", None),
)
"""Classifiers of lightly's networks, and those trained alongside an encoder to monitor it."""
_MOMENTUM: Rules = (
    (r"(key|teacher|momentum)_(backbone|encoder|projection_head|projector|classifier)\.", None),
    (r"(query|student)_(backbone|projection_head|prediction_head)\.", None),
    (r"(backbone|projection_head)_momentum\.", None),
    (r"(encoder_k|target_net)\.", None),
    (r"(queue|queue_ptr)$", None),
)
"""Momentum encoders and the queues of their projections. In lightly's benchmarks before 2024-02-22,
``backbone`` is the momentum encoder, which lightly evaluates, and a copy is trained."""

_USUAL: Rules = (*_CLASSIFIERS, *_MOMENTUM, *_BACKBONE)

_NO_BN = {"hidden_bn": False, "output_bn": False, "output_affine": False}
_HIDDEN_BN = _NO_BN | {"hidden_bn": True}

LAYOUTS = (
    Layout(
        name="simsiam",
        marks=(r"encoder\.fc\.0\.",),
        method=SimSiamConfig,
        parts={"projector": "encoder.fc.", "predictor": "predictor.", "backbone": "encoder."},
        heads={
            "projector": Head((0, 0, -1), _HIDDEN_BN | {"output_bn": True}),
            "predictor": Head((-1, -1), _HIDDEN_BN),
        },
        zero_bias="encoder.fc.6",
        program="main_lincls.py -a {arch}",
    ),
    Layout(
        name="moco",
        marks=(r"encoder_q\.(conv1|fc)\.",),
        rules=_MOMENTUM,
        method=MoCoV2Config,
        parts={"projector": "encoder_q.fc.", "backbone": "encoder_q."},
        heads={"projector": Head((0, -1), _NO_BN)},
        renamed=("encoder_q.fc.3.", "encoder_q.fc.2."),
        program="main_lincls.py -a {arch}",
    ),
    Layout(
        name="swav",
        marks=(r"projection_head\.(\d\.)?weight", r"conv1\."),
        rules=((r"prototypes\.prototypes\d+\.", None),),  # several sets of prototypes
        method=SwAVConfig,
        parts={"projector": "projection_head.", "prototypes": "prototypes.", "backbone": ""},
        heads={"projector": Head((-1, -1), _HIDDEN_BN)},
        zero_bias="projection_head.0",
        program="eval_linear.py",
    ),
    Layout(
        name="mmselfsup",
        marks=(r"neck\.(fc0?|mlp\.0|projection_neck\.0)\.",),
        rules=(
            (r"(encoder|encoder_q|online_net)\.[01]\.", None),  # duplicates, before 1.0
            *_MOMENTUM,
            *_BACKBONE,
            (r"neck\.(fc|mlp|projection_neck)\.", "projector."),
            (r"neck\.bn\.", None),  # SwAV's BN, which is also in its Sequential
            (r"head\.loss\.prototypes\.", "prototypes."),
            # Layer i and its BN become 10i and 10i + 1; ``numbered`` renumbers them.
            (r"neck\.fc(\d)\.", r"projector.\g<1>0."),
            (r"neck\.bn(\d)\.", r"projector.\g<1>1."),
            (r"head\.predictor\.fc(\d)\.", r"predictor.\g<1>0."),
            (r"head\.predictor\.bn(\d)\.", r"predictor.\g<1>1."),
            (r"data_preprocessor\.", None),
        ),
    ),
    Layout(
        name="lightly",
        marks=(r"(projection|prediction)_head\.layers\.",),
        rules=(
            *_USUAL,
            (r"projection_head\.layers\.", "projector."),
            (r"prediction_head\.layers\.", "predictor."),
            (r"prototypes\.heads\.0\.weight", "prototypes.weight"),
            (r"prototypes\.heads\.", None),  # bias, and further sets of prototypes
        ),
    ),
    Layout(
        name="solo-learn",
        marks=(r"projector\.0\.",),
        rules=(
            *_USUAL,
            # torch's old and new weight_norm; solo-learn's magnitudes are all 1
            (r"prototypes\.(weight_v|parametrizations\.weight\.original1)", "prototypes.weight"),
            (r"prototypes\.(weight_g|parametrizations\.weight\.original0)", None),
        ),
        small_stem="cifar-pad2",
    ),
    Layout(  # checkpoints of its linear evaluation
        name="solo-learn",
        marks=(r"backbone\.", r"classifier\.weight"),
        rules=(*_CLASSIFIERS, *_BACKBONE),
        small_stem="cifar-pad2",
    ),
    Layout(
        name="torchvision",
        marks=(r"(backbone|encoder\.(conv1|0))\.",),
        rules=(*_CLASSIFIERS, *_BACKBONE, (r"(data_preprocessor|head)\.", None)),
    ),
    Layout(name="torchvision", rules=((r"linear\.", None), ("", "backbone."))),
)
"""All known layouts, the most specific first."""
AUTHORS = {layout.name: layout for layout in LAYOUTS if layout.method}
"""Layouts of a method's authors, by name."""

_CHILDREN = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4")
"""A ResNet's children, in the order in which ``nn.Sequential`` numbers them."""

DETECTRON2 = (
    (r"^(?=conv1|bn1)", "stem."),
    *((rf"^layer{i}\.", f"res{i + 1}.") for i in range(1, 5)),
    (r"bn(\d)\.", r"conv\1.norm."),
    (r"downsample\.0\.", "shortcut."),
    (r"downsample\.1\.", "shortcut.norm."),
)
"""Changes of torchvision's names to detectron2's (detectron2/modeling/backbone/resnet.py)."""


def translate(
    state: Mapping[str, Tensor], *, foreign: bool = False
) -> tuple[Layout, dict[str, str]]:
    """Find the layout of a file, and fastsiam's name for each key that no rule leaves out.

    Args:
        state: the file's state dict, without the prefixes of wrappers.
        foreign: whether the backbone is another library's, which keeps that library's names.

    Raises:
        ValueError: the file has different weights for the same name.
    """
    layout = next(
        x for x in LAYOUTS if all(any(re.match(mark, key) for key in state) for mark in x.marks)
    )
    part_rules = ((re.escape(prefix), f"{part}.") for part, prefix in layout.parts.items())
    rules = (*layout.rules, *part_rules)
    new_names = {key: name for key in state if (name := _apply_rules(key, rules)) is not None}
    if not foreign:
        values = set(new_names.values())
        children = [*_CHILDREN] if "backbone.0.weight" in values else []
        # In lightly's ResNetGenerator ReLU and pooling are not modules, so its stages start at 2.
        if "backbone.2.0.conv1.weight" in values:
            layout = replace(layout, small_stem="cifar-no-relu")
            children = [x for x in children if x not in ("relu", "maxpool")]
        changes = [(rf"^backbone\.{i}\.", f"backbone.{x}.") for i, x in enumerate(children)]
        changes.append((r"^(backbone\.layer\d\.\d+)\.shortcut\.", r"\1.downsample."))  # lightly's
        new_names = {key: substitute(name, changes) for key, name in new_names.items()}
    names = renumber(new_names, state)
    first: dict[str, str] = {}
    for key, name in names.items():
        other = first.setdefault(name, key)
        if other != key and not torch.equal(state[other], state[key]):
            raise ValueError(f"holds two networks, {other} and {key}: save only one of them")
    return layout, names


def unwrap(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefixes of wrappers: torch.compile's anywhere, others if all keys have them."""
    state = {key.replace("_orig_mod.", ""): value for key, value in state.items()}
    while prefixes := [x for x in _WRAPPERS if state and all(key.startswith(x) for key in state)]:
        state = {key.removeprefix(prefixes[0]): value for key, value in state.items()}
    return state


def _apply_rules(key: str, rules: Rules) -> str | None:
    for pattern, replacement in rules:
        if re.match(pattern, key):
            if replacement is None:
                return None
            key = re.sub(f"^{pattern}", replacement, key, count=1)
            break
    return re.sub(r"^projector\.(?=weight|bias)", "projector.0.", key)  # a single linear layer


def substitute(name: str, changes: Iterable[tuple[str, str]]) -> str:
    """Apply pairs of a regular expression and a replacement, one after the other."""
    for pattern, replacement in changes:
        name = re.sub(pattern, replacement, name)
    return name
