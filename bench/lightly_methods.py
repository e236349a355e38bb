"""Methods built from lightly's components with a run's settings: networks, losses, steps, views.

The networks combine fastsiam's backbone with lightly's heads. Losses, views, momentum updates and
memory banks are lightly's, used as in its own examples. lightly's projectors for SimSiam, BYOL and
SwAV have a fixed number of layers. They are built from its ``ProjectionHead`` instead, with the
configured number.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import torch
from lightly import transforms
from lightly.loss import NegativeCosineSimilarity, NTXentLoss, SwaVLoss
from lightly.models import utils
from lightly.models.batchnorm import SplitBatchNorm
from lightly.models.modules import heads
from lightly.models.modules.memory_bank import MemoryBankModule
from lightly.transforms.multi_view_transform import MultiViewTransform
from lightly.utils.scheduler import cosine_schedule
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import v2

from fastsiam.config import AugmentConfig, TrainConfig, ViewConfig
from fastsiam.config.setting import as_text
from fastsiam.errors import BackendError
from fastsiam.methods.optim import decaying_rate, peak_lr
from fastsiam.model.backbones import build_backbone
from fastsiam.model.numerics import use_numerics

Views = Sequence[Tensor]
"""Views of a batch: (N, 3, S, S) each, normalised."""


class LightlyMethod(nn.Module, ABC):
    """A run's method, built from lightly's components."""

    settings: tuple[str, ...] = ()
    """Method settings that lightly supports in addition to ``dim`` and ``projector_layers``."""

    def __init__(self, config: TrainConfig, *, steps_per_epoch: int) -> None:
        super().__init__()
        self.method: Any = config.model.method
        self.steps_per_epoch, self.total = steps_per_epoch, config.optim.epochs * steps_per_epoch
        self.backbone = build_backbone(config.model)
        if bn_images := config.numerics.bn_images:
            _split_bn(self.backbone, config.optim.batch // bn_images)
        self._build(self.method)

    @abstractmethod
    def _build(self, method: Any) -> None:
        """Build the heads and the loss from the method's settings."""

    @abstractmethod
    def loss(self, views: Views, step: int) -> Tensor:
        """Update momentum encoders, if any, then return a batch's loss at a step, from 0."""

    def projection(self, last: nn.Module | None = None) -> heads.ProjectionHead:
        """Build a head with BN after its hidden layers, and ``last`` after its output layer."""
        method = self.method
        hidden = [method.projector_dim or method.dim] * (method.projector_layers - 1)
        widths = [self.backbone.features, *hidden]
        blocks: list[Any] = [
            (width, next_width, nn.BatchNorm1d(next_width), nn.ReLU())
            for width, next_width in pairwise(widths)
        ]
        return heads.ProjectionHead([*blocks, (widths[-1], method.dim, last, None)])


class SimSiam(LightlyMethod):
    """SimSiam, or FastSiam if there are more than two views."""

    settings = "projector_dim", "predictor_dim", "predictor_lr"

    def _build(self, method: Any) -> None:
        self.projector = self.projection(nn.BatchNorm1d(method.dim, affine=False))
        self.predictor = heads.SimSiamPredictionHead(method.dim, method.predictor_dim, method.dim)
        self.criterion = NegativeCosineSimilarity()

    def loss(self, views: Views, step: int) -> Tensor:
        """Compare each view's prediction with the mean projection of the others."""
        z = [self.projector(self.backbone(view)) for view in views]
        fixed = [projection.detach() for projection in z]
        losses = []
        for i, projection in enumerate(z):
            target = torch.stack(fixed[:i] + fixed[i + 1 :]).mean(0)
            losses.append(self.criterion(self.predictor(projection), target))
        return torch.stack(losses).mean()


class SimCLR(LightlyMethod):
    """SimCLR."""

    settings = "projector_dim", "temperature", "predictor_dim"

    def _build(self, method: Any) -> None:
        widths = self.backbone.features, method.projector_dim, method.dim
        self.projector = heads.SimCLRProjectionHead(*widths, num_layers=method.projector_layers)
        self.criterion = NTXentLoss(temperature=method.temperature)

    def loss(self, views: Views, step: int) -> Tensor:
        """Contrast both views of each image with all others."""
        loss: Tensor = self.criterion(*(self.projector(self.backbone(view)) for view in views))
        return loss


class MoCoV2(LightlyMethod):
    """MoCo v2, symmetrised: each view is a query whose key is the other view.

    The loss is called once for both, so no query is compared with its own batch's keys in the bank.
    """

    settings = "projector_dim", "temperature", "queue", "encoder_momentum"

    def _build(self, method: Any) -> None:
        widths = self.backbone.features, method.projector_dim, method.dim
        self.projector = heads.MoCoProjectionHead(*widths, num_layers=method.projector_layers)
        self.encoder = nn.Sequential(self.backbone, self.projector)
        self.momentum_encoder = copy.deepcopy(self.encoder)
        utils.deactivate_requires_grad(self.momentum_encoder)
        self.criterion = NTXentLoss(
            temperature=method.temperature, memory_bank_size=(method.queue, method.dim)
        )

    def loss(self, views: Views, step: int) -> Tensor:
        """Contrast each view with the other's key and the memory bank; add the keys to the bank."""
        utils.update_momentum(self.encoder, self.momentum_encoder, m=self.method.encoder_momentum)
        first, second = (self.encoder(view) for view in views)
        keys = torch.cat([self._key(view) for view in views])
        loss: Tensor = self.criterion(torch.cat([second, first]), keys)
        return loss

    @torch.no_grad()
    def _key(self, view: Tensor) -> Tensor:
        shuffled, order = utils.batch_shuffle(view)
        keys: Tensor = utils.batch_unshuffle(self.momentum_encoder(shuffled), order)
        return keys


