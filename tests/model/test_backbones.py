"""Backbones by name: fastsiam's ResNets equal torchvision's; others are torchvision's or timm's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from fastsiam.config import ModelConfig
from fastsiam.errors import BackendError
from fastsiam.methods import build_method
from fastsiam.model.backbones import (
    ResNet,
    StridedPointwise,
    _without_randomness,
    _without_unsafe_convolutions,
    build_backbone,
    check_backbone,
    classifier_keys,
    skeleton,
)
from fastsiam.model.batch_norm import unknown_batch_norm, use_view_batch_norm
from tests.configs import make_model_config
from tests.conftest import ROOT, import_or_skip


def test_resnets_have_parameters_of_torchvision() -> None:
    for name in ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"):
        with torch.device("meta"):
            theirs = getattr(torchvision.models, name)().state_dict()
        ours = skeleton(ModelConfig(backbone=name)).state_dict()
        assert {key: value.shape for key, value in theirs.items() if not key.startswith("fc.")} == {
            key: value.shape for key, value in ours.items()
        }


def test_stems_and_widths() -> None:
    """solo-learn pads by 2, so 32 pixels become 34. lightly's stem has no ReLU."""
    x = torch.randn(2, 3, 32, 32)
    for stem, side in {"imagenet": 16, "cifar": 32, "cifar-pad2": 34, "cifar-no-relu": 32}.items():
        backbone = build_backbone(ModelConfig(backbone="resnet18", stem=stem))  # type: ignore[arg-type]
        assert isinstance(backbone, ResNet) and backbone.conv1(x).shape == (2, 64, side, side)
        assert (backbone.relu(x.clone()).min() < 0) == (stem == "cifar-no-relu")
        assert backbone.conv1.kernel_size == ((7, 7) if stem == "imagenet" else (3, 3))
        if stem == "cifar":
            assert backbone.maxpool(backbone.conv1(x)).shape == (2, 64, 32, 32)
            assert sum(p.numel() for p in backbone.parameters()) == 11_168_832
    narrow = build_backbone(ModelConfig(backbone="resnet10", width=16))
    assert narrow.features == 128
    assert sum(isinstance(module, BasicBlock) for module in narrow.modules()) == 4
    for setting in ({"stem": "cifar"}, {"width": 16}):
        with pytest.raises(ValueError, match=r"resnet10, .* pass --stem imagenet --width 64"):
            ModelConfig(backbone="convnext_tiny", **setting)
        with pytest.raises(ValueError, match=r"^unknown backbone 'resnet51'; .* resnet50\?$"):
            ModelConfig(backbone="resnet51", **setting)
    with pytest.raises(ValueError, match="stem must be one of imagenet, cifar"):
        ModelConfig(stem="cifar-pad3")  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "blocks"), [("resnet18", 8), ("wide_resnet50_2", 16)])
@pytest.mark.parametrize("zero", [True, False])
def test_zero_init_residual_zeros_last_batch_norm(name: str, blocks: int, zero: bool) -> None:
    """Checked for fastsiam's and torchvision's ResNets."""
    backbone = build_backbone(ModelConfig(backbone=name, zero_init_residual=zero))
    last = [m.bn3 for m in backbone.modules() if isinstance(m, Bottleneck)]
    last += [m.bn2 for m in backbone.modules() if isinstance(m, BasicBlock)]
    assert len(last) == blocks
    for norm in backbone.modules():
        if isinstance(norm, nn.BatchNorm2d):
            assert bool((norm.weight == 0).all()) == (zero and norm in last)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "convnext_tiny", "mobilenet_v3_small"])
def test_networks_have_names_and_outputs_of_torchvision(name: str) -> None:
    """All names are kept except the classifier's, also if a module is called ``features``."""
    torch.manual_seed(0)
    ours = build_backbone(ModelConfig(backbone=name)).eval()
    theirs = torchvision.models.get_model(name).eval()
    state = {k: v for k, v in theirs.state_dict().items() if not k.startswith(ours.classifier)}
    assert set(state) == set(ours.state_dict()) and len(state) == len(theirs.state_dict()) - 2
    assert set(nn.Sequential(ours).state_dict()) == {f"0.{key}" for key in state}
    nn.Sequential(ours).load_state_dict({f"0.{key}": value for key, value in state.items()})
    theirs.set_submodule(ours.classifier, nn.Identity())
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))
    assert ours(x).shape == (2, ours.features)


