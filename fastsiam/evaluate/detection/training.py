"""Training of a detector, with precise BN at the end, and detection in images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.ops._utils import split_normalization_params

from fastsiam.config import NumericsConfig
from fastsiam.config.detect import DetectConfig
from fastsiam.distributed import Place, bn_group, mean_across_ranks
from fastsiam.errors import NOT_FINITE, FastSiamError
from fastsiam.evaluate.record_files import RecordFiles
from fastsiam.evaluate.supervised import Training
from fastsiam.methods.optim import init_momentum_buffers

from .datasets import DetectionSet
from .detectors import Detector
from .protocol import schedule_of
from .scores import Detections
from .training_images import DetectionBatches, Sample, resize

_STEPS_BETWEEN_READS = 20
"""Steps between reads of the loss, which wait for the GPU, and opportunities to save the state."""


class DetectorTraining(Training):
    """Training of a detector in place.

    Random choices in a step (the sampled boxes) depend on seed, step and rank only.

    Weight decay applies to all parameters except BN's. On GPUs, BN statistics are computed over all
    ranks. On CPUs each rank has its own, because torch's ``SyncBatchNorm`` does not support CPUs.
    """

    def __init__(self, model: Detector, config: DetectConfig, *, seed: int, place: Place) -> None:
        self._config, self._schedule = config, schedule_of(config)
        self._seed, self._place = seed, place
        # Not channels-last: with that layout, torch 2.15's oneDNN corrupted memory in backward
        # passes of detectors on a CPU. Without oneDNN, or in the default layout, it did not.
        model.to(place.device)
        if place.device.type == "cuda" and (group := bn_group(place, NumericsConfig())) is not None:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
        self._norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        norms, other_params = split_normalization_params(model)
        groups = [{"params": other_params}, {"params": norms, "weight_decay": 0.0}]
        sgd = torch.optim.SGD(groups, 0.0, momentum=0.9, weight_decay=config.weight_decay)
        super().__init__(model, init_momentum_buffers(sgd), dtype=model.dtype, place=place)

    def fit(self, dataset: DetectionSet, files: RecordFiles, unit: str) -> None:
        """Train on a data set to the end of the schedule, then compute precise BN statistics.

        ``files`` and ``unit`` are those of ``run``.

        Raises:
            FastSiamError: no image has an object, or the loss is not finite.
        """
        config, steps = self._config, self._schedule.steps
        images = DetectionBatches(dataset, config, seed=self._seed, place=self._place)
        self.run(
            partial(images.from_step, steps=steps),
            steps=steps,
            every=_STEPS_BETWEEN_READS,
            images=config.batch_size,
            files=files,
            on_checkpoint=lambda _, loss: f"loss {loss:.3f}, ",
            unit=unit,
        )
        self.compute_precise_bn(images.from_step(steps, steps + config.precise_bn))

    def step(self, number: int, batch: Sequence[Sample]) -> Tensor:
        """Train on images and their objects; return the sum of the losses, on the device."""
        self.network.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self._schedule.rate(self._config.lr, number)
        self._seed_torch(0, number)
        loss = self._loss(self.model, batch)
        self.update(loss)
        return loss.detach()

    def check(self, step: int, losses: Tensor) -> None:
        """Raise an error if the loss is not finite."""
        if not losses.isfinite():
            raise FastSiamError(
                f"{NOT_FINITE} after step {step:,}: try a lower --lr or a longer --warmup"
            )

    def compute_precise_bn(self, batches: Iterable[Sequence[Sample]]) -> None:
        """Replace BN's running statistics by their means over batches, without training on them.

        If each rank has its own BN statistics, the means are averaged over ranks.
        """
        momenta = [norm.momentum for norm in self._norms]
        self.network.train()
        with torch.no_grad():
            for number, batch in enumerate(batches):
                for norm in self._norms:
                    norm.momentum = 1 / (number + 1)
                self._seed_torch(1, number)
                self._loss(self.network, batch)
            for norm, momentum in zip(self._norms, momenta, strict=True):
                norm.momentum = momentum
                if self._place.world > 1 and not isinstance(norm, nn.SyncBatchNorm):
                    for running in (norm.running_mean, norm.running_var):
                        assert running is not None
                        running.copy_(mean_across_ranks(running))

    def detections(
        self, dataset: DetectionSet, done: Callable[[], object] = int
    ) -> list[Detections]:
        """Detect objects in all images of a data set; return them in its order, on every rank.

        The images are divided among the ranks. Each rank calls ``done`` after each of its images.
        """
        self.network.eval()
        results = []
        for index in range(self._place.rank, len(dataset.pictures), self._place.world):
            results.append(self._detections_of(dataset, index))
            done()
        parts = [results]
        if self._place.world > 1:
            parts *= self._place.world
            dist.all_gather_object(parts, parts[0])
        return [parts[i % len(parts)][i // len(parts)] for i in range(len(dataset.pictures))]

    def _detections_of(self, dataset: DetectionSet, index: int) -> Detections:
        picture, side = dataset.pictures[index], self._schedule.sides[-1]
        image = resize(dataset.image(index), side, self._config.long_side)
        with torch.no_grad():
            size = picture.height, picture.width
            (output,) = self.network([image.to(self._place.device)], sizes=[size])
        masks: list[dict[str, Any]] = []
        if "masks" in output:
            from pycocotools.mask import encode

            mask_pixels = (output["masks"][:, 0] > 0.5).permute(1, 2, 0).cpu().numpy()
            masks = encode(np.asfortranarray(mask_pixels, np.uint8))
        boxes, scores, labels = (output[x].cpu().numpy() for x in ("boxes", "scores", "labels"))
        return Detections(boxes, scores, labels - 1, tuple(masks))

    def _loss(self, model: nn.Module, batch: Sequence[Sample]) -> Tensor:
        device = self._place.device
        images = [image.to(device, non_blocking=True) for image, _ in batch]
        targets = [
            {name: value.to(device, non_blocking=True) for name, value in target.items()}
            for _, target in batch
        ]
        total: Tensor = torch.stack([*model(images, targets).values()]).sum()
        return total

    def _seed_torch(self, stream: int, number: int) -> None:
        """Seed torch's random generator, which samples boxes."""
        words = np.random.SeedSequence([self._seed, 2 + stream, number, self._place.rank])
        torch.manual_seed(int(words.generate_state(1, np.uint64)[0]) % 2**63)
