"""Settings of all methods, and the table of methods.

The methods themselves are in ``fastsiam.methods``. Their settings are separate so that ``--help``
does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .setting import Config, require, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodConfig(Config):
    """Base class of the settings of a method. Each method has a subclass."""

    name: ClassVar[str]
    """Name for ``--method``."""
    title: ClassVar[str]
    """Name in the paper."""
    paper: ClassVar[str]
    """Citation of the paper, in Markdown, for model cards."""
    builder: ClassVar[str]
    """``module:name`` of its builder, called with these settings, a backbone and ``images``."""

    def describe(self) -> dict[str, str]:
        """Return the settings as text by name, for display."""
        return {name.replace("_", " "): str(value) for name, value in self.to_flags().items()}

    @property
    def centred(self) -> bool:
        """Whether BN centres the projector's output; its std is then near 1 unless it collapses."""
        return False

    def check_views(self, views: int) -> None:
        """Raise ``ValueError`` if the method does not support this number of views."""
        require(views == 2, f"{self.name} compares two views of each image, not {views}")

    def batch_warnings(self, *, images: int, batch: int, groups: int) -> list[str]:
        """Return warnings about settings that work but are probably unintended, one line each.

        Args:
            images: number of images in the data set.
            batch: number of images that pass through the layers together, over all ranks.
            groups: number of groups of them with separate BN statistics; 0 without BN.
        """
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedConfig(MethodConfig):
    """Projector: the head whose outputs the method compares."""

    projector_layers: int = setting(3, "Layers of the projection MLP.", at_least=1)
    dim: int = setting(128, "Output dimension of the projector.", at_least=1)
    projector_dim: int = setting(2048, "Width of the projector's hidden layers.", at_least=1)

    @property
    def hidden_widths(self) -> list[int]:
        """Widths of the projector's hidden layers."""
        return [self.projector_dim] * (self.projector_layers - 1)


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

    projector_layers: int = setting(
        3, "Layers of the projection MLP (paper: 3 on ImageNet, 2 on CIFAR-10).", at_least=1
    )
    dim: int = setting(2048, "Output dimension of the projector.", at_least=1)
    projector_dim: int = setting(
        0, "Width of the projector's hidden layers; 0: same as dim (paper).", at_least=0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FastSiamConfig(SimSiamConfig):
    """FastSiam: SimSiam's heads and loss, for any number of views."""

    name: ClassVar[str] = "fastsiam"
    title: ClassVar[str] = "FastSiam"
    builder: ClassVar[str] = "fastsiam.methods.simsiam_variants:build_fastsiam"
    paper: ClassVar[str] = (
        "Pototzky, Sultan and Schmidt-Thieme, FastSiam: Resource-Efficient Self-supervised "
        "Learning on a Single GPU, GCPR 2022"
    )

    def check_views(self, views: int) -> None:
        """Accept any number of views; ``TrainConfig`` requires at least two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimCLRConfig(ProjectedConfig):
    """SimCLR: head, loss, and the SimSiam paper's additions (section 6.2)."""

    name: ClassVar[str] = "simclr"
    title: ClassVar[str] = "SimCLR"
    builder: ClassVar[str] = "fastsiam.methods.simclr:SimCLR"
    paper: ClassVar[str] = (
        "Chen, Kornblith, Norouzi and Hinton, [A Simple Framework for Contrastive Learning of "
        "Visual Representations](https://arxiv.org/abs/2002.05709), ICML 2020"
    )

    temperature: float = setting(0.1, "Temperature of the softmax over similarities.", above=0)
    predictor: Literal["trained", "none"] = setting(
        "none", "Predictor on one of the two branches: none (66.5%), or trained (66.4%)."
    )
    predictor_dim: int = setting(
        512, "Width of the predictor's hidden layer, if there is a predictor.", at_least=1
    )
    stop_gradient: bool = setting(
        False,
        "Stop the gradient through the other branch (66.0% with a predictor; 66.5% with neither).",
    )

    @property
    def centred(self) -> bool:
        """Whether BN centres the projector's output: always."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class MoCoV2Config(ProjectedConfig):
    """MoCo v2: head, queue of negatives and momentum encoder."""

    name: ClassVar[str] = "mocov2"
    title: ClassVar[str] = "MoCo v2"
    builder: ClassVar[str] = "fastsiam.methods.mocov2:MoCoV2"
    paper: ClassVar[str] = (
        "Chen, Fan, Girshick and He, [Improved Baselines with Momentum Contrastive Learning]"
        "(https://arxiv.org/abs/2003.04297), 2020"
    )

    projector_layers: int = 2
    temperature: float = setting(0.2, "Temperature of the softmax over similarities.", above=0)
    queue: int = setting(65536, "Number of previous projections to keep as negatives.", at_least=1)
    encoder_momentum: float = setting(0.999, "Momentum of the key encoder.", at_least=0, below=1)
    symmetric: bool = setting(
        True, "Use both views as queries, as SimSiam's authors did, or only the first."
    )

    def batch_warnings(self, *, images: int, batch: int, groups: int) -> list[str]:
        """Warn if BN lets queries identify their keys, or an image's own keys are negatives."""
        warnings = []
        if groups == 1:
            warnings.append(
                "BN normalises queries and their keys over the same images, which lets MoCo cheat; "
                "split the batch, for example with --no-sync-bn --bn-images 32"
            )
        if self.queue >= (keys := images * (2 if self.symmetric else 1)):
            warnings.append(
                f"the queue of {self.queue:,} holds all {keys:,} keys of an epoch, so an image's "
                "own keys are among its negatives; choose a smaller --queue"
            )
        return warnings


@dataclass(frozen=True, slots=True, kw_only=True)
class BYOLConfig(ProjectedConfig):
    """BYOL: heads, and the momentum encoder that computes the targets."""

    name: ClassVar[str] = "byol"
    title: ClassVar[str] = "BYOL"
    builder: ClassVar[str] = "fastsiam.methods.byol:BYOL"
    paper: ClassVar[str] = (
        "Grill et al., [Bootstrap Your Own Latent: A New Approach to Self-Supervised Learning]"
        "(https://arxiv.org/abs/2006.07733), NeurIPS 2020"
    )

    projector_layers: int = 2
    dim: int = 256
    projector_dim: int = 4096
    predictor_dim: int = setting(4096, "Width of the predictor's hidden layer.", at_least=1)
    encoder_momentum: float = setting(0.99, "Momentum of the target encoder.", at_least=0, below=1)
    momentum_schedule: Literal["cosine", "constant"] = setting(
        "cosine",
        "Momentum of the target encoder: rising to 1 along a cosine, or constant.",
        option=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SwAVConfig(ProjectedConfig):
    """SwAV: head, prototypes, and how images are assigned to them."""

    name: ClassVar[str] = "swav"
    title: ClassVar[str] = "SwAV"
    builder: ClassVar[str] = "fastsiam.methods.swav:SwAV"
    paper: ClassVar[str] = (
        "Caron et al., [Unsupervised Learning of Visual Features by Contrasting Cluster "
        "Assignments](https://arxiv.org/abs/2006.09882), NeurIPS 2020"
    )

    prototypes: int = setting(
        3000, "Number of prototypes (clusters) to which images are assigned.", at_least=1
    )
    temperature: float = setting(0.1, "Temperature of the softmax over similarities.", above=0)
    epsilon: float = setting(
        0.05,
        "Entropy regularisation of the assignments; smaller is closer to one prototype each.",
        above=0,
        option=False,
    )
    sinkhorn_rounds: int = setting(
        3, "Sinkhorn iterations that balance the assignments.", at_least=1, option=False
    )
    frozen_epochs: float = setting(
        1.0, "Epochs at the start during which prototypes are frozen.", at_least=0, option=False
    )
    queue: int = setting(
        0, "Number of previous projections to keep, to balance small batches; 0: none.", at_least=0
    )
    queue_from: float = setting(
        15.0, "Epoch from which the queue is filled and used.", at_least=0, option=False
    )
    predictor: Literal["trained", "none"] = setting(
        "none", "Predictor on one of the two branches: none (66.5%), or trained (65.2%)."
    )
    predictor_dim: int = setting(
        512, "Width of the predictor's hidden layer, if there is a predictor.", at_least=1
    )
    stop_gradient: bool = setting(
        True, "Stop the gradient through the assignments; without it training diverges."
    )

    def check_views(self, views: int) -> None:
        """Require at least two: the first two are assigned, and predicted from all others."""
        require(views >= 2, f"swav compares two or more views of each image, not {views}")

    def batch_warnings(self, *, images: int, batch: int, groups: int) -> list[str]:
        """Warn if there are fewer images than prototypes."""
        if (count := batch + self.queue) >= self.prototypes:
            return []
        return [
            f"{count:,} images cannot be balanced over {self.prototypes:,} prototypes; choose "
            "fewer --prototypes or a longer --queue"
        ]


METHOD_CONFIGS: dict[str, type[MethodConfig]] = {
    config.name: config
    for config in (
        SimSiamConfig,
        FastSiamConfig,
        SimCLRConfig,
        MoCoV2Config,
        BYOLConfig,
        SwAVConfig,
    )
}
"""The settings class of each method, by the method's name."""
