"""Settings of SimSiam, with a field for each experiment of its paper, and of FastSiam."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fastsiam.config.checks import require
from fastsiam.config.setting import setting

from .base import MethodConfig, in_words

HeadNorm = Literal["none", "hidden", "default", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSiamConfig(MethodConfig):
    """SimSiam: its heads and its loss (section 3 of the paper)."""

    name: ClassVar[str] = "simsiam"
    title: ClassVar[str] = "SimSiam"
    builder: ClassVar[str] = "fastsiam.methods.simsiam_variants:build_simsiam"
    paper: ClassVar[str] = (
        "Chen and He, [Exploring Simple Siamese Representation Learning]"
        "(https://arxiv.org/abs/2011.10566), 2020"
    )

    projector_layers: int = setting(
        3, "Layers of the projection MLP (3 for ImageNet, 2 for CIFAR-10).", at_least=1
    )
    dim: int = setting(2048, "Dimension of the projector's output.", at_least=1)
    projector_dim: int = setting(
        0, "Width of the projector's hidden layers; 0 takes dim, as in the paper.", at_least=0
    )
    predictor_dim: int = setting(
        512,
        "Hidden width of the predictor; the paper's bottleneck is a quarter of dim.",
        at_least=1,
    )
    predictor: Literal["trained", "fixed", "none"] = setting(
        "trained", "Predictor: trained, fixed as it is initialised, or none (Table 1: both fail)."
    )
    predictor_lr: Literal["constant", "cosine"] = setting(
        "constant",
        "Predictor's rate: constant (68.1 in the paper) or decaying with the rest (67.7).",
    )
    head_bn: HeadNorm = setting(
        "default",
        "BN on the heads (Table 3): none, after the hidden layers, default (these and the "
        "projector's output), or all (the predictor's output too).",
    )
    output_affine: bool = setting(
        False,
        "Give the BN of the projector's output a scale and offset (68.1 with, 68.2 without).",
        option=False,
    )
    stop_gradient: bool = setting(
        True,
        "Treat the other view's projection as a constant. "
        "Without it training collapses (the paper's Fig. 2).",
    )
    similarity: Literal["cosine", "cross-entropy"] = setting(
        "cosine",
        "Loss of a prediction: cosine, or cross-entropy of the softmax over channels (63.2).",
    )
    symmetric: bool = setting(
        True,
        "Predict each view from the other. Without it only the first view of each pair predicts "
        "(64.8); --views 4 then makes two pairs of each image (67.3).",
    )
    alternate_every: int = setting(
        1,
        "Steps whose targets come from the encoder as it was before them (section 5.2): 1 is "
        "SimSiam, 0 is an epoch. Above 1 a frozen copy of the encoder gives them, which costs a "
        "forward pass more.",
        at_least=0,
        option=False,
    )
    target_average: float = setting(
        0.0,
        "Momentum of a moving average of each image's projections, which is the target then; 0 is "
        "off. The paper has 0.8 with --predictor none (section 5.2: 55.0). One row of dim float32 "
        "for each image lies on every GPU and in every checkpoint: 10.5 GB for ImageNet.",
        at_least=0,
        below=1,
        option=False,
    )
    encoder_momentum: float = setting(
        0.0,
        "Momentum of an encoder that follows the trained one and gives the targets, as in BYOL "
        "(0.99, say); 0 is off: SimSiam has none.",
        at_least=0,
        below=1,
    )

    def check(self) -> None:
        """Refuse settings that contradict each other."""
        require(
            not self.output_affine or self.head_bn in ("default", "all"),
            f"output-affine is of the BN that head-bn {self.head_bn} leaves out: leave it out, too",
        )
        other = self.alternate_every != 1 or self.encoder_momentum > 0
        require(
            self.stop_gradient or not (other or self.target_average),
            "alternate-every, target-average and encoder-momentum keep targets, through which no "
            "gradient flows: leave --no-stop-gradient out",
        )
        require(
            self.alternate_every == 1 or not self.encoder_momentum,
            "alternate-every and encoder-momentum are two ways to have another encoder: choose one",
        )
        require(
            self.similarity == "cosine" or not self.target_average,
            "target-average is of l2-normalised projections, whose softmax is nearly constant: "
            "leave --similarity cross-entropy out",
        )

    def described(self) -> dict[str, str]:
        """Return its settings for people, by what they are of; of the study's, those in use."""
        predictor = f"{self.dim}-{self.predictor_dim}-{self.dim}, "
        predictor += (
            f"{self.predictor_lr} learning rate" if self.predictor == "trained" else "not trained"
        )
        said = {
            "projector": f"{self.projector_layers} layers, {self.projector_dim or self.dim} wide, "
            f"to {self.dim}",
            "predictor": "none" if self.predictor == "none" else predictor,
            "stop-gradient": in_words(self.stop_gradient),
        }
        usual = SimSiamConfig()
        for name in ("head_bn", "output_affine", "similarity", "symmetric"):
            if (value := getattr(self, name)) != getattr(usual, name):
                said[name.replace("_", " ")] = in_words(value)
        if self.alternate_every != 1:
            steps = f"{self.alternate_every} steps" if self.alternate_every else "epoch"
            said["targets"] = f"of the encoder before each {steps}"
        if self.encoder_momentum:
            said["momentum encoder"] = f"gives the targets, momentum {self.encoder_momentum:g}"
        if self.target_average:
            said["average"] = f"of each image's targets, momentum {self.target_average:g}"
        return said

    @property
    def centred(self) -> bool:
        """Whether BN centres the projector's output."""
        return self.head_bn in ("default", "all")

    def check_views(self, views: int) -> None:
        """Refuse all but two, or pairs of them without symmetry: the loss compares a pair."""
        if self.symmetric:
            require(
                views == 2,
                f"simsiam compares two views of each image, not {views}: --method fastsiam takes "
                "more, --no-symmetric pairs of them",
            )
        require(views % 2 == 0, f"without symmetry views are compared in pairs, not {views}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FastSiamConfig(SimSiamConfig):
    """FastSiam: SimSiam's heads and loss, of any number of views."""

    name: ClassVar[str] = "fastsiam"
    title: ClassVar[str] = "FastSiam"
    builder: ClassVar[str] = "fastsiam.methods.fastsiam:FastSiam"
    paper: ClassVar[str] = (
        "Pototzky, Sultan and Schmidt-Thieme, FastSiam: Resource-Efficient Self-supervised "
        "Learning on a Single GPU, GCPR 2022"
    )

    def check_views(self, views: int) -> None:
        """Take any number from two on, which every augmentation has."""
