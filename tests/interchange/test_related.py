"""Files of SimCLR, MoCo, BYOL and SwAV: which method it is, the same outputs, nothing left over.

The heads are written from the programs' code, as ``fastsiam/interchange/layouts.py`` names it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsiam.config import (
    BYOLConfig,
    MethodConfig,
    MoCoV2Config,
    ModelConfig,
    SimCLRConfig,
    SimSiamConfig,
    SwAVConfig,
)
from fastsiam.errors import CheckpointError
from fastsiam.interchange import export_weights, exports_of, load_pretrained
from fastsiam.interchange.export import refusals
from fastsiam.methods import build_method
from tests.interchange.networks import X, prefixed, resnets, same, saved_run, trained
from tests.interchange.test_export import by_snippet
from tests.tiers import rest_slow

SIZES: dict[str, Any] = {"projector_layers": 2, "projector_dim": 24, "dim": 16}
BACKBONE: dict[str, Any] = {"backbone": "resnet10", "width": 4}
FEATURES = 32


def head(*widths: int, hidden: bool = True, output: bool = False, bias: bool = False) -> nn.Module:
    """Build a head as other programs do: a BN that is not there has no number."""
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(itertools.pairwise(widths)):
        last = i == len(widths) - 2
        normed = output if last else hidden
        layers.append(nn.Linear(before, after, bias=bias or not normed))
        layers += [nn.BatchNorm1d(after)] if normed else []
        layers += [] if last else [nn.ReLU()]
    return nn.Sequential(*layers)


@dataclass
class File:
    """A file of another program."""

    layout: str
    parts: dict[str, str]
    """What stands before the names of our parts."""
    method: MethodConfig
    head: nn.Module
    predictor: nn.Module | None = None
    prototypes: dict[str, Tensor] = field(default_factory=dict)
    """By their names in the file."""
    beside: dict[str, Tensor] = field(default_factory=dict)
    """What is left out."""
    copies: dict[str, str] = field(default_factory=dict)
    """Parts that are there once more: what stands before the copy's names, by our part."""
    told: bool = True


LIGHTLY = {"backbone": "backbone.", "projector": "projection_head.layers."}
LIGHTLY_TOO = LIGHTLY | {"predictor": "prediction_head.layers."}
SOLO = {"backbone": "backbone.", "projector": "projector.", "predictor": "predictor."}
MMSELFSUP = {"backbone": "backbone."}
QUEUE = {"queue": torch.zeros(16, 32), "queue_ptr": torch.zeros(1, dtype=torch.int64)}
PREDICTED: dict[str, Any] = {"predictor_dim": 20}


def simclr(layout: str, parts: dict[str, str]) -> File:
    normed = head(FEATURES, 24, 16, output=True)
    return File(layout, parts, SimCLRConfig(**SIZES), normed, told=False)


def mocov2(layout: str, parts: dict[str, str], **more: Any) -> File:
    plain = head(FEATURES, 24, 16, hidden=False)
    return File(layout, parts, MoCoV2Config(**SIZES), plain, **more)


def byol(layout: str, parts: dict[str, str], bias: bool = False, **more: Any) -> File:
    heads = head(FEATURES, 24, 16, bias=bias), head(16, 20, 16, bias=bias)
    return File(layout, parts, BYOLConfig(**SIZES, **PREDICTED), *heads, **more)


def swav(layout: str, parts: dict[str, str], name: str, bias: bool = True, **more: Any) -> File:
    method = SwAVConfig(**SIZES, prototypes=12)
    prototypes = {name: torch.randn(12, 16)}
    return File(layout, parts, method, head(FEATURES, 24, 16, bias=bias), None, prototypes, **more)


FILES: dict[str, File] = {
    "moco": mocov2(
        "moco",
        {"backbone": "module.encoder_q.", "projector": "module.encoder_q.fc."},
        copies={"backbone": "module.encoder_k.", "projector": "module.encoder_k.fc."},
        beside=prefixed(QUEUE, "module."),
    ),
    "swav": swav(
        "swav",
        {"backbone": "module.", "projector": "module.projection_head."},
        "module.prototypes.weight",
    ),
    "lightly simclr": simclr("lightly", LIGHTLY),
    "lightly byol": byol(
        "lightly",
        LIGHTLY_TOO,
        copies={
            "backbone": "backbone_momentum.",
            "projector": "projection_head_momentum.layers.",
        },
    ),
    "solo-learn mocov2plus": mocov2(
        "solo-learn",
        SOLO,
        copies={"backbone": "momentum_backbone.", "projector": "momentum_projector."},
        beside={**QUEUE, "momentum_classifier.bias": torch.zeros(10)},
    ),
    "solo-learn swav": swav(
        "solo-learn",
        SOLO,
        "prototypes.weight_v",
        beside={"prototypes.weight_g": torch.ones(12, 1), "queue": torch.zeros(2, 8, 16)},
    ),
    "lightly moco": mocov2(
        "lightly",
        LIGHTLY,
        copies={"backbone": "key_backbone.", "projector": "key_projection_head.layers."},
    ),
    "lightly byol benchmark": byol(
        "lightly",
        LIGHTLY_TOO,
        copies={
            "backbone": "teacher_backbone.",
            "projector": "teacher_projection_head.layers.",
        },
    ),
    "lightly swav": swav(
        "lightly",
        LIGHTLY,
        "prototypes.heads.0.weight",
        bias=False,
        beside={"prototypes.heads.0.bias": torch.zeros(12)},
    ),
    "solo-learn simclr": mocov2("solo-learn", SOLO, told=False),
    "solo-learn byol": byol(
        "solo-learn",
        SOLO,
        bias=True,
        copies={"backbone": "momentum_backbone.", "projector": "momentum_projector."},
    ),
    "mmselfsup mocov2": mocov2(
        "mmselfsup",
        MMSELFSUP | {"projector": "neck.mlp."},
        copies={"backbone": "encoder_k.module.0.", "projector": "encoder_k.module.1.mlp."},
        beside=QUEUE,
    ),
    "mmselfsup swav": swav(
        "mmselfsup",
        MMSELFSUP | {"projector": "neck.projection_neck."},
        "head.loss.prototypes.weight",
    ),
}


