"""ResNets without a classifier, out of torchvision's blocks, with torchvision's parameter names."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.models.resnet import BasicBlock, Bottleneck

from fastsiam.batch_norm import recomputing
from fastsiam.config import ModelConfig

_BLOCKS: dict[str, tuple[type[BasicBlock | Bottleneck], tuple[int, int, int, int]]] = {
    "resnet10": (BasicBlock, (1, 1, 1, 1)),
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
}


class ResNet(nn.Module):
    """A ResNet up to its pooled features ("pool5"): (N, 3, S, S) to (N, ``features``).

    torchvision's ``ResNet`` fixes the width at 64; this one does not, and else builds the same
    modules under the same names, so torchvision's weights load (all but ``fc``) and ours load
    there. The "cifar" stem is He et al.'s for 32-pixel images (CVPR 2016, section 4.2): 3x3,
    stride 1, no pool.
    """

    def __init__(self, name: str, *, stem: str, width: int) -> None:
        super().__init__()
        block, depths = _BLOCKS[name]
        small = stem == "cifar"
        self.conv1 = nn.Conv2d(
            3, width, 3 if small else 7, 1 if small else 2, 1 if small else 3, bias=False
        )
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        channels, stages = width, []
        for stage, depth in enumerate(depths):
            planes, stride = width * 2**stage, 1 if stage == 0 else 2
            blocks = []
            for i in range(depth):
                blocks.append(_block(block, channels, planes, stride if i == 0 else 1))
                channels = planes * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.features = channels
        self.recompute = False
        """Keep only each block's input for the backward pass, which computes the rest again."""

    def forward(self, x: Tensor) -> Tensor:
        """Return pooled features (N, ``features``) of normalised images (N, 3, S, S)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block in stage:
                x = _recomputed(block, x) if self.recompute and self.training else block(x)
        pooled: Tensor = self.avgpool(x).flatten(1)
        return pooled


def build_backbone(config: ModelConfig) -> ResNet:
    """Build the encoder that the config names, initialised as torchvision's (He et al., fan-out).

    With ``zero_init_residual`` the last BN of each block starts at scale 0 (Goyal et al. 2017).
    """
    backbone = ResNet(config.backbone, stem=config.stem, width=config.width)
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if config.zero_init_residual and isinstance(module, Bottleneck):
            nn.init.zeros_(module.bn3.weight)
        if config.zero_init_residual and isinstance(module, BasicBlock):
            nn.init.zeros_(module.bn2.weight)
    return backbone


def _recomputed(block: nn.Module, x: Tensor) -> Tensor:
    """Run a block whose BNs are ``ViewBatchNorm`` so that the backward pass runs it again."""
    out: Tensor = checkpoint(
        block,
        x,
        use_reentrant=False,
        preserve_rng_state=False,  # nothing in it is random
        context_fn=lambda: (nullcontext(), recomputing()),
    )
    return out


def _block(
    block: type[BasicBlock | Bottleneck], channels: int, planes: int, stride: int
) -> BasicBlock | Bottleneck:
    """One residual block; a 1x1 convolution on the shortcut where the shape changes."""
    out = planes * block.expansion
    shortcut = None
    if stride != 1 or channels != out:
        shortcut = nn.Sequential(
            nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
        )
    return block(channels, planes, stride, shortcut)
