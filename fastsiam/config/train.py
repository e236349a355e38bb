"""Every setting of a run, as frozen dataclasses: defaults, meaning, validation.

A setting is written once, as ``fastsiam.config.setting`` has it: ``fastsiam.cli.options`` makes the
command line's options out of these classes. A value that makes no sense raises ``ValueError`` here,
before torch is imported or a worker starts: standard library only.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from .checks import require
from .data import DataConfig
from .model import ModelConfig
from .nodes import NodesConfig
from .older import upgraded
from .plain import from_plain
from .setting import Config, setting
from .views import AugmentConfig, usual_resize

Precision = Literal["auto", "bf16", "fp16", "fp32"]
Compile = Literal["auto", "on", "off"]
TRACKERS = ("tensorboard", "wandb", "mlflow")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig(Config):
    """Optimiser: its steps, and their cosine schedule (section 3 of the paper)."""

    epochs: int = setting(
        100,
        "Passes over the data; the cosine ends here. --extend makes a run longer that has begun.",
        at_least=1,
    )
    batch: int = setting(
        512,
        "Global batch: images (each all its views) of one optimizer step over all ranks.",
        at_least=2,
    )
    optimizer: Literal["sgd", "lars"] = setting(
        "sgd",
        "sgd as in the paper, or lars (You et al. 2017) for batches of thousands: "
        "SimCLR takes --lr 0.3 --weight-decay 1e-6 --warmup-epochs 10; with rates like that "
        "--predictor-lr cosine is safer.",
    )
    lr: float = setting(
        0.05, "Base learning rate for a global batch of 256; scaled by batch / 256.", above=0
    )
    momentum: float = setting(0.9, "Momentum of the steps.", at_least=0, below=1)
    weight_decay: float = setting(
        1e-4,
        "Weight decay: sgd's is on every parameter (BN and biases too), lars's not on these.",
        at_least=0,
    )
    lars_trust: float = setting(
        0.001,
        "lars: share of its weights' norm by which a layer moves, times the rate, before momentum.",
        above=0,
        option=False,
    )
    lars_all: bool = setting(
        False,
        "lars: scale and decay all parameters alike, BN and biases too, as SwAV does.",
        option=False,
    )
    warmup_epochs: float = setting(
        0.0,
        "Epochs of linear warm-up; the paper uses 10 for batches of 1024 and more. "
        "The predictor is not warmed up.",
        at_least=0,
    )
    warmup_from: float = setting(
        0.0,
        "Share of the peak rate from which the warm-up rises.",
        at_least=0,
        below=1,
        option=False,
    )
    lr_end: float = setting(
        0.0,
        "Share of the peak rate to which the cosine falls.",
        at_least=0,
        below=1,
        option=False,
    )
    restarts: str = setting(
        "",
        "Where the cosine restarts from its last rate, as EPOCHS@STEP,...: until that step it "
        "was to end with these epochs. --extend-schedule restart writes it.",
        option=False,
    )
    accumulate: int = setting(
        1,
        "Parts that each rank's share of the batch is cut into; "
        "gradients add up. BN, SimCLR's negatives and SwAV's assignments see batch / accumulate.",
        at_least=1,
    )

    def check(self) -> None:
        """Refuse settings that contradict each other."""
        require(
            self.warmup_epochs <= self.epochs,
            f"warmup-epochs must be at most epochs ({self.epochs}), not {self.warmup_epochs}",
        )
        require(
            self.batch % self.accumulate == 0,
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
class NumericsConfig(Config):
    """Numerics: what decides the last digits of a run."""

    seed: int = setting(
        0,
        "Seed of the initial weights, the order of the images and their augmentations.",
        at_least=0,
    )
    precision: Precision = setting(
        "auto",
        "Autocast type: bf16, fp16 (with loss scaling; GPU only), fp32. auto is as the run began; "
        "else bf16 on a GPU that computes in it (others fp16) and on a CPU with AMX (others fp32: "
        "bf16 without AMX is slower).",
    )
    tf32: bool = setting(
        True, "On a GPU, let float32 matrix products and convolutions use TF32.", option=False
    )
    channels_last: bool = setting(
        True, "Keep images and activations in channels-last memory format."
    )
    sync_bn: bool = setting(
        True, "With several ranks, compute BN statistics over the global batch."
    )
    sync_bn_ranks: int = setting(
        0,
        "Ranks in a row that share BN statistics, such as 8 for those of one machine; 0 is all.",
        at_least=0,
    )
    bn_images: int = setting(
        0,
        "Images in a row that share BN statistics, such as 32 of a rank's 256, as if they were on "
        "ranks of their own: MoCo needs it on few GPUs. Goes with --no-sync-bn. 0: a rank's all.",
        at_least=0,
    )

    def check(self) -> None:
        """Refuse settings that contradict each other."""
        require(self.seed < 2**63, f"seed must fit in 63 bits, not {self.seed}")
        require(self.bn_images != 1, "bn-images must be at least 2, or 0, not 1")
        require(
            not (self.bn_images and self.sync_bn),
            "bn-images is of images on one rank: add --no-sync-bn",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig(Config):
    """Step: how a training step is computed. Nothing here changes training but by rounding."""

    compile: Compile = setting(
        "auto",
        "Compile the model (torch.compile). It takes a minute or so when done for the first time; "
        "auto does it for runs of 1,000 steps and more; a resumed run continues as it began.",
    )
    cuda_graphs: bool = setting(
        False,
        "Compiled, on one GPU: record the kernels of a step and replay them, for models so small "
        "that starting kernels takes longer than running them.",
    )
    activation_memory: float = setting(
        1.0,
        "Share of the activations to keep for the backward pass, which computes the others again: "
        "less memory, more time. Not compiled, below 1 keeps each residual block's input.",
        at_least=0,
        at_most=1,
    )

    def check(self) -> None:
        """Refuse settings that contradict each other."""
        require(
            not (self.cuda_graphs and self.compile == "off"),
            "cuda-graphs needs the compiled model: leave --compile off out",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig(Config):
    """Monitoring: quality and collapse while the run trains."""

    knn_every: int = setting(
        1,
        "Epochs between kNN evaluations; 0 turns them off. "
        "Needs train/ and val/ or test/, or --holdout.",
        at_least=0,
    )
    knn_first: bool = setting(
        True,
        "Evaluate before the first epoch too, which reads the whole training set once more.",
        option=False,
    )
    knn_k: int = setting(
        200, "Neighbours that vote (the authors' monitor: 200).", at_least=1, option=False
    )
    knn_temperature: float = setting(
        0.2,
        "Temperature of the votes' weights exp(similarity / T) (the authors' monitor: 0.2).",
        above=0,
        option=False,
    )
    eval_resize: int = setting(
        0,
        "Shorter side, in pixels, before the central crop that evaluation takes. 0 is 256 / 224 of "
        "the crop, and for crops of up to 64 pixels, as of CIFAR, the crop itself.",
        at_least=0,
        option=False,
    )
    on_collapse: Literal["warn", "stop"] = setting(
        "warn",
        "What to do when the representation collapses. On GPUs it is known some steps later, "
        "so stop takes these too.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(NodesConfig):
    """Run: where it runs, what it leaves and when."""

    gpus: int = setting(
        1,
        "GPUs of this machine to train on, one process each; with --device cpu, CPU processes.",
        at_least=1,
    )
    device: Literal["auto", "cuda", "cpu"] = setting("auto", "auto takes the GPU if there is one.")
    rank_timeout: float = setting(
        120.0,
        "Several ranks: seconds that one waits for the others in an exchange before the run ends "
        "with an error. Reading the data and compiling are included, where one is slower.",
        above=0,
    )
    max_restarts: int = setting(
        0,
        "Several ranks: how often each machine restarts its ranks, from the last checkpoint, after "
        "one of them failed, was killed or hung, or a machine was lost.",
        at_least=0,
    )
    numa_binding: bool = setting(
        True,
        "Several GPUs: keep each process on the cores (the NUMA node) beside its GPU.",
        option=False,
    )
    out: str = setting("", "Run folder. Default: runs/<time>-<recipe>.")
    init: str = setting(
        "",
        "Weights to start from, not fresh ones: a run, a checkpoint or a file of another program. "
        "Heads that it lacks or that differ in size start fresh.",
    )
    resume: str = setting(
        "auto",
        "auto resumes from the run folder's last checkpoint; never starts a new run; the path of a "
        "run or a checkpoint resumes there, with its settings. With --out it branches off into "
        "another folder, with other optimizer settings if given.",
    )
    extend: int = setting(
        0,
        "Continue until so many epochs in all, more than the run was begun with: --extend 40 makes "
        "a run of 20 one of 40.",
        at_least=0,
    )
    extend_schedule: Literal["whole", "restart"] = setting(
        "whole",
        "Learning rate of an extended run: whole is one cosine over all its epochs, to which the "
        "rate jumps up; restart is a cosine from the last rate to lr_end over the epochs left.",
    )
    data_changed: Literal["refuse", "accept"] = setting(
        "refuse",
        "What a resumed run does if its data lost or gained files since it started: refuse, or "
        "accept once for this change. The images that are left keep their order and "
        "augmentations, others of them replace missing ones, and new ones are not used.",
    )
    tracker: str = setting(
        "tensorboard",
        "Where figures go beside metrics.jsonl: tensorboard, wandb, mlflow, several as a,b; or "
        "none. These programs' own variables choose project, experiment and server "
        "(WANDB_PROJECT, WANDB_MODE, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...).",
    )
    log_every: int = setting(50, "Steps between two lines of metrics.", at_least=1)
    save_every: int = setting(
        1000, "Steps between two checkpoints; a killed run repeats at most so many.", at_least=1
    )
    max_steps: int = setting(
        0,
        "Stop after this many steps, with the schedule of the full run; 0 is no limit.",
        at_least=0,
    )

    def check(self) -> None:
        """Refuse machines that cannot meet, and unknown trackers."""
        NodesConfig.check(self)
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
class TrainConfig(Config):
    """All settings of a training run."""

    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    step: StepConfig = field(default_factory=StepConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def check(self) -> None:
        """Refuse settings that contradict each other."""
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
        views = len(self.augment.views)
        require(views >= 2, f"views must be at least 2, not {views}")
        self.model.method.check_views(views)

    @property
    def eval_resize(self) -> int:
        """Shorter side in pixels before the central crop, with what 0 means filled in."""
        return self.monitor.eval_resize or usual_resize(self.augment.crop)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return plain nested dictionaries, as config.json and checkpoints hold them."""
        sections = asdict(self)
        method = {"name": self.model.method.name}
        sections["model"]["method"] = method | sections["model"]["method"]
        return sections

    @classmethod
    def from_dict(cls, sections: dict[str, dict[str, Any]]) -> TrainConfig:
        """Rebuild from ``to_dict``'s result, today's or that of an older version.

        Raises:
            ValueError: a section or a field is unknown here, or a value makes no sense.
        """
        config: TrainConfig = from_plain(cls, upgraded(sections))
        return config