class BYOL(LightlyMethod):
    """BYOL, with four times the loss of lightly's examples, to match the gradients of the paper.

    The paper sums 2 - 2 cos over both directions. The examples take the mean of -cos, which would
    need another learning rate with SGD.
    """

    settings = "projector_dim", "predictor_dim", "encoder_momentum", "momentum_schedule"

    def _build(self, method: Any) -> None:
        self.encoder = nn.Sequential(self.backbone, self.projection())
        self.predictor = heads.BYOLPredictionHead(method.dim, method.predictor_dim, method.dim)
        self.momentum_encoder = copy.deepcopy(self.encoder)
        utils.deactivate_requires_grad(self.momentum_encoder)
        self.criterion = NegativeCosineSimilarity()

    def loss(self, views: Views, step: int) -> Tensor:
        """Update the momentum encoder, and predict each view's target from the other."""
        momentum = self.method.encoder_momentum
        if self.method.momentum_schedule == "cosine":
            momentum = cosine_schedule(step, self.total, momentum, 1.0)
        utils.update_momentum(self.encoder, self.momentum_encoder, m=momentum)
        first, second = (self.predictor(self.encoder(view)) for view in views)
        with torch.no_grad():
            first_target, second_target = (self.momentum_encoder(view) for view in views)
        loss: Tensor = self.criterion(first, second_target) + self.criterion(second, first_target)
        return 2 * loss


class SwAV(LightlyMethod):
    """SwAV: prototype assignments of the first two views are predicted from all other views."""

    settings = (
        *("projector_dim", "prototypes", "temperature", "epsilon", "sinkhorn_rounds"),
        *("frozen_epochs", "queue", "queue_from", "predictor_dim"),
    )

    def _build(self, method: Any) -> None:
        self.projector = self.projection()
        frozen = round(method.frozen_epochs * self.steps_per_epoch)
        self.prototypes = heads.SwaVPrototypes(
            method.dim, method.prototypes, n_steps_frozen_prototypes=frozen
        )
        self.criterion = SwaVLoss(
            temperature=method.temperature,
            sinkhorn_iterations=method.sinkhorn_rounds,
            sinkhorn_epsilon=method.epsilon,
        )
        size = method.queue, method.dim
        banks = [MemoryBankModule(size, feature_dim_first=False) for _ in range(2)]
        self.queues = nn.ModuleList(banks if method.queue else [])

    def loss(self, views: Views, step: int) -> Tensor:
        """Predict the assignments of the first two views from the scores of the other views."""
        self.prototypes.normalize()
        features = [F.normalize(self.projector(self.backbone(view)), dim=1) for view in views]
        scores = [self.prototypes(x, step) for x in features]
        queued = [q(x, update=True)[1] for q, x in zip(self.queues, features, strict=False)]
        if step < self.method.queue_from * self.steps_per_epoch:
            queued = []
        queue_scores = [self.prototypes(x, step) for x in queued] or None
        loss: Tensor = self.criterion(scores[:2], scores[2:], queue_scores)
        return loss.squeeze()


COMPOSED: dict[str, type[LightlyMethod]] = {
    "simsiam": SimSiam,
    "fastsiam": SimSiam,
    "simclr": SimCLR,
    "mocov2": MoCoV2,
    "byol": BYOL,
    "swav": SwAV,
}
"""The methods that can be built from lightly's components, by name."""


def compose(config: TrainConfig, *, steps_per_epoch: int) -> LightlyMethod:
    """Build a run's method from lightly's components; the caller seeds torch first.

    Raises:
        BackendError: lightly does not support a setting; the message names it.
    """
    method, optim, bn_images = config.model.method, config.optim, config.numerics.bn_images
    if method.name not in COMPOSED:
        raise BackendError(
            f"lightly has components for {', '.join(COMPOSED)}, not for {method.name}"
        )
    kind = COMPOSED[method.name]
    supported = ("dim", "projector_layers", *kind.settings)
    unsupported = [one.name for one in fields(method) if one.name not in supported]
    check_defaults(f"lightly's {method.name}", method, unsupported)
    of_run = ("extend", "gpus", "init", "max_steps", "nodes", "resume")
    check_defaults("lightly's loop", config.run, of_run)
    check_defaults("lightly's loop", optim, ("optimizer", "accumulate"))
    if getattr(method, "projector_layers", 2) < 2:
        raise BackendError("lightly's heads need at least 2 layers: set projector-layers")
    if bn_images and (kind is not MoCoV2 or optim.batch % bn_images):
        raise BackendError("bn-images works only with lightly's mocov2, and must divide batch")
    return kind(config, steps_per_epoch=steps_per_epoch)