def written(file: File, path: Path) -> tuple[nn.Sequential, list[str]]:
    """Write it; return its network up to the last head, and the keys that are copies."""
    parts: dict[str, nn.Module] = {
        "backbone": build_method(ModelConfig(**BACKBONE)).backbone,
        "projector": file.head,
    }
    if file.predictor is not None:
        parts["predictor"] = file.predictor
    theirs: nn.Sequential = trained(nn.Sequential(*parts.values()))
    state: dict[str, Tensor] = {}
    copies: dict[str, Tensor] = {}
    for part, module in parts.items():
        state |= prefixed(module.state_dict(), file.parts[part])
        if part in file.copies:
            copies |= prefixed(module.state_dict(), file.copies[part])
    content = {"epoch": 7, "state_dict": state | copies | file.prototypes | file.beside}
    torch.save(content, path)
    return theirs, list(copies)


@pytest.mark.parametrize("name", rest_slow(list(FILES), fast=6))
def test_files_of_related_methods_are_read(name: str, tmp_path: Path) -> None:
    file = FILES[name]
    theirs, copies = written(file, tmp_path / "w.pth")
    read = load_pretrained(tmp_path / "w.pth")
    assert (read.layout, read.method_told) == (file.layout, file.told)
    assert read.epoch == (7 if file.layout in ("moco", "swav") else None)
    assert read.model == ModelConfig(**BACKBONE, method=file.method)
    unwrapped = [key.removeprefix("module.") for key in (*copies, *file.beside)]
    assert sorted(read.left_out) == sorted(unwrapped)
    method = build_method(read.model)
    fitting = tuple(part for part in method.parts if read.has(part))
    assert fitting == method.parts
    method.start_from(read.part(*fitting))
    method.eval()
    heads = ("projector", "predictor") if file.predictor else ("projector",)
    with torch.no_grad():
        out = method.backbone(X)
        same(out, theirs[0](X))
        for part in heads:
            out = method.get_submodule(part)(out)
        same(out, theirs(X))
    for value in file.prototypes.values():
        assert torch.equal(method.state_dict()["prototypes.weight"], value)


def test_heads_of_one_layer_and_several_sets_of_prototypes(tmp_path: Path) -> None:
    """MoCo's first version has one layer; SwAV's relatives several sets of prototypes."""
    state = {f"encoder_q.{k}": v for k, v in resnets().items() if not k.startswith("fc.")}
    state |= prefixed(nn.Linear(FEATURES, 16).state_dict(), "encoder_q.fc.")
    torch.save({"state_dict": prefixed(state, "module.")}, tmp_path / "moco.pth")
    read = load_pretrained(tmp_path / "moco.pth")
    assert read.model.method == MoCoV2Config(projector_layers=1, dim=16)
    state = {k: v for k, v in resnets().items() if not k.startswith("fc.")}
    state |= prefixed(head(FEATURES, 24, 16, bias=True).state_dict(), "projection_head.")
    state |= {f"prototypes.prototypes{i}.weight": torch.zeros(3, 16) for i in range(2)}
    torch.save(state, tmp_path / "swav.pth")
    read = load_pretrained(tmp_path / "swav.pth")
    assert read.model.method == SwAVConfig(**SIZES) and not read.has("prototypes")
    assert len(read.left_out) == 2


