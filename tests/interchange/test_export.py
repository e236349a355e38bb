"""Exporting weights: equal outputs in the target libraries; errors for unsupported networks."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

from fastsiam.config import (
    OWN_BACKBONES,
    ModelConfig,
)
from fastsiam.config.methods.fastsiam import FastSiamConfig
from fastsiam.config.methods.mocov2 import MoCoV2Config
from fastsiam.config.methods.swav import SwAVConfig
from fastsiam.errors import CheckpointError, FastSiamError
from fastsiam.interchange import export_weights, load_pretrained
from fastsiam.interchange.export import SHARED_RESNETS
from fastsiam.interchange.layouts import AUTHORS
from fastsiam.methods import build_method
from fastsiam.model.backbones import skeleton
from tests.configs import TINY, make_model_config, with_model_settings
from tests.conftest import import_or_skip
from tests.interchange.networks import R18, Authors, X, refused, same, saved_run, untrained

SMALL = with_model_settings(R18, dim=16)
small = partial(with_model_settings, SMALL)
HEAD: dict[str, Any] = {"projector_layers": 2, "dim": 16}
MOCO = ModelConfig(backbone="resnet18", method=MoCoV2Config(**HEAD, projector_dim=512))
SWAV = ModelConfig(method=SwAVConfig(**HEAD, projector_dim=24, prototypes=12))

NARROW = with_model_settings(TINY, stem="cifar-pad2", width=6)
FASTSIAM = replace(R18, method=FastSiamConfig(dim=512, predictor_dim=32))
NO_RELU = small(backbone="resnet10", stem="cifar-no-relu")
EXPORTS = {
    "plain, narrow": ("plain", ".safetensors", NARROW, "fastsiam"),
    "plain of timm": ("plain", ".safetensors", small(backbone="timm/test_vit"), "timm"),
    "plain, small stem": ("plain", ".pth.tar", small(stem="cifar"), "torchvision"),
    "torchvision": (
        "torchvision",
        ".pth",
        with_model_settings(R18, projector_layers=2),
        "torchvision",
    ),
    "small stem": ("torchvision", ".safetensors", small(stem="cifar"), "torchvision"),
    "timm": ("timm", ".safetensors", SMALL, "timm"),
    "timm's own": ("timm", ".safetensors", small(backbone="timm/test_efficientnet"), "timm"),
    "simsiam": ("simsiam", ".pth.tar", R18, "torchvision"),
    "moco": ("moco", ".pth", MOCO, "torchvision"),
    "swav": ("swav", ".pth", SWAV, "torchvision"),
    "no ReLU": ("torchvision", ".bin", NO_RELU, "torchvision"),
}
"""Format, file extension, model, and the library that the card's snippet uses."""


