"""Weights out: the same outputs in the real libraries; what a format cannot hold is refused."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fastsiam.config import ModelConfig
from fastsiam.errors import CheckpointError
from fastsiam.interchange import export_weights, exports_of, load_pretrained
from fastsiam.interchange.export import SHARED_RESNETS
from fastsiam.model.backbones import skeleton
from tests.configs import changed_model, model_of
from tests.interchange.networks import R18, TINY, Authors, X, same, saved_run, untrained


@pytest.mark.parametrize(
    "model, ending",
    [
        (changed_model(R18, projector_layers=2), ".pth"),
        (changed_model(R18, stem="cifar", dim=16), ".safetensors"),
        (changed_model(R18, backbone="resnet10", stem="cifar-pad2", dim=16), ".pth.tar"),
        (changed_model(R18, backbone="resnet10", stem="cifar-no-relu", dim=16), ".bin"),
        (changed_model(R18, backbone="mobilenet_v3_small", dim=16), ".safetensors"),
        (changed_model(R18, backbone="shufflenet_v2_x0_5", dim=16), ".pth"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.backbone}-{value.stem}",
)
def test_torchvision_loads_it_by_the_cards_snippet(
    model: ModelConfig, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = saved_run(tmp_path / "run", model)
    read = load_pretrained(tmp_path / "run")
    out = tmp_path / f"weights{ending}"
    card = tmp_path / f"weights{ending}.md"
    assert export_weights(read, format="torchvision", out=out) == [out, card]
    monkeypatch.chdir(tmp_path)
    theirs = by_snippet(card)
    assert type(theirs).__module__.startswith("torchvision")
    with torch.no_grad():
        same(theirs(X), method.backbone(X))
    stored = load_file(out) if ending == ".safetensors" else torch.load(out, weights_only=True)
    assert set(stored) == set(theirs.state_dict())
    assert all(x.dtype in (torch.float32, torch.int64) for x in stored.values())


def by_snippet(card: Path) -> Any:
    """Run the Python that a model card holds; return its ``model``."""
    (code,) = re.findall(r"```python\n(.*?)```", card.read_text(), re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["model"]


def test_resnet50_goes_to_torchvision_and_timm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("timm")
    monkeypatch.chdir(tmp_path)
    method = saved_run(tmp_path / "run", model_of(dim=64, predictor_dim=16), side=64)
    read = load_pretrained(tmp_path / "run")
    for format in ("torchvision", "timm"):
        export_weights(read, format=format, out=tmp_path / f"{format}.safetensors")
        theirs = by_snippet(tmp_path / f"{format}.safetensors.md")
        assert type(theirs).__module__.split(".")[0] == format
        with torch.no_grad():
            same(theirs(X), method.backbone(X))


@pytest.mark.parametrize("name", ["timm/test_efficientnet", "timm/test_resnet", "resnext50_32x4d"])
def test_timm_loads_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    monkeypatch.chdir(tmp_path)
    method = saved_run(tmp_path / "run", model_of(backbone=name, dim=16, predictor_dim=4))
    out = tmp_path / "w.safetensors"
    export_weights(load_pretrained(tmp_path / "run"), format="timm", out=out)
    theirs = by_snippet(tmp_path / "w.safetensors.md")
    with torch.no_grad():
        same(theirs(X), method.backbone(X))
    back = load_pretrained(out, backbone=name)
    assert back.layout == ("timm" if name.startswith("timm") else "torchvision")
    assert torch.equal(back.network()(X), method.backbone(X))


def test_the_authors_layout_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strictly into their model with the same outputs, and back bit for bit."""
    method = saved_run(tmp_path / "run", R18)
    read = load_pretrained(tmp_path / "run")
    out = tmp_path / "checkpoint_0007.pth.tar"
    assert export_weights(read, format="simsiam", out=out)[1].name == "checkpoint_0007.pth.tar.md"
    content = torch.load(out, weights_only=True)
    assert (content["arch"], content["epoch"]) == ("resnet18", 7)
    assert not content["state_dict"]["module.encoder.fc.6.bias"].any()
    theirs = nn.ModuleDict({"module": Authors("resnet18", 512, 32)})
    theirs.load_state_dict(content["state_dict"])
    with torch.no_grad():
        same(theirs["module"].eval()(X), method.predictor(method.projector(method.backbone(X))))
    back = load_pretrained(out)
    assert (back.layout, back.model, back.epoch) == ("simsiam", R18, 7)
    assert set(back.state) == set(read.state)
    assert all(torch.equal(value, read.state[key]) for key, value in back.state.items())
    monkeypatch.chdir(tmp_path)
    assert torch.equal(by_snippet(tmp_path / "checkpoint_0007.pth.tar.md")(X), method.backbone(X))


