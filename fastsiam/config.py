"""Every setting of a run, as frozen dataclasses: defaults, meaning, validation.

The literal below a field is its documentation; fastsiam/options.py makes the command line's options
and their help out of these classes, so a setting is written once. A value that makes no sense
raises ``ValueError`` here, before torch is imported or a worker starts: standard library only.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

Pipeline = Literal["torchvision", "ffcv", "dali", "memory", "synthetic"]
Stem = Literal["imagenet", "cifar", "cifar-pad2", "cifar-no-relu"]
Precision = Literal["auto", "bf16", "fp16", "fp32"]
Compile = Literal["auto", "on", "off"]

OWN_BACKBONES = ("resnet10", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
"""Networks that take a stem and a width; every other name is torchvision's or timm's."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def require(condition: bool, message: str) -> None:
    """Raise ``ValueError`` with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Data: where the images are and how they are loaded."""

    data: str = ""
    (
        "Converted folder or .beton file, .tar archive, or folder of images or tars, "
        "with train/ beside val/ or test/ or without. Default: $FASTSIAM_DATA, else ./data."
    )
    pipeline: Pipeline = "torchvision"
    (
        "How images become batches: PIL in worker processes; FFCV; DALI; "
        "decoded once and kept on the device; or ready tensors."
    )
    workers: int = -1
    (
        "Loader processes (torchvision, memory) or threads (ffcv, dali; at least 1) of each rank; "
        "-1 is one for each core of the rank, 0 loads in the training process."
    )

    prefetch: int = 2
    """ffcv, dali: batches that are made ahead of the training step."""
    os_cache: bool = True
    (
        "ffcv: map the file and leave caching to the system; "
        "otherwise FFCV reads it into memory of its own, in each rank nearly as much as the file."
    )

    dali_hw_decoder_load: float = 0.65
    """dali on a GPU: share of the images, 0 to 1, that goes to the GPU's JPEG engine."""

    def __post_init__(self) -> None:
        known = get_args(Pipeline)
        require(
            self.pipeline in known,
            f"pipeline must be one of {', '.join(known)}, not {self.pipeline!r}",
        )
        require(
            0 <= self.dali_hw_decoder_load <= 1,
            f"dali-hw-decoder-load is a share, 0 to 1, not {self.dali_hw_decoder_load}",
        )
        require(self.workers >= -1, f"workers must be -1 or more, not {self.workers}")
        require(self.prefetch >= 1, f"prefetch must be at least 1, not {self.prefetch}")

    @property
    def root(self) -> Path:
        """The data folder, with the default filled in."""
        return Path(self.data or os.environ.get("FASTSIAM_DATA", "") or "data")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig:
    """Conversion of a data set into .beton files."""

    source: str = ""
    """Where the data are: a folder or a file. Default: $FASTSIAM_DATA, else ./data."""
    out: str = ""
    """Folder for train.beton, val.beton and manifest.json. Default: where the source was found."""
    max_side: int = 0
    """Shrink images whose longer side has more pixels than this; 0 leaves them."""
    short_side: int = 0
    """Shrink images whose shorter side has more pixels than this; 0 leaves them."""
    quality: int = 95
    """JPEG quality of the images that have to be encoded; the others keep their bytes."""
    raw: bool | None = None
    """Store pixels, not JPEGs: for small images. Default: only those that come as pixels."""
    limit: int = 0
    """Take at most so many images of each split, the classes in their proportions; 0 takes all."""
    seed: int = 0
    """Decides which images --limit takes."""
    part: str = ""
    (
        "Convert one part of several, such as 2/8, into a file of its own. "
        "The parts in one folder are one data set; convert folder makes one file of them."
    )
    skip_bad: bool = False
    """Leave out images that cannot be read, and list them in the manifest."""
    workers: int = -1
    """Processes; -1 is one for each core."""

    def __post_init__(self) -> None:
        for name in ("max_side", "short_side", "limit"):
            value = getattr(self, name)
            require(value >= 0, f"{name.replace('_', '-')} must be 0 or more, not {value}")
        require(1 <= self.quality <= 100, f"quality must be 1 to 100, not {self.quality}")
        require(
            self.workers == -1 or self.workers >= 1,
            f"workers must be -1 or at least 1, not {self.workers}",
        )
        number, count = self.part_of
        require(
            1 <= number <= count <= 99999,
            f"part must be such as 2/8, the first number from 1 to the second, not {self.part!r}",
        )

    @property
    def root(self) -> Path:
        """Where the data are, with the default filled in."""
        return DataConfig(data=self.source).root

    @property
    def part_of(self) -> tuple[int, int]:
        """Number of the part, from 1, and how many there are; (0, -1) if it makes no sense."""
        if not self.part:
            return 1, 1
        number, _, count = self.part.partition("/")
        if not (number.isascii() and number.isdigit() and count.isascii() and count.isdigit()):
            return 0, -1
        return int(number), int(count)


