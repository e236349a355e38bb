"""Settings and recipes of SimSiam."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fastsiam.config.setting import require, setting

from .base import CIFAR10, IMAGENET, Changes, MethodConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSiamConfig(MethodConfig):
    """SimSiam: heads and loss (section 3 of the paper)."""

    name: ClassVar[str] = "simsiam"
    title: ClassVar[str] = "SimSiam"
    builder: ClassVar[str] = "fastsiam.methods.simsiam_variants:build_simsiam"
    paper: ClassVar[str] = (
        "Chen and He, [Exploring Simple Siamese Representation Learning]"
        "(https://arxiv.org/abs/2011.10566), 2020"
    )
    recipes: ClassVar[dict[str, Changes]] = {
        "imagenet": IMAGENET,
        "cifar10": CIFAR10,
        # About two minutes on the demo's images with two CPU cores.
        "demo": {
            "crop": 32, "scale_min": 0.4, "blur_p": 0.0, "mean": (0.5,) * 3, "std": (0.25,) * 3,
            "backbone": "resnet10", "stem": "cifar", "width": 16,
            "projector_layers": 2, "dim": 512, "predictor_dim": 128,
            "epochs": 24, "batch": 128, "lr": 0.4, "weight_decay": 5e-4, "knn_every": 6,
            "log_every": 20,
        },
    }  # fmt: skip

    projector_layers: int = setting(
        3,
        "Layers of the projection MLP (paper: 3 on ImageNet, 2 on CIFAR-10).",
        at_least=1,
        option=False,
    )
    dim: int = setting(2048, "Output dimension of the projector.", at_least=1)
    projector_dim: int = setting(
        0,
        "Width of the projector's hidden layers; 0: same as dim (paper).",
        at_least=0,
        option=False,
    )
    predictor_dim: int = setting(
        512, "Width of the predictor's hidden layer (paper: a quarter of dim).", at_least=1
    )
    predictor: Literal["trained", "fixed", "none"] = setting(
        "trained", "Trained, fixed at initialisation, or none (Table 1: fixed and none fail)."
    )
    predictor_lr: Literal["constant", "cosine"] = setting(
        "constant",
        "Learning rate of the predictor: constant (paper: 68.1%), or cosine decay like all other "
        "weights (67.7%).",
    )
    head_bn: Literal["none", "hidden", "default", "all"] = setting(
        "default",
        "BN in the heads (Table 3). none: no BN. hidden: on hidden layers. default: also on the "
        "projector's output. all: also on the predictor's output.",
    )
    output_affine: bool = setting(
        False,
        "Scale and offset in the BN of the projector's output (68.1% with, 68.2% without).",
        option=False,
    )
    stop_gradient: bool = setting(
        True, "Stop the gradient through the targets; without it training collapses (Fig. 2)."
    )
    similarity: Literal["cosine", "cross-entropy"] = setting(
        "cosine", "Loss: cosine similarity, or cross-entropy of the softmax over channels (63.2%)."
    )
    symmetric: bool = setting(
        True,
        "Predict each view from the other. Otherwise only the first view of each pair predicts "
        "the second (64.8%); --views 4 then gives two pairs per image (67.3%).",
    )
    alternate_every: int = setting(
        1,
        "Steps between updates of the encoder that computes the targets (section 5.2). 1: "
        "SimSiam; 0: an epoch. Above 1, the frozen copy costs another forward pass.",
        at_least=0,
        option=False,
    )
    target_average: float = setting(
        0.0,
        "Momentum of a moving average of each image's projections, used as its target; 0: off. "
        "The paper uses 0.8 with --predictor none (section 5.2: 55.0%). It takes dim float32 "
        "values per image on every GPU and in every checkpoint: 10.5 GB for ImageNet.",
        at_least=0,
        below=1,
        option=False,
    )
    encoder_momentum: float = setting(
        0.0, "Momentum of a target encoder, as in BYOL (0.99); 0: off.", at_least=0, below=1
    )

    @property
    def hidden_widths(self) -> list[int]:
        """Widths of the projector's hidden layers."""
        return [self.projector_dim or self.dim] * (self.projector_layers - 1)

    def check(self) -> None:
        """Raise ``ValueError`` if settings contradict each other."""
        require(
            not self.output_affine or self.head_bn in ("default", "all"),
            f"output-affine needs head-bn default or all, not {self.head_bn}",
        )
        other = self.alternate_every != 1 or self.encoder_momentum > 0
        require(
            self.stop_gradient or not (other or self.target_average),
            "alternate-every, target-average and encoder-momentum need stop-gradient",
        )
        require(
            self.alternate_every == 1 or not self.encoder_momentum,
            "choose one of alternate-every and encoder-momentum",
        )
        require(
            self.similarity == "cosine" or not self.target_average,
            "target-average needs similarity cosine",
        )

    @property
    def centred(self) -> bool:
        """Whether BN centres the projector's output."""
        return self.head_bn in ("default", "all")

    def check_views(self, views: int) -> None:
        """Raise unless there are two views or, without symmetry, an even number."""
        if self.symmetric:
            require(
                views == 2,
                f"simsiam compares two views of each image, not {views}; --method fastsiam takes "
                "more, --no-symmetric an even number",
            )
        require(
            views % 2 == 0,
            f"--no-symmetric compares pairs of views, so --views must be even, not {views}",
        )