DETECTRON2_STAGE = {  # one block of detectron2's BottleneckBlock, written by hand
    "conv1.weight": "conv1.weight",
    "bn1.weight": "conv1.norm.weight",
    "bn1.bias": "conv1.norm.bias",
    "bn1.running_mean": "conv1.norm.running_mean",
    "bn1.running_var": "conv1.norm.running_var",
    "conv2.weight": "conv2.weight",
    "bn2.weight": "conv2.norm.weight",
    "bn2.bias": "conv2.norm.bias",
    "bn2.running_mean": "conv2.norm.running_mean",
    "bn2.running_var": "conv2.norm.running_var",
    "conv3.weight": "conv3.weight",
    "bn3.weight": "conv3.norm.weight",
    "bn3.bias": "conv3.norm.bias",
    "bn3.running_mean": "conv3.norm.running_mean",
    "bn3.running_var": "conv3.norm.running_var",
    "downsample.0.weight": "shortcut.weight",
    "downsample.1.weight": "shortcut.norm.weight",
    "downsample.1.bias": "shortcut.norm.bias",
    "downsample.1.running_mean": "shortcut.norm.running_mean",
    "downsample.1.running_var": "shortcut.norm.running_var",
}


def test_detectron2s_names(tmp_path: Path) -> None:
    method = saved_run(tmp_path / "run", model_of(dim=16, predictor_dim=4), side=64)
    out = tmp_path / "r50.pkl"
    export_weights(load_pretrained(tmp_path / "run"), format="detectron2", out=out)
    assert b"numpy._core" not in out.read_bytes()  # numpy before 2 has no such module
    content = pickle.loads(out.read_bytes())
    assert all(value.flags.writeable for value in content["model"].values())
    assert content["matching_heuristics"] is True and content["__author__"] == "fastsiam"
    expected = {"stem.conv1.weight": "conv1.weight"}
    for part in ("weight", "bias", "running_mean", "running_var"):
        expected[f"stem.conv1.norm.{part}"] = f"bn1.{part}"
    for stage, depth in enumerate((3, 4, 6, 3), start=1):
        for block in range(depth):
            for mine, theirs in DETECTRON2_STAGE.items():
                if block == 0 or not mine.startswith("downsample"):
                    expected[f"res{stage + 1}.{block}.{theirs}"] = f"layer{stage}.{block}.{mine}"
    state = method.backbone.state_dict()
    assert set(content["model"]) == set(expected) and len(expected) == 53 * 5
    for name, mine in expected.items():
        assert np.array_equal(content["model"][name], state[mine].numpy()), name
    card = (tmp_path / "r50.pkl.md").read_text()
    for line in (
        "PIXEL_MEAN: [123.675, 116.280, 103.530]",
        "PIXEL_STD: [58.395, 57.120, 57.375]",
        'FORMAT: "RGB"',
        "STRIDE_IN_1X1: False",
        "DEPTH: 50",
    ):
        assert line in card