@pytest.mark.parametrize("case", EXPORTS)
def test_exported_file_is_loaded_by_card_snippet_and_read_back(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features are bit-identical when read back; authors' layouts also contain the heads."""
    format, extension, model, library = EXPORTS[case]
    if library == "timm":
        import_or_skip("timm")
    side = 160 if model.backbone == "timm/test_vit" else 32
    x = nn.functional.interpolate(X, max(side, 64))  # pooling sees several positions
    method = saved_run(tmp_path / "run", model, side=side)
    pretrained = load_pretrained(tmp_path / "run")
    out, card = tmp_path / f"w{extension}", tmp_path / f"w{extension}.md"
    assert export_weights(pretrained, format=format, out=out) == [out, card]
    monkeypatch.chdir(tmp_path)
    rebuilt = by_snippet(card)
    assert type(rebuilt).__module__.split(".")[0] == library
    with torch.no_grad():
        expected = method.backbone(x)
        same(rebuilt(x), expected)
    is_own = model.backbone in OWN_BACKBONES or format == "plain"
    name = "" if is_own else model.backbone
    back = load_pretrained(out, backbone=name, stem=model.stem if is_own else "")
    assert torch.equal(back.network()(x), expected)
    prefixes = (
        tuple(f"{part}." for part in AUTHORS[format].parts) if format in AUTHORS else "backbone."
    )
    assert back.state.keys() == {key for key in pretrained.state if key.startswith(prefixes)}
    assert all(torch.equal(value, pretrained.state[key]) for key, value in back.state.items())
    if format in AUTHORS:
        assert (back.layout, back.epoch) == (format, 7)
    if format == "plain":
        assert (back.layout, back.epoch, back.input) == (
            "plain",
            pretrained.epoch,
            pretrained.input,
        )
        assert snippet_in(out) in card.read_text()


def by_snippet(card: Path) -> Any:
    """Run the Python snippet of a model card; return its ``model``."""
    (code,) = re.findall(r"```python\n(.*?)```", card.read_text(), re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["model"]


def snippet_in(path: Path) -> str:
    """Read the snippet stored in a plain file, without fastsiam."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return str(file.metadata()["snippet"])
    return str(torch.load(path, weights_only=True)["snippet"])


def test_simsiam_layout_loads_strictly(tmp_path: Path) -> None:
    method = saved_run(
        tmp_path / "run", with_model_settings(R18, predictor="fixed", alternate_every=3)
    )
    out = tmp_path / "checkpoint_0007.pth.tar"
    export_weights(load_pretrained(tmp_path / "run"), format="simsiam", out=out)
    card = out.with_name(f"{out.name}.md").read_text()
    assert "--pretrained checkpoint_0007.pth.tar ..." in card
    content = torch.load(out, weights_only=True)
    assert (content["arch"], content["epoch"]) == ("resnet18", 7)
    assert not content["state_dict"]["module.encoder.fc.6.bias"].any()
    theirs = nn.ModuleDict({"module": Authors(512, 32)})
    theirs.load_state_dict(content["state_dict"])
    heads = [name for name in content["state_dict"] if ".fc." in name or "predictor" in name]
    assert heads == [name for name in theirs.state_dict() if name in heads]
    with torch.no_grad():
        same(theirs["module"].eval()(X), method.predictor(method.projector(method.backbone(X))))


def test_weights_of_unknown_method_are_exported_if_they_fit(tmp_path: Path) -> None:
    """solo-learn's file does not name its method; its heads fit SimSiam's layout, not MoCo's."""
    method = build_method(R18)
    torch.save(method.state_dict(), tmp_path / "solo.ckpt")
    pretrained = load_pretrained(tmp_path / "solo.ckpt")
    assert (pretrained.layout, pretrained.method) == ("solo-learn", None)
    export_weights(pretrained, format="simsiam", out=tmp_path / "w.pth")
    back = load_pretrained(tmp_path / "w.pth")
    assert all(torch.equal(value, pretrained.state[key]) for key, value in back.state.items())
    with pytest.raises(CheckpointError, match=r"as moco \(the authors have no predictor\)"):
        export_weights(pretrained, format="moco", out=tmp_path / "v.pth")
    assert (tmp_path / "w.pth.md").read_text().startswith("# ResNet-18, converted by fastsiam")


_LAYER = ("weight", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var")


def test_detectron2_parameter_names(tmp_path: Path) -> None:
    method = saved_run(
        tmp_path / "run", make_model_config(dim=16, projector_dim=16, predictor_dim=4)
    )
    out = tmp_path / "r50.pkl"
    export_weights(load_pretrained(tmp_path / "run"), format="detectron2", out=out)
    assert b"numpy._core" not in out.read_bytes()  # missing in numpy 1
    content = pickle.loads(out.read_bytes())
    assert all(value.flags.writeable for value in content["model"].values())
    assert content["matching_heuristics"] is True and content["__author__"] == "fastsiam"
    theirs = [("stem.conv1", "conv1", "bn1")]
    for stage, depth in enumerate((3, 4, 6, 3), start=1):  # detectron2's BottleneckBlock
        for block in range(depth):
            there, here = f"res{stage + 1}.{block}", f"layer{stage}.{block}"
            theirs += [(f"{there}.conv{i}", f"{here}.conv{i}", f"{here}.bn{i}") for i in (1, 2, 3)]
            if block == 0:
                shortcut = f"{here}.downsample"
                theirs.append((f"{there}.shortcut", f"{shortcut}.0", f"{shortcut}.1"))
    expected = {
        f"{layer}.{part}": f"{norm if 'norm' in part else conv}.{part.removeprefix('norm.')}"
        for layer, conv, norm in theirs
        for part in _LAYER
    }
    state = method.backbone.state_dict()
    assert set(content["model"]) == set(expected) and len(expected) == 53 * 5
    for name, mine in expected.items():
        assert np.array_equal(content["model"][name], state[mine].numpy()), name
    card = (tmp_path / "r50.pkl.md").read_text()
    for line in ("PIXEL_MEAN: [123.675, 116.280, 103.530]", 'FORMAT: "RGB"', "DEPTH: 50"):
        assert line in card


def test_shared_resnets_have_same_parameter_names() -> None:
    timm = import_or_skip("timm")
    assert all(timm.is_model(name) for name in SHARED_RESNETS)
    for name in ("resnet18", "resnet50", "wide_resnet50_2", "resnext50_32x4d"):  # one of each kind
        assert name in SHARED_RESNETS
        torchvisions, timms = (
            {k: x.shape for k, x in skeleton(ModelConfig(backbone=full)).state_dict().items()}
            for full in (name, f"timm/{name}")
        )
        assert torchvisions == timms, name


_LAYERS = "a projector with different layers or BN than the authors'"
_WIDE = "a projector of width 64: the authors' has the features' width"
_R50 = ModelConfig(method=SwAVConfig(projector_layers=2))
_PREDICTOR = SwAVConfig(projector_layers=2, predictor="trained")
_NOT_R50 = "its authors have only ResNet-50, at 1, 2, 4 or 5 times the width"
REFUSED: tuple[tuple[ModelConfig, str, str], ...] = (
    (TINY, "torchvision", "width 4: torchvision's ResNets are 64 wide"),
    (TINY, "detectron2", "not for resnet10: only for ResNets whose weights have the same names"),
    (small(stem="cifar"), "timm", "cifar stem"),
    (
        small(backbone="shufflenet_v2_x0_5"),
        "timm",
        "not for shufflenet_v2_x0_5: only for ResNets whose weights have the same names",
    ),
    (with_model_settings(R18, projector_layers=2), "simsiam", _LAYERS),
    (with_model_settings(R18, dim=64), "simsiam", _WIDE),
    (with_model_settings(R18, predictor="none"), "simsiam", "no predictor"),
    (FASTSIAM, "simsiam", ""),
    (MOCO, "simsiam", "the heads of MoCo v2"),
    (replace(MOCO, width=4), "moco", "width 4: moco's ResNets are 64 wide"),
    (replace(MOCO, method=MoCoV2Config(**HEAD, projector_dim=64)), "moco", _WIDE),
    (replace(_R50, backbone="resnet18"), "swav", _NOT_R50),
    (replace(_R50, method=_PREDICTOR), "swav", "the authors have no predictor"),
    (replace(_R50, method=SwAVConfig()), "swav", _LAYERS),
    (replace(_R50, width=128), "swav", ""),
)
"""A model, a format, and why the format does not support it; empty if it does."""


def test_unsupported_exports_are_rejected(tmp_path: Path) -> None:
    """Unsupported networks get an alternative in the message; bad file names and folders."""
    for model, format, reason in REFUSED:
        assert refused(model)[format] == reason
    assert (
        "projector whose layers are not numbered"
        in refused(R18, lambda name: name.replace("projector.", "projector.own"))["simsiam"]
    )
    pretrained = untrained(with_model_settings(R18, dim=16))
    headless = replace(pretrained, state=pretrained.part("backbone"))
    way_out = r"^cannot write x\.pth as simsiam \(no projector\): use --format plain or "
    with pytest.raises(CheckpointError, match=way_out):
        export_weights(headless, format="simsiam", out=tmp_path / "w.pth")
    for format, name in (("simsiam", "w.safetensors"), ("detectron2", "w.pth"), ("timm", "w")):
        with pytest.raises(ValueError, match=f"files of format {format} must end in"):
            export_weights(pretrained, format=format, out=tmp_path / name)
    with pytest.raises(ValueError, match="unknown format 'onnx'"):
        export_weights(pretrained, format="onnx", out=tmp_path / "w.pth")
    with pytest.raises(FastSiamError, match="can only be written to a local path"):
        export_weights(pretrained, format="timm", out=Path("s3://bucket/w.pth"))
    (tmp_path / "file").touch()
    for extension in ("pth", "safetensors"):
        with pytest.raises(CheckpointError, match="cannot write") as caught:
            export_weights(pretrained, format="timm", out=tmp_path / "file" / f"w.{extension}")
        assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_export_does_not_overwrite_user_files(tmp_path: Path) -> None:
    """The source and a run's checkpoints are never overwritten, other files only with force."""
    saved_run(tmp_path / "run", with_model_settings(R18, backbone="resnet10", dim=16))
    run_weights = load_pretrained(tmp_path / "run")
    (source,) = export_weights(run_weights, format="torchvision", out=tmp_path / "a.pth")[:1]
    (tmp_path / "link.pth").symlink_to(source)
    card = tmp_path / "b.pth.md"
    card.write_text("mine")
    from_source = load_pretrained(source)
    of_a_run = tmp_path / "run" / "checkpoints" / "b.pth"
    cases = [
        (from_source, source, True, "is the source of the weights"),
        (from_source, tmp_path / "link.pth", True, "is the source of the weights"),
        (run_weights, of_a_run, True, "holds a run's checkpoints"),
        (run_weights, tmp_path / "b.pth", False, r"b\.pth\.md already exists"),
    ]
    before = sorted(tmp_path.rglob("*")), source.read_bytes()
    for pretrained, out, force, message in cases:
        with pytest.raises(CheckpointError, match=message):
            export_weights(pretrained, format="torchvision", out=out, force=force)
        assert (sorted(tmp_path.rglob("*")), source.read_bytes()) == before
    export_weights(run_weights, format="torchvision", out=tmp_path / "b.pth", force=True)
    assert (tmp_path / "b.pth").exists() and card.read_text() != "mine"