@pytest.mark.parametrize(
    ("hidden", "output", "affine", "predictor", "method"),
    [
        (True, True, True, False, SimCLRConfig(**SIZES)),
        (True, False, False, False, BYOLConfig(**SIZES)),
        (True, True, False, True, SimSiamConfig(**SIZES, **PREDICTED)),
        (True, True, False, False, SimSiamConfig(**SIZES, predictor="none")),
        (True, False, False, True, BYOLConfig(**SIZES, **PREDICTED)),
        (False, False, False, False, MoCoV2Config(**SIZES)),
    ],
)
def test_the_method_is_the_one_whose_heads_are_such(
    hidden: bool, output: bool, affine: bool, predictor: bool, method: MethodConfig, tmp_path: Path
) -> None:
    """What the file does not tell is said to be taken, in the model card."""
    project = head(FEATURES, 24, 16, hidden=hidden, output=output)
    state = prefixed(project.state_dict(), "projector.")
    if output and not affine:
        state = {
            k: v for k, v in state.items() if k not in ("projector.4.weight", "projector.4.bias")
        }
    state |= prefixed(head(16, 20, 16).state_dict(), "predictor.") if predictor else {}
    own = {f"backbone.{k}": v for k, v in resnets().items() if not k.startswith("fc.")}
    torch.save({"state_dict": own | state}, tmp_path / "w.ckpt")
    read = load_pretrained(tmp_path / "w.ckpt")
    assert read.model.method == method
    export_weights(read, format="plain", out=tmp_path / "out.pth")
    card = (tmp_path / "out.pth.md").read_text()
    assert read.method_told == isinstance(method, SimSiamConfig) & predictor
    told = f"its heads are such as {method.title}'s, but it does not tell the method"
    assert (told in card) == (not read.method_told)
    assert ("pre-trained with" in card) == read.method_told


def test_heads_that_no_method_has_are_refused_in_a_line(tmp_path: Path) -> None:
    """BN behind the first of three layers alone; two BNs behind one layer."""
    own = {f"backbone.{k}": v for k, v in resnets().items() if not k.startswith("fc.")}
    mixed = nn.Sequential(
        *(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()),
        nn.Linear(8, 8),
    )
    twice = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8))
    for odd in (mixed, twice):
        torch.save(own | prefixed(odd.state_dict(), "projector."), tmp_path / "w.pth")
        with pytest.raises(
            CheckpointError, match=r"w.pth are not those of .* (missing|unknown)"
        ) as e:
            load_pretrained(tmp_path / "w.pth")
        assert "\n" not in str(e.value)


def test_files_of_other_frameworks_are_to_be_converted_first(tmp_path: Path) -> None:
    """Google's SimCLR is of TensorFlow, DeepMind's BYOL of JAX."""
    (tmp_path / "model.ckpt-250228.data-00000-of-00001").write_bytes(bytes(range(256)) * 9)
    with pytest.raises(CheckpointError, match=r"TensorFlow and JAX .* converted to PyTorch first"):
        load_pretrained(tmp_path / "model.ckpt-250228.data-00000-of-00001")


@pytest.mark.parametrize(
    ("format", "model"),
    [
        (
            "moco",
            ModelConfig(backbone="resnet18", method=MoCoV2Config(**SIZES | {"projector_dim": 512})),
        ),
        ("swav", ModelConfig(backbone="resnet50", method=SwAVConfig(**SIZES, prototypes=12))),
    ],
)
def test_the_authors_files_are_written_and_read_again(
    format: str, model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder comes out of the card's snippet, the whole out of what reads their files."""
    method = saved_run(tmp_path / "run", model)
    export_weights(load_pretrained(tmp_path / "run"), format=format, out=tmp_path / "w.pth")
    read = load_pretrained(tmp_path / "w.pth")
    assert (read.layout, read.model, read.left_out) == (format, model, ())
    assert all(torch.equal(x, method.state_dict()[key]) for key, x in read.state.items())
    assert {key.partition(".")[0] for key in read.state} == set(method.parts)
    monkeypatch.chdir(tmp_path)
    with torch.no_grad():
        same(by_snippet(tmp_path / "w.pth.md")(X), method.backbone(X))


def test_an_authors_format_holds_its_own_method_alone(tmp_path: Path) -> None:
    method = MoCoV2Config(**SIZES | {"projector_dim": 512}, queue=8)
    saved_run(tmp_path / "run", ModelConfig(backbone="resnet18", method=method))
    read = load_pretrained(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"as simsiam \(the heads of MoCo v2\): use .*moco"):
        export_weights(read, format="simsiam", out=tmp_path / "w.pth")
    for other, why in (
        (replace(read.model, width=4), "width 4"),
        (replace(read.model, method=replace(method, projector_layers=3)), "of 3 layers"),
        (replace(read.model, method=replace(method, projector_dim=9)), "9 wide"),
        (replace(read.model, method=BYOLConfig()), "heads of BYOL"),
    ):
        assert why in refusals(other)["moco"]
    r50 = ModelConfig(method=SwAVConfig(projector_layers=2))
    for other, why in (
        (replace(r50, backbone="resnet18"), "ResNet-50 alone"),
        (replace(r50, stem="cifar"), "cifar stem"),
        (replace(r50, method=SwAVConfig(projector_layers=2, predictor="trained")), "predictor"),
        (replace(r50, method=SwAVConfig()), "of 3 layers"),
        (replace(r50, method=method), "heads of MoCo v2"),
    ):
        assert why in refusals(other)["swav"]
    assert not refusals(replace(r50, width=128))["swav"]


def test_a_run_says_its_own_methods_format_alone() -> None:
    model = ModelConfig(backbone="resnet18", method=MoCoV2Config(**SIZES | {"projector_dim": 512}))
    assert exports_of(model) == "exports: plain, torchvision, timm, moco, detectron2"