@pytest.mark.parametrize("format", ["torchvision", "simsiam", "detectron2"])
def test_timms_shared_resnets_go_everywhere(format: str, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    theirs = replace(R18, backbone="timm/resnet18")
    method = saved_run(tmp_path / "run", theirs)
    out = tmp_path / ("w.pkl" if format == "detectron2" else "w.pth")
    export_weights(load_pretrained(tmp_path / "run"), format=format, out=out)
    if format != "detectron2":
        assert torch.equal(load_pretrained(out).network()(X), method.backbone(X))
    assert "ResNet-18, pre-trained" in Path(f"{out}.md").read_text()


def test_shared_resnets_have_the_same_names() -> None:
    pytest.importorskip("timm")
    for name in SHARED_RESNETS:
        torchvisions, timms = (
            {k: x.shape for k, x in skeleton(ModelConfig(backbone=full)).state_dict().items()}
            for full in (name, f"timm/{name}")
        )
        assert torchvisions == timms, name


@pytest.mark.parametrize(
    "model, format, message, instead",
    [
        (TINY, "torchvision", "width 4: torchvision's ResNets are 64 wide", "plain"),
        (TINY, "timm", "no resnet10 there", "plain"),
        (TINY, "detectron2", "no resnet10 there", "plain"),
        (replace(R18, stem="cifar"), "timm", "cifar stem", "plain or --format torchvision"),
        (replace(R18, stem="cifar"), "detectron2", "cifar stem", "plain or --format torchvision"),
        (
            changed_model(R18, projector_layers=2),
            "simsiam",
            "a projector of 2 layers: the authors' has 3",
            "plain or --format torchvision or --format timm or --format detectron2",
        ),
        (
            changed_model(R18, dim=64),
            "simsiam",
            "a projector 64 wide: the authors' is as wide as the features, 512",
            "plain or --format torchvision or --format timm or --format detectron2",
        ),
        (
            changed_model(R18, head_bn="hidden"),
            "simsiam",
            "head-bn hidden: the authors' heads are those of default",
            "plain or --format torchvision or --format timm or --format detectron2",
        ),
        (
            changed_model(R18, output_affine=True),
            "simsiam",
            "a scale and offset of the projector's output BN: the authors' has none",
            "plain or --format torchvision or --format timm or --format detectron2",
        ),
        (
            replace(R18, backbone="shufflenet_v2_x0_5"),
            "timm",
            "no shufflenet_v2_x0_5 there",
            "plain or --format torchvision",
        ),
        (
            changed_model(R18, backbone="resnext50_32x4d", dim=64),
            "detectron2",
            "no resnext50_32x4d there",
            "plain or --format torchvision or --format timm",
        ),
    ],
    ids=lambda value: value.backbone if isinstance(value, ModelConfig) else value[:12],
)
def test_what_a_format_cannot_hold_is_refused(
    model: ModelConfig, format: str, message: str, instead: str, tmp_path: Path
) -> None:
    """With a way out; what a run says at its start is the same."""
    read = untrained(model)
    with pytest.raises(CheckpointError) as caught:
        export_weights(
            read, format=format, out=tmp_path / ("w.pkl" if format[0] == "d" else "w.pt")
        )
    assert str(caught.value) == (
        f"cannot write x.pth as {format} ({message}): use --format {instead}"
    )
    assert not list(tmp_path.iterdir())
    possible, refused = exports_of(model).split("; not ")
    assert possible == f"exports: {instead.replace(' or --format', ',')}"
    assert re.search(rf"\b{format}\b[^()]*\({re.escape(message)}\)", refused)


def test_a_run_without_predictor_has_none_for_the_authors_layout(tmp_path: Path) -> None:
    model = changed_model(R18, predictor="none")
    with pytest.raises(CheckpointError, match=r"\(no predictor in the file\): use --format plain"):
        export_weights(untrained(model), format="simsiam", out=tmp_path / "w.pt")
    assert exports_of(model).endswith("detectron2; not simsiam (no predictor)")


def test_what_fits_everywhere_is_said_so() -> None:
    assert exports_of(R18) == "exports: plain, torchvision, timm, simsiam, detectron2"
    assert exports_of(replace(R18, backbone="timm/resnet18")) == exports_of(R18)
    assert exports_of(TINY) == (
        "exports: plain; not torchvision (width 4: torchvision's ResNets are 64 wide), "
        "timm, simsiam, detectron2 (no resnet10 there)"
    )


def test_exports_that_cannot_be_are_refused(tmp_path: Path) -> None:
    pretrained = untrained(changed_model(R18, dim=16))
    headless = replace(
        pretrained, state={k: v for k, v in pretrained.state.items() if k[:4] == "back"}
    )
    with pytest.raises(CheckpointError, match=r"\(no projector in the file\): use --format plain"):
        export_weights(headless, format="simsiam", out=tmp_path / "w.pth")
    for format, name in (("simsiam", "w.safetensors"), ("detectron2", "w.pth"), ("timm", "w")):
        with pytest.raises(ValueError, match=f"a file of format {format} ends in"):
            export_weights(pretrained, format=format, out=tmp_path / name)
    with pytest.raises(ValueError, match="unknown format 'onnx'"):
        export_weights(pretrained, format="onnx", out=tmp_path / "w.pth")
    (tmp_path / "file").touch()
    for ending in ("pth", "safetensors"):
        with pytest.raises(CheckpointError, match="cannot write") as caught:
            export_weights(pretrained, format="timm", out=tmp_path / "file" / f"w.{ending}")
        assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("force", [False, True])
def test_the_users_files_are_not_destroyed(force: bool, tmp_path: Path) -> None:
    """The source and a run's checkpoints never, other files only if that is asked for."""
    saved_run(tmp_path / "run", changed_model(R18, backbone="resnet10", dim=16))
    read = load_pretrained(tmp_path / "run")
    (source,) = export_weights(read, format="torchvision", out=tmp_path / "a.pth")[:1]
    (tmp_path / "link.pth").symlink_to(source)
    cases = [
        (load_pretrained(source), source, "is the file that the weights come from"),
        (load_pretrained(source), tmp_path / "link.pth", "is the file that the weights come from"),
        (read, tmp_path / "run" / "checkpoints" / "b.pth", "holds a run's checkpoints"),
    ]
    for pretrained, out, message in cases:
        before = sorted(tmp_path.rglob("*")), source.read_bytes()
        with pytest.raises(CheckpointError, match=message):
            export_weights(pretrained, format="torchvision", out=out, force=force)
        assert (sorted(tmp_path.rglob("*")), source.read_bytes()) == before
    (tmp_path / "b.pth.md").write_text("mine")
    if force:
        export_weights(read, format="torchvision", out=tmp_path / "b.pth", force=True)
    else:
        with pytest.raises(CheckpointError, match=r"b\.pth\.md is there already"):
            export_weights(read, format="torchvision", out=tmp_path / "b.pth")
    assert (tmp_path / "b.pth").exists() == force
    assert ((tmp_path / "b.pth.md").read_text() == "mine") != force
