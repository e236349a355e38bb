"""Settings of a training run. A value that is not allowed raises ``ValueError``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, Self, get_type_hints

from .data import DataConfig
from .methods import METHOD_CONFIGS, SimSiamConfig
from .model import ModelConfig
from .run import RunConfig
from .setting import Config, Setting, as_text, convert_value, require, setting, settings_of
from .views import AugmentConfig, ViewConfig, usual_resize

Precision = Literal["auto", "bf16", "fp16", "fp32"]
Compile = Literal["auto", "on", "off"]
REMOVED = ("restarts", "extend_schedule", "batch_views", "keep_memory", "bucket_mb")
"""Settings of version 0.2 that are ignored. They change results by rounding at most, except
``restarts``: ``fastsiam.run.checkpoint`` does not resume a run with that schedule."""
FIXED_SECTIONS = ("augment", "model", "optim", "numerics")
"""Sections that define what is trained. The others say how it is run and may change on resume."""
FIXED_DATA_SETTINGS = ("weights", "holdout", "shuffle", "exif", "alpha", "image_column")
"""Settings in the section ``data`` that also define what is trained."""
BRANCH_SETTINGS = (
    "epochs", "lr", "momentum", "weight_decay", "lars_trust", "lars_all", "warmup_epochs",
    "warmup_from", "lr_end", "accumulate", "predictor_lr",
)  # fmt: skip
"""Fixed settings that a branch of a run may change. Weights, momenta and the number of finished
steps keep their meaning, which they would not with another batch size or optimizer."""
_OTHER_OPTIONS = {"recipe", "config", "assignments", "set", "help", "help_all"}
"""Names of the options of ``train`` that are not settings, which a setting cannot have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig(Config):
    """Optimizer: batch, learning rate and its cosine schedule (section 3 of the paper)."""

    epochs: int = setting(
        100,
        "Number of epochs, and length of the cosine schedule of the learning rate. --extend "
        "lengthens a run.",
        at_least=1,
    )
    batch: int = setting(
        512, "Global batch size: images (each with all views) per optimizer step.", at_least=2
    )
    optimizer: Literal["sgd", "lars"] = setting(
        "sgd",
        "sgd: as in the paper. lars: for batches of thousands of images; SimCLR uses it with "
        "--lr 0.3 --weight-decay 1e-6 --warmup-epochs 10, and SimSiam is then safer with "
        "--predictor-lr cosine.",
    )
    lr: float = setting(
        0.05, "Learning rate for a batch of 256; the peak rate is lr x batch / 256.", above=0
    )
    momentum: float = setting(0.9, "Momentum of the optimizer.", at_least=0, below=1, option=False)
    weight_decay: float = setting(
        1e-4, "Weight decay, for all parameters; with lars not for BN and biases.", at_least=0
    )
    lars_trust: float = setting(
        0.001,
        "lars: trust coefficient, a layer's update relative to the norm of its weights.",
        above=0,
        option=False,
    )
    lars_all: bool = setting(
        False, "lars: scale and decay BN and biases like the weights, as SwAV does.", option=False
    )
    warmup_epochs: float = setting(
        0.0,
        "Epochs of linear warm-up of the learning rate (paper: 10 for batches of 1024 and more). A "
        "constant predictor rate has no warm-up.",
        at_least=0,
    )
    warmup_from: float = setting(
        0.0,
        "Share of the peak rate at which the warm-up starts.",
        at_least=0,
        below=1,
        option=False,
    )
    lr_end: float = setting(
        0.0, "Share of the peak rate at which the cosine ends.", at_least=0, below=1, option=False
    )
    accumulate: int = setting(
        1,
        "Split each rank's batch into this many micro-batches and accumulate their gradients, to "
        "save memory. BN, SimCLR's negatives and SwAV's assignments see one of them at a time.",
        at_least=1,
    )

    def check(self) -> None:
        """Raise ``ValueError`` if settings contradict each other."""
        require(
            self.warmup_epochs <= self.epochs,
            f"warmup-epochs must be at most epochs ({self.epochs}), not {self.warmup_epochs}",
        )
        require(
            self.batch % self.accumulate == 0,
            f"batch {self.batch} is not divisible by accumulate {self.accumulate}",
        )

    def micro_batch(self, ranks: int) -> int:
        """Return the number of images that each of several ranks processes at a time."""
        return self.batch // (ranks * self.accumulate)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsConfig(Config):
    """Numerics: seed, precision and BN statistics."""

    seed: int = setting(
        0, "Seed of the initial weights, image order and augmentations.", at_least=0, below=2**63
    )
    precision: Precision = setting(
        "auto",
        "Autocast dtype; fp16 needs a GPU. auto: bf16 on a GPU that supports it, else fp16; on a "
        "CPU bf16 with AMX, else fp32. A resumed run keeps its dtype.",
    )
    tf32: bool = setting(
        True, "On a GPU, use TF32 for float32 matrix products and convolutions.", option=False
    )
    channels_last: bool = setting(
        True,
        "Keep images, weights and activations in channels-last memory format.",
        option=False,
    )
    sync_bn: bool = setting(
        True, "With several ranks, compute BN statistics over the global batch."
    )
    sync_bn_ranks: int = setting(
        0,
        "Number of consecutive ranks that share BN statistics, such as the 8 of a machine; 0: all.",
        at_least=0,
    )
    bn_images: int = setting(
        0,
        "Number of images on a rank that share BN statistics, such as 32, as if each group had its "
        "own GPU. MoCo needs this. Requires --no-sync-bn. 0: all.",
        at_least=0,
    )

    def check(self) -> None:
        """Raise ``ValueError`` if settings contradict each other."""
        require(self.bn_images != 1, "bn-images must be at least 2, or 0, not 1")
        require(
            not (self.bn_images and self.sync_bn),
            f"bn-images {self.bn_images} needs --no-sync-bn; for --sync-bn, pass --bn-images 0",
        )

    def check_given(self, given: Collection[str]) -> None:
        """Raise if ``sync_bn_ranks`` is given without ``sync_bn``."""
        require(
            self.sync_bn or not (self.sync_bn_ranks and "sync_bn_ranks" in given),
            f"sync-bn-ranks {self.sync_bn_ranks} needs --sync-bn",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig(Config):
    """Step: how a training step is computed; affects results only by rounding."""

    compile: Compile = setting(
        "auto",
        "Use torch.compile, which takes about a minute the first time. auto: on for runs of at "
        "least 1,000 steps; a resumed run keeps its setting.",
    )
    cuda_graphs: bool = setting(
        False,
        "Replay each step as a CUDA graph, for small models whose kernels take longer to launch "
        "than to run. Requires the compiled model and one GPU.",
    )
    activation_memory: float = setting(
        1.0,
        "Share of the activations to keep for the backward pass; the others are recomputed, which "
        "saves memory and takes time. Without torch.compile, any value below 1 keeps only the "
        "input of each residual block.",
        at_least=0,
        at_most=1,
    )

    def check(self) -> None:
        """Raise ``ValueError`` if settings contradict each other."""
        require(
            not (self.cuda_graphs and self.compile == "off"), "cuda-graphs needs the compiled model"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig(Config):
    """Monitoring: kNN accuracy and collapse during training."""

    knn_every: int = setting(
        1,
        "Epochs between kNN evaluations, which need val/, test/ or --holdout; 0: none.",
        at_least=0,
    )
    knn_first: bool = setting(
        True,
        "Also evaluate before the first epoch, which reads the training set one more time.",
        option=False,
    )
    knn_k: int = setting(
        200, "Number of neighbours in the kNN evaluation.", at_least=1, option=False
    )
    knn_temperature: float = setting(
        0.2, "Temperature T of the kNN vote weights exp(similarity / T).", above=0, option=False
    )
    eval_resize: int = setting(
        0,
        "Shorter side in pixels before the central crop of evaluations. 0: crop x 256 / 224, or "
        "the crop itself if it is at most 64 pixels (CIFAR).",
        at_least=0,
        option=False,
    )
    on_collapse: Literal["warn", "stop"] = setting(
        "warn",
        "What to do if the representation collapses: warn, or stop. On a GPU either happens some "
        "steps later.",
    )

    def evaluates_after(self, epoch: int, epochs: int) -> bool:
        """Return whether a kNN evaluation follows an epoch. ``knn_every`` must not be 0.

        Args:
            epoch: number of the epoch, from 1; 0 means before training.
            epochs: number of the last epoch.
        """
        if not epoch:
            return self.knn_first
        return epoch % self.knn_every == 0 or epoch == epochs


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
        """Raise ``ValueError`` if settings contradict each other."""
        require(
            not (self.step.cuda_graphs and self.optim.accumulate > 1),
            "cuda-graphs cannot be combined with accumulate",
        )
        require(
            self.eval_resize >= self.augment.crop,
            f"eval-resize ({self.eval_resize}) must be at least crop ({self.augment.crop})",
        )
        smallest, side = self.model.smallest_crop, min(view.crop for view in self.augment.views)
        require(
            side >= smallest,
            f"crop {side} is too small for the {self.model.stem} stem; use {smallest} or more"
            + ("" if self.model.stem == "cifar" else ", or --stem cifar"),
        )
        views = len(self.augment.views)
        require(views >= 2, f"views must be at least 2, not {views}")
        self.model.method.check_views(views)

    def check_given(self, given: Collection[str]) -> None:
        """Raise if a setting that the user passed has no effect."""
        for section in fields(self):
            getattr(self, section.name).check_given(given)

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> Self:
        """Build it from values by name, which may be text. Missing ones get their defaults.

        Raises:
            ValueError: a value is not allowed, or belongs to another method.
        """
        kinds = get_type_hints(cls).items()
        return cls(**{section: kind.from_flags(flags) for section, kind in kinds})

    def flags_by_section(self) -> dict[str, dict[str, Any]]:
        """Return the values of all settings by section and name."""
        return {section.name: getattr(self, section.name).to_flags() for section in fields(self)}

    def to_flags(self) -> dict[str, Any]:
        """Return the values of all settings by name; if views differ, as text ``a,b``."""
        return {k: v for section in self.flags_by_section().values() for k, v in section.items()}

    @property
    def eval_resize(self) -> int:
        """Shorter side in pixels before the central crop, with the default filled in."""
        return self.monitor.eval_resize or usual_resize(self.augment.crop)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return nested dictionaries, as stored in config.json and checkpoints."""
        sections = asdict(self)
        method = {"name": self.model.method.name}
        sections["model"]["method"] = method | sections["model"]["method"]
        return sections

    @classmethod
    def from_dict(cls, sections: Mapping[str, Any]) -> TrainConfig:
        """Rebuild the settings from the result of ``to_dict``, also of version 0.2.

        Raises:
            ValueError: a section or a field is unknown, or a value is not allowed.
        """
        known_sections = {}
        for section, values in convert_value(dict, sections, "").items():
            values = convert_value(dict, values, section)
            known_sections[section] = {name: x for name, x in values.items() if name not in REMOVED}
        if model := known_sections.get("model"):
            require("method" in model, "it was written by fastsiam 0.1, which is too old")
            method = dict(convert_value(dict, model["method"], "model.method"))
            if (name := str(method.pop("name", ""))) not in METHOD_CONFIGS:
                raise ValueError(
                    f"unknown method {name!r}; start the program that registers it instead of "
                    "fastsiam (docs/develop/add-a-method.md)"
                )
            model["method"] = convert_value(METHOD_CONFIGS[name], method, "model.method")
        config: TrainConfig = convert_value(cls, known_sections, "")
        return config


def all_settings(method: str = SimSiamConfig.name) -> list[Setting]:
    """Return all settings of a training run with a method, and those that only other methods have.

    If several of the other methods share a name, their settings of this name are all returned.

    Raises:
        ValueError: a method has a setting of the same name as another section or an option.
    """
    method_settings = settings_of(METHOD_CONFIGS[method])
    of_methods = {name for kind in METHOD_CONFIGS.values() for name in settings_of(kind)}
    for name in _OTHER_OPTIONS & of_methods:
        raise ValueError(f"a method cannot have a setting {name}: the command has such an option")
    settings: list[Setting] = []
    for kind in get_type_hints(TrainConfig).values():
        common = [*settings_of(kind).values()]
        if kind is AugmentConfig:
            common += settings_of(ViewConfig).values()
        for one in common:
            require(
                one.name not in of_methods,
                f"a method cannot have a setting {one.name}: {kind.__name__} has one",
            )
        settings += common
        if kind is ModelConfig:
            names = ", ".join(METHOD_CONFIGS)  # also of methods that a user registered
            settings[-1] = replace(settings[-1], help=f"{settings[-1].help[:-1]}: {names}.")
            settings += method_settings.values()
            for other in map(settings_of, METHOD_CONFIGS.values()):
                settings += [
                    x for x in other.values() if x.name not in method_settings and x not in settings
                ]
    return settings


def train_settings() -> dict[str, Setting]:
    """Return all settings by name; for a name that several methods share, the first option.

    Raises:
        ValueError: only one of two methods' settings of the same name is a bool.
    """
    settings: dict[str, Setting] = {}
    for one in all_settings():
        known = settings.setdefault(one.name, one)
        require(
            (one.kind is bool) == (known.kind is bool),
            f"a method cannot have a setting {one.name}: another method's is of another type",
        )
        if one.option and not known.option:
            settings[one.name] = one
    return settings


def as_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Return the values of ``TrainConfig.to_flags`` as command-line arguments."""
    words = []
    for one in train_settings().values():
        value = flags.get(one.name)
        if one.name == "mixed_with":
            words += [word for item in value or () for word in ("--data", item)]
        elif isinstance(value, bool) and one.option:
            words.append(f"--{one.flag}" if value else f"--no-{one.flag}")
        elif value is not None:
            text = as_text(value)
            words += [f"--{one.flag}", text] if one.option else ["--set", f"{one.name}={text}"]
    return words


def differences(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return the differing settings that define what is trained, as ``{name: (old, new)}``."""
    changes = {}
    for section in (*FIXED_SECTIONS, "data"):
        before, after = getattr(old, section).to_flags(), getattr(new, section).to_flags()
        for name in FIXED_DATA_SETTINGS if section == "data" else before | after:
            if before.get(name) != after.get(name):
                changes[name] = before.get(name), after.get(name)
    if bool(old.data.mixed_with) != bool(new.data.mixed_with):  # a mixture has another order
        changes["mixed_with"] = old.data.mixed_with, new.data.mixed_with
    if not old.data.has_same_root(new.data):
        changes.pop("image_column", None)  # other files may be in another format
    return changes


def changes_text(changed: Mapping[str, tuple[Any, Any]], *, between: str = "; ") -> str:
    """Format the result of ``differences`` for messages."""
    return between.join(
        f"{name.replace('_', '-')}: {as_text(old) or 'none'} -> {as_text(new) or 'none'}"
        for name, (old, new) in changed.items()
    )
