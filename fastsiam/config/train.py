"""Every setting of a run, as frozen dataclasses: defaults, meaning, validation.

The literal below a field is its documentation; ``fastsiam.cli.options`` makes the command line's
options and their help out of these classes, so a setting is written once. A value that makes no
sense raises ``ValueError`` here, before torch is imported or a worker starts: standard library
only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, get_args

from .checks import require, require_at_least_one
from .data import DataConfig
from .model import ModelConfig
from .nodes import NodesConfig
from .older import upgraded
from .plain import from_plain, to_plain
from .views import AugmentConfig, usual_resize

Precision = Literal["auto", "bf16", "fp16", "fp32"]
Compile = Literal["auto", "on", "off"]
TRACKERS = ("tensorboard", "wandb", "mlflow")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """Optimiser: its steps, and their cosine schedule (section 3 of the paper)."""

    epochs: int = 100
    """Passes over the data; the cosine ends here. --extend makes a run longer that has begun."""
    batch: int = 512
    """Global batch: images (each all its views) of one optimizer step over all ranks."""
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
    lars_all: bool = False
    """lars: scale and decay all parameters alike, BN and biases too, as SwAV does."""
    warmup_epochs: float = 0.0
    (
        "Epochs of linear warm-up; the paper uses 10 for batches of 1024 and more. "
        "The predictor is not warmed up."
    )
    warmup_from: float = 0.0
    """Share of the peak rate from which the warm-up rises."""
    lr_end: float = 0.0
    """Share of the peak rate to which the cosine falls."""
    restarts: str = ""
    (
        "Where the cosine starts anew from its last rate, as EPOCHS@STEP,...: until that step it "
        "was to end with these epochs. --extend-schedule restart writes it."
    )
    accumulate: int = 1
    (
        "Parts that each rank's share of the batch is cut into; "
        "gradients add up. BN, SimCLR's negatives and SwAV's assignments see batch / accumulate."
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
        for name in ("warmup_from", "lr_end"):
            value, flag = getattr(self, name), name.replace("_", "-")
            require(0 <= value < 1, f"{flag} is a share, 0 to below 1, not {value}")
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
        _check_restarts(self.restarts, self.epochs)

    @property
    def before_restart(self) -> tuple[OptimConfig, int] | None:
        """The settings until the last restart of the cosine, and its step; None without one."""
        if not self.restarts:
            return None
        earlier, _, last = self.restarts.rpartition(",")
        epochs, _, step = last.partition("@")
        return replace(self, epochs=int(epochs), restarts=earlier), int(step)


def _check_restarts(restarts: str, epochs: int) -> None:
    """Refuse restarts that are no numbers, or do not follow one another."""
    points = re.findall(r"(\d+)@(\d+)", restarts)
    ends = [*(int(end) for end, _ in points), epochs]
    steps = [0, *(int(step) for _, step in points)]
    require(
        restarts == ",".join(f"{end}@{step}" for end, step in points)
        and all(x < y for row in (ends, steps) for x, y in pairwise(row)),
        f"restarts must be EPOCHS@STEP,..., growing, the epochs up to {epochs}: {restarts!r}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsConfig:
    """Numerics: what decides the last digits of a run."""

    seed: int = 0
    """Seed of the initial weights, the order of the images and their augmentations."""
    precision: Precision = "auto"
    (
        "Autocast type: bf16, fp16 (with loss scaling; GPU only), fp32. auto is as the run began; "
        "else bf16 on a GPU that computes in it (others fp16) and on a CPU with AMX (others fp32: "
        "bf16 without AMX is slower)."
    )
    tf32: bool = True
    """On a GPU, let float32 matrix products and convolutions use TF32."""
    channels_last: bool = True
    """Keep images and activations in channels-last memory format."""
    sync_bn: bool = True
    """With several ranks, compute BN statistics over the global batch."""
    sync_bn_ranks: int = 0
    """Ranks in a row that share BN statistics, such as 8 for those of one machine; 0 is all."""
    bn_images: int = 0
    (
        "Images in a row that share BN statistics, such as 32 of a rank's 256, as if they were on "
        "ranks of their own: MoCo needs it on few GPUs. Goes with --no-sync-bn. 0: a rank's all."
    )

    def __post_init__(self) -> None:
        require(
            0 <= self.seed < 2**63, f"seed must be 0 or more and fit in 63 bits, not {self.seed}"
        )
        require(self.sync_bn_ranks >= 0, f"sync-bn-ranks must be 0 or more: {self.sync_bn_ranks}")
        require(
            self.bn_images == 0 or self.bn_images >= 2,
            f"bn-images must be 2 or more, or 0, not {self.bn_images}",
        )
        require(
            not (self.bn_images and self.sync_bn),
            "bn-images is of images on one rank: add --no-sync-bn",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """Step: how a training step is computed. Nothing here changes training but by rounding."""

    compile: Compile = "auto"
    (
        "Compile the model (torch.compile). It takes a minute or so when done for the first time; "
        "auto does it for runs of 1,000 steps and more; a resumed run goes on as it began."
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

    def __post_init__(self) -> None:
        require(
            self.compile in get_args(Compile),
            f"compile must be auto, on or off, not {self.compile!r}",
        )
        require(
            0 <= self.activation_memory <= 1,
            f"activation-memory is a share, 0 to 1, not {self.activation_memory}",
        )
        require(
            not (self.cuda_graphs and self.compile == "off"),
            "cuda-graphs needs the compiled model: leave --compile off out",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """Monitoring: quality and collapse while the run goes on."""

    knn_every: int = 1
    (
        "Epochs between kNN evaluations; 0 turns them off. "
        "Needs train/ and val/ or test/, or --holdout."
    )
    knn_first: bool = True
    """Evaluate before the first epoch too, which reads the whole training set once more."""
    knn_k: int = 200
    """Neighbours that vote (the authors' monitor: 200)."""
    knn_temperature: float = 0.2
    """Temperature of the votes' weights exp(similarity / T) (the authors' monitor: 0.2)."""
    eval_resize: int = 0
    (
        "Shorter side, in pixels, before the central crop that evaluation takes. 0 is 256 / 224 of "
        "the crop, and for crops of up to 64 pixels, as of CIFAR, the crop itself."
    )
    on_collapse: Literal["warn", "stop"] = "warn"
    (
        "What to do when the representation collapses. On GPUs it is known some steps later, "
        "so stop takes these too."
    )

    def __post_init__(self) -> None:
        require(self.knn_every >= 0, f"knn-every must be 0 or more, not {self.knn_every}")
        require(self.eval_resize >= 0, f"eval-resize must be 0 or more, not {self.eval_resize}")
        require(self.knn_k >= 1, f"knn-k must be at least 1, not {self.knn_k}")
        require(
            self.knn_temperature > 0, f"knn-temperature must be above 0, not {self.knn_temperature}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(NodesConfig):
    """Run: where it runs, what it leaves and when."""

    gpus: int = 1
    """GPUs of this machine to train on, one process each; with --device cpu, CPU processes."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes the GPU if there is one."""
    rank_timeout: float = 120.0
    (
        "Several ranks: seconds that one waits for the others in an exchange before the run ends "
        "with an error. Reading the data and compiling are included, where one is slower."
    )
    grace: float = 0.0
    (
        "Seconds from a signal to stop (SIGTERM, SIGUSR1, ...) until the program is gone: when "
        "they are over it leaves without saving, before a scheduler kills it. 0 is no limit."
    )
    max_restarts: int = 0
    (
        "Several ranks: how often each machine restarts its ranks, from the last checkpoint, after "
        "one of them failed, was killed or hung, or a machine was lost."
    )
    numa_binding: bool = True
    """Several GPUs: keep each process on the cores (the NUMA node) beside its GPU."""
    out: str = ""
    """Run folder. Default: runs/<time>-<recipe>."""
    init: str = ""
    (
        "Weights to start from, not fresh ones: a run, a checkpoint or a file of another program. "
        "Heads that it lacks or that differ in size start fresh."
    )
    resume: str = "auto"
    (
        "auto goes on where the run folder's last checkpoint was; never starts anew; a run or a "
        "checkpoint of one goes on there, with its settings. With --out it branches off into "
        "another folder, with other optimizer settings if given."
    )
    extend: int = 0
    (
        "Go on until so many epochs in all, more than the run was begun with: --extend 40 makes "
        "a run of 20 one of 40."
    )
    extend_schedule: Literal["whole", "restart"] = "whole"
    (
        "Learning rate of an extended run: whole is one cosine over all its epochs, to which the "
        "rate jumps up; restart is a cosine from the last rate to --lr-end over the epochs left."
    )
    data_changed: Literal["refuse", "accept"] = "refuse"
    (
        "What a run that goes on does if its data lost or gained files since it began: refuse, or "
        "accept once for this change. The images that are left keep their order and "
        "augmentations, others of them take the places of lost ones, new ones take no part."
    )
    tracker: str = "tensorboard"
    (
        "Where figures go beside metrics.jsonl: tensorboard, wandb, mlflow, several as a,b; or "
        "none. These programs' own variables choose project, experiment and server "
        "(WANDB_PROJECT, WANDB_MODE, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...)."
    )
    log_every: int = 50
    """Steps between two lines of metrics."""
    save_every: int = 1000
    """Steps between two checkpoints; a killed run repeats at most so many."""
    max_steps: int = 0
    """Stop after this many steps, with the schedule of the full run; 0 is no limit."""

    def __post_init__(self) -> None:
        require_at_least_one(self, "gpus", "log_every", "save_every")
        self.check_nodes()
        require(
            self.data_changed in ("refuse", "accept"),
            f"data-changed must be refuse or accept, not {self.data_changed!r}",
        )
        require(self.extend >= 0, f"extend must be 0 or more, not {self.extend}")
        require(
            self.extend_schedule in ("whole", "restart"),
            f"extend-schedule must be whole or restart, not {self.extend_schedule!r}",
        )
        require(self.max_steps >= 0, f"max-steps must be 0 or more, not {self.max_steps}")
        require(self.max_restarts >= 0, f"max-restarts must be 0 or more, not {self.max_restarts}")
        require(self.rank_timeout > 0, f"rank-timeout must be above 0, not {self.rank_timeout}")
        require(self.grace >= 0, f"grace must be 0 or more seconds, not {self.grace}")
        for name in self.trackers:
            require(
                name in TRACKERS,
                f"unknown tracker {name!r}; there are {', '.join(TRACKERS)}, and none for none",
            )

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names of the trackers, each once."""
        return () if self.tracker == "none" else tuple(dict.fromkeys(self.tracker.split(",")))


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
            self.eval_resize >= self.augment.crop,
            f"eval-resize ({self.eval_resize}) must not be smaller than crop "
            f"({self.augment.crop}); 0 follows the crop",
        )
        smallest, side = self.model.smallest_crop, min(view.crop for view in self.augment.views)
        require(
            side >= smallest,
            f"crop {side} is too small for the {self.model.stem} stem, whose last "
            f"stage would see one pixel; use {smallest} or more"
            + (" or --stem cifar" if smallest > 5 else ""),
        )
        self.model.method.check_views(len(self.augment.views))

    @property
    def eval_resize(self) -> int:
        """Shorter side in pixels before the central crop, with what 0 means filled in."""
        return self.monitor.eval_resize or usual_resize(self.augment.crop)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return plain nested dictionaries, as config.json and checkpoints hold them."""
        sections: dict[str, dict[str, Any]] = to_plain(self)
        return sections

    @classmethod
    def from_dict(cls, sections: dict[str, dict[str, Any]]) -> TrainConfig:
        """Rebuild from ``to_dict``'s result, today's or that of an older version.

        Raises:
            ValueError: a section or a field is unknown here, or a value makes no sense.
        """
        config: TrainConfig = from_plain(cls, upgraded(sections))
        return config