@dataclass(frozen=True, slots=True, kw_only=True)
class AugmentConfig:
    """Augmentation: how one image becomes two views. Defaults are the paper's (section 3)."""

    crop: int = 224
    """Side of a view, in pixels."""
    scale_min: float = 0.2
    """Smallest crop, as a share of the image's area."""
    scale_max: float = 1.0
    """Largest crop, as a share of the image's area."""
    ratio_min: float = 3 / 4
    """Smallest width / height of a crop."""
    ratio_max: float = 4 / 3
    """Largest width / height of a crop."""
    flip_p: float = 0.5
    """Probability of a horizontal flip."""
    jitter_p: float = 0.8
    """Probability of the colour jitter."""
    brightness: float = 0.4
    """Brightness factor is drawn from 1 -+ this."""
    contrast: float = 0.4
    """Contrast factor is drawn from 1 -+ this."""
    saturation: float = 0.4
    """Saturation factor is drawn from 1 -+ this."""
    hue: float = 0.1
    """Hue shift is drawn from -+ this, in turns of the colour circle (0 to 0.5)."""
    gray_p: float = 0.2
    """Probability that a view becomes gray."""
    blur_p: float = 0.5
    """Probability of the Gaussian blur."""
    blur_sigma_min: float = 0.1
    """Smallest sigma of the blur, in pixels of the view."""
    blur_sigma_max: float = 2.0
    """Largest sigma of the blur, in pixels of the view."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Mean of each channel that normalisation subtracts (images scaled to 0-1)."""
    std: tuple[float, float, float] = IMAGENET_STD
    """Standard deviation of each channel that normalisation divides by."""

    def __post_init__(self) -> None:
        require(self.crop >= 1, f"crop must be at least 1 pixel, not {self.crop}")
        require(
            0 < self.scale_min <= self.scale_max <= 1,
            "crop scales must satisfy 0 < scale-min <= scale-max <= 1, "
            f"not {self.scale_min} and {self.scale_max}",
        )
        require(
            0 < self.ratio_min <= self.ratio_max,
            "crop ratios must satisfy 0 < ratio-min <= ratio-max, "
            f"not {self.ratio_min} and {self.ratio_max}",
        )
        for name in ("flip_p", "jitter_p", "gray_p", "blur_p"):
            value = getattr(self, name)
            require(
                0 <= value <= 1, f"{name.replace('_', '-')} is a probability, 0 to 1, not {value}"
            )
        for name in ("brightness", "contrast", "saturation"):
            require(
                getattr(self, name) >= 0, f"{name} must be 0 or more, not {getattr(self, name)}"
            )
        require(0 <= self.hue <= 0.5, f"hue must be 0 to 0.5 turns, not {self.hue}")
        require(
            0 < self.blur_sigma_min <= self.blur_sigma_max,
            "blur sigmas must satisfy 0 < min <= max, "
            f"not {self.blur_sigma_min} and {self.blur_sigma_max}",
        )
        require(min(self.std) > 0, f"std must be above 0 in every channel, not {self.std}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Model: the encoder, its heads and the loss (section 3 of the paper)."""

    backbone: str = "resnet50"
    (
        "Encoder without its classifier: resnet10 (one block a stage), 18, 34, 50, 101 or 152; any "
        "other classification network of torchvision's, such as convnext_tiny or vit_b_16; or "
        "timm/NAME. The paper's recipe is for ResNets: with others, ViTs above all, it is untried."
    )
    stem: Stem = "imagenet"
    (
        "First layers of a ResNet: 7x7 stride 2 and max-pool, or (for 32-pixel images) 3x3 stride "
        "1, no pool. cifar-pad2 pads that by 2 pixels, as solo-learn does; cifar-no-relu has no "
        "ReLU after it, as lightly's CIFAR networks in an nn.Sequential: to go on from theirs."
    )
    width: int = 64
    """Channels of a ResNet's first stage; 64 is the standard network, less makes a narrow one."""
    projector_layers: int = 3
    """Layers of the projection MLP (3 for ImageNet, 2 for CIFAR-10)."""
    dim: int = 2048
    """Dimension of the projector's output."""
    projector_dim: int = 0
    """Width of the projector's hidden layers; 0 takes dim, as in the paper."""
    predictor_dim: int = 512
    """Hidden width of the predictor; the paper's bottleneck is a quarter of dim."""
    stop_gradient: bool = True
    (
        "Treat the other view's projection as a constant. "
        "Without it training collapses (the paper's Fig. 2)."
    )
    zero_init_residual: bool = True
    """Start each residual block as the identity: the scale of its last BN at 0."""

    def __post_init__(self) -> None:
        for name in ("width", "dim", "predictor_dim", "projector_layers"):
            value = getattr(self, name)
            require(value >= 1, f"{name.replace('_', '-')} must be at least 1, not {value}")
        require(self.projector_dim >= 0, f"projector-dim must be 0 or more: {self.projector_dim}")
        stems = get_args(Stem)
        require(self.stem in stems, f"stem must be one of {', '.join(stems)}, not {self.stem!r}")
        require(
            self.is_own or (self.stem == "imagenet" and self.width == 64),
            f"stem and width are settings of {', '.join(OWN_BACKBONES)}: leave them out with "
            f"{self.backbone}",
        )

    @property
    def is_own(self) -> bool:
        """Whether the encoder is a ResNet of this package's, not torchvision's or timm's."""
        return self.backbone in OWN_BACKBONES


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """Optimisation, with a cosine schedule per step (section 3 and appendix A of the paper)."""

    epochs: int = 100
    """Passes over the data; the cosine ends here."""
    batch: int = 512
    """Global batch: images (each two views) of one optimizer step over all ranks."""
    optimizer: Literal["sgd", "lars"] = "sgd"
    (
        "sgd as in the paper, or lars (You et al. 2017) for batches of thousands: "
        "SimCLR takes --lr 0.3 --weight-decay 1e-6 --warmup-epochs 10; with rates like that "
        "--predictor-lr cosine is safer."
    )
    lr: float = 0.05
    """Base learning rate for a global batch of 256; scaled by batch / 256."""
    momentum: float = 0.9
    """Momentum of the steps."""
    weight_decay: float = 1e-4
    """Weight decay: sgd's is on every parameter (BN and biases too), lars's not on these."""
    lars_trust: float = 0.001
    """lars: share of its weights' norm by which a layer moves, times the rate, before momentum."""
    warmup_epochs: float = 0.0
    (
        "Epochs of linear warm-up; the paper uses 10 for batches of 1024 and more. "
        "The predictor is not warmed up."
    )
    predictor_lr: Literal["constant", "cosine"] = "constant"
    """Predictor's rate: constant (68.1 in the paper) or decaying with the rest (67.7)."""
    accumulate: int = 1
    (
        "Parts that each rank's share of the batch is cut into; "
        "gradients add up, BN sees batch / accumulate."
    )

    def __post_init__(self) -> None:
        require(self.epochs >= 1, f"epochs must be at least 1, not {self.epochs}")
        require(
            self.batch >= 2, f"batch must be at least 2 (BN needs two samples), not {self.batch}"
        )
        require(self.lr > 0, f"lr must be above 0, not {self.lr}")
        require(
            0 <= self.momentum < 1, f"momentum must be 0 or more and below 1, not {self.momentum}"
        )
        require(
            self.optimizer in ("sgd", "lars"),
            f"optimizer must be sgd or lars, not {self.optimizer!r}",
        )
        require(self.lars_trust > 0, f"lars-trust must be above 0, not {self.lars_trust}")
        require(self.weight_decay >= 0, f"weight-decay must be 0 or more, not {self.weight_decay}")
        require(
            0 <= self.warmup_epochs <= self.epochs,
            f"warmup-epochs must lie between 0 and epochs ({self.epochs}), "
            f"not {self.warmup_epochs}",
        )
        require(
            self.accumulate >= 1 and self.batch % self.accumulate == 0,
            f"batch {self.batch} cannot be cut into {self.accumulate} equal parts (accumulate)",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsConfig:
    """Numerics: what decides the last digits of a run."""

    seed: int = 0
    """Seed of the initial weights, the order of the images and their augmentations."""
    precision: Precision = "auto"
    (
        "Autocast type: bf16, fp16 (with loss scaling; GPU only), fp32; "
        "auto is bf16 where the hardware has it."
    )
    tf32: bool = True
    """On a GPU, let float32 matrix products and convolutions use TF32."""
    channels_last: bool = True
    """Keep images and activations in channels-last memory format."""
    sync_bn: bool = True
    """With several ranks, compute BN statistics over the global batch."""
    sync_bn_ranks: int = 0
    """Ranks in a row that share BN statistics, such as 8 for those of one machine; 0 is all."""

    def __post_init__(self) -> None:
        require(
            0 <= self.seed < 2**63, f"seed must be 0 or more and fit in 63 bits, not {self.seed}"
        )
        require(self.sync_bn_ranks >= 0, f"sync-bn-ranks must be 0 or more: {self.sync_bn_ranks}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """Step: how a training step is computed. Nothing here changes training but by rounding."""

    compile: Compile = "auto"
    (
        "Compile the model (torch.compile). It takes a minute or so when done for the first time; "
        "auto does it for runs of 1,000 steps and more."
    )
    batch_views: bool = True
    (
        "Compiled: take both views through the layers as one batch. "
        "BN normalises each by its own statistics, with this or without."
    )
    cuda_graphs: bool = False
    (
        "Compiled, on one GPU: record the kernels of a step and replay them, for models so small "
        "that starting kernels takes longer than running them."
    )
    activation_memory: float = 1.0
    (
        "Share of the activations to keep for the backward pass, which computes the others again: "
        "less memory, more time. Not compiled, below 1 keeps each residual block's input."
    )
    keep_memory: bool = True
    (
        "On a CPU, keep the memory of freed tensors for the next step: "
        "the system takes long to hand it out anew. What a run held at its peak stays with it."
    )
    bucket_mb: int = 25
    """Several ranks: MB of gradients to exchange at once, while the backward pass goes on."""

    def __post_init__(self) -> None:
        require(
            self.compile in get_args(Compile),
            f"compile must be auto, on or off, not {self.compile!r}",
        )
        require(
            0 <= self.activation_memory <= 1,
            f"activation-memory is a share, 0 to 1, not {self.activation_memory}",
        )
        require(self.bucket_mb >= 1, f"bucket-mb must be at least 1, not {self.bucket_mb}")
        require(
            not (self.cuda_graphs and self.compile == "off"),
            "cuda-graphs needs the compiled model: leave --compile off out",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """Monitoring: quality and collapse while the run goes on."""

    knn_every: int = 1
    (
        "Epochs between kNN evaluations (before the first epoch too); 0 turns them off. "
        "Needs train/ and val/ or test/."
    )
    knn_k: int = 200
    """Neighbours that vote (the authors' monitor: 200)."""
    knn_temperature: float = 0.2
    """Temperature of the votes' weights exp(similarity / T) (the authors' monitor: 0.2)."""
    eval_resize: int = 256
    """Shorter side, in pixels, before the central crop that evaluation takes."""
    on_collapse: Literal["warn", "stop"] = "warn"
    """What to do when the representation collapses."""

    def __post_init__(self) -> None:
        require(self.knn_every >= 0, f"knn-every must be 0 or more, not {self.knn_every}")
        require(self.knn_k >= 1, f"knn-k must be at least 1, not {self.knn_k}")
        require(
            self.knn_temperature > 0, f"knn-temperature must be above 0, not {self.knn_temperature}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Run: where it runs, what it leaves and when."""

    gpus: int = 1
    """GPUs of this machine to train on, one process each; with --device cpu, CPU processes."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes the GPU if there is one."""
    out: str = ""
    """Run folder. Default: runs/<time>-<recipe>."""
    init: str = ""
    (
        "Weights to start from, not fresh ones: a run, a checkpoint or a file of another program. "
        "Heads that it lacks or that differ in size start fresh."
    )
    resume: str = "auto"
    (
        "auto goes on where the run folder's last checkpoint was; "
        "never starts anew; or a checkpoint's path."
    )
    log_every: int = 50
    """Steps between two lines of metrics."""
    save_every: int = 1000
    """Steps between two checkpoints; a killed run repeats at most so many."""
    max_steps: int = 0
    """Stop after this many steps, with the schedule of the full run; 0 is no limit."""

    def __post_init__(self) -> None:
        for name in ("gpus", "log_every", "save_every"):
            value = getattr(self, name)
            require(value >= 1, f"{name.replace('_', '-')} must be at least 1, not {value}")
        require(self.max_steps >= 0, f"max-steps must be 0 or more, not {self.max_steps}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """All settings of a training run."""

    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    step: StepConfig = field(default_factory=StepConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        require(
            not (self.step.cuda_graphs and self.optim.accumulate > 1),
            "cuda-graphs does not go with accumulate: a replay would overwrite the first part's "
            "gradients",
        )
        require(
            self.monitor.eval_resize >= self.augment.crop,
            f"eval-resize ({self.monitor.eval_resize}) must not be smaller than "
            f"crop ({self.augment.crop})",
        )
        # torch's bfloat16 convolution leaves its gradient unset for one pixel at stride 2 on a CPU.
        smallest = 17 if self.model.stem == "imagenet" else 5
        require(
            self.augment.crop >= smallest or not self.model.is_own,
            f"crop {self.augment.crop} is too small for the {self.model.stem} stem, whose last "
            f"stage would see one pixel; use {smallest} or more"
            + (" or --stem cifar" if smallest > 5 else ""),
        )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return plain nested dictionaries, as config.json and checkpoints hold them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, sections: dict[str, dict[str, Any]]) -> TrainConfig:
        """Rebuild from ``to_dict``'s result; ``ValueError`` for a section or field unknown here."""
        types = get_type_hints(cls)
        parts = {}
        for name, values in sections.items():
            known = {f.name for f in fields(types[name])} if name in types else set()
            unknown = sorted(set(values) - known)
            require(not unknown, f"unknown setting {name}.{unknown[0] if unknown else ''}")
            parts[name] = types[name](
                **{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
            )
        return cls(**parts)


FIXED_SECTIONS = ("augment", "model", "optim", "numerics")
"""Sections that define what is trained. The others say how it is run and may change on resume."""


def differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    """List the settings in which two runs train something different, as ``name: old -> new``."""
    return [
        f"{f.name.replace('_', '-')}: {before} -> {after}"
        for section in FIXED_SECTIONS
        for f in fields(getattr(old, section))
        if (before := getattr(getattr(old, section), f.name))
        != (after := getattr(getattr(new, section), f.name))
    ]