@pytest.mark.parametrize("name", ["test_efficientnet", "test_convnext", "test_mambaout"])
def test_timm_networks_keep_parameter_names(name: str) -> None:
    timm = import_or_skip("timm")
    ours = build_backbone(ModelConfig(backbone=f"timm/{name}")).eval()
    theirs = timm.create_model(name, num_classes=0).eval()
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(ours(x), theirs(x)) and theirs(x).shape == (2, ours.features)
    all_names = set(timm.create_model(name).state_dict())
    classifier = classifier_keys(ModelConfig(backbone=f"timm/{name}"))
    assert len(classifier) == 2 and all_names - classifier == set(ours.state_dict())


FAMILIES = (
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "maxvit_t", "mobilenet_v2"),
    *("regnet_y_400mf", "resnext50_32x4d", "swin_t", "swin_v2_t", "vgg11_bn", "vit_b_32"),
    *("timm/test_byobnet", "timm/test_mambaout", "timm/test_nfnet", "timm/test_vit"),
)


def test_state_dict_without_metadata_loads() -> None:
    """Checkpoints and weight files lack the module versions that a state dict has."""
    import_or_skip("timm")
    for name in FAMILIES:
        backbone = skeleton(ModelConfig(backbone=name))
        backbone.load_state_dict(dict(backbone.state_dict()), assign=True)


def test_networks_are_deterministic_in_training_mode() -> None:
    """Dropout and stochastic depth are disabled, so outputs in training mode ignore the seed."""
    timm = import_or_skip("timm")
    functional = timm.create_model("test_efficientnet", num_classes=0, drop_rate=0.5).train()
    x = torch.randn(2, 3, 64, 64)
    assert not torch.equal(functional(x), functional(x))
    for module in functional.modules():
        _without_randomness(module)
    names = ("vit_b_32", "efficientnet_b0", "convnext_tiny", "alexnet")
    networks = [build_backbone(ModelConfig(backbone=name)).train() for name in names]
    for network in (functional, *networks):
        images = torch.randn(2, 3, 224, 224) if network is networks[0] else x
        torch.manual_seed(0)
        first = network(images)
        torch.manual_seed(1)
        assert torch.equal(network(images), first)