def check_defaults(owner: str, settings: Any, unsupported: Iterable[str]) -> None:
    """Check that settings that lightly does not support have their default values."""
    defaults = type(settings)()
    for name in unsupported:
        value = getattr(defaults, name)
        if getattr(settings, name) != value:
            value_text = as_text(value) or "none"
            raise BackendError(f"{owner} supports only {name.replace('_', '-')} {value_text}")


def _split_bn(network: nn.Module, splits: int) -> None:
    """Replace each BN layer by one that computes statistics of separate parts of a batch."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                split = SplitBatchNorm(child.num_features, splits)
                split.weight, split.bias = child.weight, child.bias
                setattr(module, name, split)


class Step:
    """Training step of a method built from lightly's components, with torch's SGD.

    torch's and glibc's global options are those of ``fastsiam.train.step.TrainingStep``.

    Raises:
        BackendError: lightly does not support a setting; the message names it.
    """

    def __init__(self, config: TrainConfig, steps_per_epoch: int, device: torch.device) -> None:
        use_numerics(config, device)
        # lightly's split BN does not support channels last.
        channels_last = config.numerics.channels_last and not config.numerics.bn_images
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        self.device, self._optim, self._steps_per_epoch = device, config.optim, steps_per_epoch
        model = compose(config, steps_per_epoch=steps_per_epoch)
        self.model = model.to(device).to(memory_format=self.layout).train()
        has_constant_rate = getattr(config.model.method, "predictor_lr", "") == "constant"
        decaying, constant = list[nn.Parameter](), list[nn.Parameter]()
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                is_constant = has_constant_rate and name.startswith("predictor.")
                (constant if is_constant else decaying).append(parameter)
        self._optimizer = torch.optim.SGD(
            [{"params": decaying}, {"params": constant}],
            lr=peak_lr(config.optim),
            momentum=config.optim.momentum,
            weight_decay=config.optim.weight_decay,
        )

    def __call__(self, views: Views, *, at: int) -> Tensor:
        """Take step ``at``, from 0, on normalised views (N, 3, S, S); return the loss before it."""
        rate = decaying_rate(self._optim, at, self._steps_per_epoch)
        self._optimizer.param_groups[0]["lr"] = rate
        device_views = [
            view.to(self.device, torch.float32, memory_format=self.layout, non_blocking=True)
            for view in views
        ]
        loss: Tensor = self.model.loss(device_views, at)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the weights, BN statistics and queues, and the optimizer's state."""
        # lightly's state dict leaves out the queues, although they are buffers.
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        return {"model": tensors, "optimizer": self._optimizer.state_dict()}

    def load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Restore what ``state`` returned."""
        with torch.no_grad():
            for name, tensor in self.state()["model"].items():
                tensor.copy_(model[name])
        self._optimizer.load_state_dict(optimizer)


def transform_of(method: str, augment: AugmentConfig) -> Callable[[Any], list[Tensor]]:
    """Return the transform that makes an image's views, from lightly's transforms for a method.

    Raises:
        BackendError: the transforms do not support a setting.
    """
    views: Callable[[Any], list[Tensor]] = MultiViewTransform(
        [_view(method, view, augment) for view in augment.views]
    )
    return views


def _view(method: str, view: ViewConfig, augment: AugmentConfig) -> Callable[[Any], Tensor]:
    """Return the transform of one view; SwAV crops in a separate step, as in lightly."""
    unsupported = ["ratio_min", "ratio_max", "crop_of", "solarise_threshold"]
    unsupported += [] if method == "swav" else ["scale_max"]
    unsupported += [] if method == "byol" else ["solarise_p"]
    check_defaults(f"lightly's transform for {method}", view, unsupported)
    settings = {
        "cj_prob": view.jitter_p,
        "cj_strength": 1.0,
        "cj_bright": view.brightness,
        "cj_contrast": view.contrast,
        "cj_sat": view.saturation,
        "cj_hue": view.hue,
        "random_gray_scale": view.gray_p,
        "gaussian_blur": view.blur_p,
        "sigmas": (view.blur_sigma_min, view.blur_sigma_max),
        "hf_prob": view.flip_p,
        "normalize": {"mean": list(augment.mean), "std": list(augment.std)},
    }
    transform: Callable[[Any], Tensor]
    if method == "swav":
        crop = v2.RandomResizedCrop(view.crop, scale=(view.scale_min, view.scale_max))
        transform = v2.Compose([crop, transforms.SwaVViewTransform(**settings)])
        return transform
    if method == "byol":
        settings["solarization_prob"] = view.solarise_p
    kinds = {"byol": transforms.BYOLView2Transform, "simsiam": transforms.SimSiamViewTransform}
    kind = kinds.get(method, transforms.SimCLRViewTransform)
    transform = kind(input_size=view.crop, min_scale=view.scale_min, **settings)
    return transform