@pytest.mark.parametrize("name", ["shufflenet_v2_x0_5", "timm/test_efficientnet", "timm/test_vit"])
def test_joint_and_separate_views_train_equally(name: str) -> None:
    """Two small steps: in some networks rounding alone changes early gradients by 1%."""
    if name.startswith("timm/"):
        import_or_skip("timm")
    losses, statistics = [], []
    views = torch.randn(2, 8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    views[1] += 1
    for setting in ("plain", "apart", "together"):
        torch.manual_seed(0)
        method = build_method(make_model_config(backbone=name, dim=16, predictor_dim=4)).train()
        optimizer = torch.optim.SGD(method.parameters(), 1e-3)
        method.views_together = setting == "together"
        if setting != "plain":
            use_view_batch_norm(method, images=8 if method.views_together else 0)
        for _ in range(2):
            loss = method(tuple(views), torch.arange(8)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        statistics.append(
            torch.cat([b for n, b in method.named_buffers() if n.endswith("running_mean")])
        )
    for begin in (2, 4):
        assert losses[begin] == pytest.approx(losses[0], abs=2e-5)
        assert losses[begin + 1] == pytest.approx(losses[1], abs=1e-3)
    assert abs(losses[0] - losses[1]) > 2e-3
    for other in statistics[1:]:
        torch.testing.assert_close(other, statistics[0], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "name, crop, message",
    [
        ("vit_b_16", 32, "^vit_b_16 needs images of 224 pixels, not 32; pass --crop 224$"),
        ("timm/vit_tiny_patch16_224", 32, "needs images of 224 pixels, not 32; pass --crop 224$"),
        ("convnet_tiny", 224, "unknown backbone 'convnet_tiny'; did you mean convnext_tiny"),
        ("resnet5O", 224, "did you mean .*resnet50"),
        ("resnet1", 224, r"did you mean resnet18 or (?!.*resnet18)"),
        ("timm/resnet5O", 224, "unknown backbone 'timm/resnet5O'; did you mean timm/resnet50"),
        ("squeezenet1_0", 224, "no fully-connected classifier"),
        ("googlenet", 224, "does not return one feature vector per image in training"),
        ("fasterrcnn_resnet50_fpn", 224, "unknown backbone 'fasterrcnn_resnet50_fpn'"),
        ("timm/hf-hub:timm/resnet18", 224, "unknown backbone"),
        ("timm/resnet18.a1_in1k", 224, "which cannot be loaded; pass timm/resnet18$"),
        ("mnasnet0_5", 224, "mnasnet0_5 is not supported"),
    ],
)
def test_unsupported_backbone_is_one_line_error(name: str, crop: int, message: str) -> None:
    if name.startswith("timm/"):
        import_or_skip("timm")
    with pytest.raises(ValueError, match=message) as caught:
        check_backbone(ModelConfig(backbone=name), crop=crop)
    assert "\n" not in str(caught.value)


def test_backbone_with_token_bn_rejects_joint_views() -> None:
    import_or_skip("timm")
    levit = ModelConfig(backbone="timm/levit_128s")
    check_backbone(levit, crop=224)
    with pytest.raises(BackendError, match=r"levit_128s folds parts of .*; pass --compile off"):
        check_backbone(levit, crop=224, joins_views=True)


def test_valid_backbones_pass_and_timm_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("resnet18", "convnext_tiny", "regnet_x_400mf", "swin_t"):
        check_backbone(ModelConfig(backbone=name), crop=64, joins_views=True)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(BackendError, match=r"pip install 'fastsiam\[timm\]'"):
        check_backbone(ModelConfig(backbone="timm/resnet18"), crop=224)
    with pytest.raises(ValueError, match=r"did you mean .*resnet50"):
        build_backbone(ModelConfig(backbone="resnet5O"))


def test_unsupported_batch_norm_is_detected() -> None:
    layers = import_or_skip("timm.layers")
    assert unknown_batch_norm(nn.Sequential(nn.Linear(2, 2), layers.EvoNorm2dB0(4))) == (
        "EvoNorm2dB0"
    )
    assert not unknown_batch_norm(nn.Sequential(layers.BatchNormAct2d(4), nn.GroupNorm(2, 4)))
    for settings in ({"track_running_stats": False}, {"momentum": None}):
        assert unknown_batch_norm(nn.Sequential(nn.BatchNorm2d(4, **settings))) == "BatchNorm2d"


@pytest.mark.slow
def test_narrow_resnet_backward_stays_in_bounds() -> None:
    """oneDNN's backward of narrow, strided 1x1 convolutions writes out of bounds (torch 2.15)."""
    code = """
import torch
from fastsiam.config import ModelConfig
from fastsiam.model.backbones import build_backbone
torch.set_num_threads(2)
network = build_backbone(ModelConfig(backbone="resnet10", stem="cifar", width=4))
network.to(memory_format=torch.channels_last)
for _ in range(20):
    x = torch.randn(9, 3, 32, 32).to(memory_format=torch.channels_last)
    network(x).square().mean().backward()
"""
    checked = {"LD_PRELOAD": "libc_malloc_debug.so.0", "GLIBC_TUNABLES": "glibc.malloc.check=3"}
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **checked}, cwd=ROOT, timeout=300
    )
    assert result.returncode == 0


def test_strided_pointwise_equals_conv2d() -> None:
    network = nn.Sequential(nn.Conv2d(8, 24, 1, stride=2, bias=True))
    x = torch.randn(8, 8, 9, 7)
    expected = network(x)
    _without_unsafe_convolutions(network)
    assert isinstance(network[0], StridedPointwise) and set(network.state_dict()) == {
        "0.weight",
        "0.bias",
    }
    torch.testing.assert_close(network(x), expected)
