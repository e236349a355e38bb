"""The subject of an evaluation: a trained network, and images preprocessed for it.

The network comes from ``fastsiam.interchange``, the images from ``fastsiam.pipelines``. ``command``
measures accuracy; ``feature_files`` exports features.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fastsiam.config import AugmentConfig, ColumnNames, DataConfig, Pipeline, TrainConfig
from fastsiam.config.evaluate import EvalConfig, FeaturesConfig, FinetuneConfig, NetworkConfig
from fastsiam.config.views import usual_resize
from fastsiam.console import Console
from fastsiam.distributed import Place, check_same_images, from_leader
from fastsiam.errors import DataError, FastSiamError, NoLabelsError, NoSplitError
from fastsiam.evaluate.features import feature_batches
from fastsiam.evaluate.record_files import RecordFiles
from fastsiam.interchange import Pretrained, load_pretrained
from fastsiam.interchange.pretrained import format_keys
from fastsiam.model.backbones import Backbone, check_crop
from fastsiam.model.numerics import autocast_type, keep_freed_memory, resolve_precision
from fastsiam.pipelines import build_eval_loader, has_validation, open_split
from fastsiam.pipelines.automatic import choose_pipeline
from fastsiam.pipelines.backends import BACKENDS, ENGINE
from fastsiam.pipelines.store import Split
from fastsiam.pipelines.subsets import TrainingImages
from fastsiam.run.checkpoint import weights_hash
from fastsiam.run.records import DataFacts, Evaluation, ImageFacts, Kind, NetworkFacts
from fastsiam.views.batch import EvalLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalImages:
    """The images of an evaluation, cropped and normalised; each rank opens its share."""

    data: DataConfig
    augment: AugmentConfig
    """Crop size and normalisation; images to evaluate use no other augmentation settings."""
    resize: int
    """Shorter side in pixels before the central crop."""
    batch: int = 256
    """Images per forward pass."""
    place: Place
    training: TrainingImages | None = None
    """The training images, if they are open already: listing a large folder again takes long."""
    ignored_holdout: str = ""
    """The run's holdout if it does not apply to these images; otherwise empty."""

    def __str__(self) -> str:
        """Describe resizing and crop for display; results depend on them."""
        crop = self.augment.crop
        return f"shorter side to {self.resize} pixels, central {crop} x {crop}"

    def loader(
        self, split: Split, *, in_turn: bool = False, chosen: NDArray[np.int64] | None = None
    ) -> EvalLoader:
        """Open this rank's share of a split with ``build_eval_loader``."""
        store = None
        if self.training is not None and (split == "train" or self.data.holdout):
            store = self.training.split(split)
        return build_eval_loader(
            self.data,
            split,
            self.augment,
            resize=self.resize,
            batch=self.batch,
            rank=self.place.rank,
            world=self.place.world,
            in_turn=in_turn,
            device=self.place.device,
            chosen=chosen,
            store=store,
        )

    def loaders(self, chosen: NDArray[np.int64] | None = None) -> tuple[EvalLoader, EvalLoader]:
        """Open the training and validation images, and check that they have the same classes.

        Args:
            chosen: positions of the training images to use; by default all.

        Raises:
            DataError: a split or its labels are missing, or the classes differ.
        """
        root, train = self.data.root, self.loader("train", chosen=chosen)
        if not train.classes:
            raise DataError(
                f"{root} has no labels, which this evaluation needs: class folders, or a column of "
                "labels (--label-column)"
            )
        try:
            val = self.loader("val")
        except NoLabelsError:
            raise
        except NoSplitError as error:
            raise NoSplitError(
                f"{error}; --holdout {self.ignored_holdout or '10%'} holds out a share of each "
                "class instead"
            ) from error
        if not val.classes:
            raise NoLabelsError(
                f"the validation images of {root} have no labels: sort them into class folders, "
                "like the training images"
            )
        shared = train.classes
        if shared == tuple(map(str, range(len(shared)))):  # numbered: val may lack the highest
            shared = shared[: max(1, len(val.classes))]
        if shared != val.classes:
            unshared = {
                "training": sorted({*train.classes} - {*val.classes}),
                "validation": sorted({*val.classes} - {*train.classes}),
            }
            only = [f"{format_keys(names)} only in {x}" for x, names in unshared.items() if names]
            raise DataError(
                f"the training and validation images under {root} have different classes: "
                f"{'; '.join(only) or 'the same names in a different order'}"
            )
        if missing := int((train.labels < 0).sum() + (val.labels < 0).sum()):
            raise DataError(
                f"{missing:,} of the images under {root} have no label; this evaluation needs one "
                "for each image"
            )
        return train, val


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject(EvalImages):
    """A network to evaluate, and images preprocessed for it."""

    pretrained: Pretrained
    network: Backbone
    """Maps (N, 3, S, S) to (N, features); on the rank's device, in evaluation mode."""
    untrained: bool
    """Whether the weights are newly initialised."""
    dtype: torch.dtype
    """Autocast type of the network."""
    console: Console

    def extract(self, loader: EvalLoader, what: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield ``feature_batches`` of this rank's images; show the progress, labelled ``what``."""
        device = self.place.device
        with self.console.tally(what, loader.images) as progress:
            for batch in feature_batches(self.network, loader, dtype=self.dtype, device=device):
                yield batch
                progress.add(len(batch[1]) * self.place.world)

    def check_same(self, *loaders: EvalLoader) -> None:
        """Check that all ranks found the same images. Every rank must call this.

        Raises:
            DataError: this rank found different images from rank 0.
        """
        names = (name for loader in loaders for name in loader.names())
        check_same_images(names, self.data.root)

    @property
    def _run_data(self) -> DataConfig | None:
        """The data settings of the network's run, if it was trained on these images."""
        config = self.pretrained.config
        return config.data if config and config.data.has_same_root(self.data) else None

    def print_summary(self, *lines: str) -> None:
        """Print the network, the images and the settings that results depend on."""
        self.console.say(f"{'UNTRAINED: ' * self.untrained}{self.pretrained}")
        mean, std = (
            " ".join(f"{value:.4g}" for value in values)
            for values in (self.augment.mean, self.augment.std)
        )
        self.console.say(
            f"images from {self.data.root}, pipeline {self.data.pipeline}: {self}; mean {mean}, "
            f"std {std}; {short_name(self.dtype)} on {devices(self.place)}"
        )
        if self.pretrained.input is None:
            self.console.say(
                "the file names no preprocessing: crop, mean and std are assumed unless given "
                "(--crop, --mean, --std)"
            )
        run_data = self._run_data
        if self.ignored_holdout:
            reason = "has validation images" if run_data else "is not the run's data"
            self.console.say(
                f"the run's --holdout {self.ignored_holdout} does not apply: "
                f"{self.data.root} {reason}"
            )
        if holdout := self.data.holdout:
            self.console.say(
                f"{holdout} of each class of the training images held out for validation"
            )
        if run_data and self.data.holdout_percent > run_data.holdout_percent:
            self.console.say("the network was trained on images that are held out here")
        for line in filter(None, lines):
            self.console.say(line)

    def data_facts(self, train: EvalLoader, val: EvalLoader) -> DataFacts:
        """Describe the images for a record, with a checksum of their labels."""
        checksum = zlib.crc32(val.labels.tobytes(), zlib.crc32(train.labels.tobytes()))
        return DataFacts(
            root=str(self.data.root),
            train=train.images,
            val=val.images,
            classes=len(train.classes),
            labels_crc32=f"{checksum:08x}",
            holdout=self.data.holdout or None,
            image_column=self.data.image_column or None,
            other_data=None if self._run_data else self.data.full_root,
        )

    def record_files(
        self,
        kind: Kind,
        data: DataFacts,
        protocol: dict[str, Any],
        config: EvalConfig,
        *details: str,
    ) -> RecordFiles:
        """Describe an evaluation before it starts, and prepare the files of its record."""
        images = ImageFacts(
            crop=self.augment.crop,
            resize=self.resize,
            mean=tuple(self.augment.mean),
            std=tuple(self.augment.std),
            pipeline=self.data.pipeline,
            precision=short_name(self.dtype),
            ranks=self.place.world,
            exif=self.data.exif,
            alpha=self.data.alpha,
        )
        # The fingerprint is that of the network before fine-tuning changes it.
        network = network_facts(self.pretrained, self.network, untrained=self.untrained)
        return RecordFiles(
            self.pretrained.run,
            Evaluation(kind=kind, network=network, data=data, images=images, protocol=protocol),
            *details,
            config=config,
            place=self.place,
            console=self.console,
        )


def open_subject(path: Path, config: EvalConfig, place: Place) -> Subject:
    """Load a network, and resolve the settings of its images.

    Raises:
        CheckpointError: the file cannot be read, or its layout is unknown.
        FastSiamError: the resized images are smaller than the crop, or the network does not accept
            images of this crop.
    """
    pretrained = open_network(path, config)
    own = pretrained.config or TrainConfig()
    augment, resize = _image_settings(pretrained, config)
    try:
        training = isinstance(config, FinetuneConfig)
        check_crop(pretrained.model, augment.crop, training=training)
    except ValueError as error:
        raise FastSiamError(str(error)) from error
    network = pretrained.network(config.layer if isinstance(config, FeaturesConfig) else "backbone")
    data = _data_settings(own.data, config, place)
    if place.device.type == "cpu":
        keep_freed_memory()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = own.numerics.tf32
    return Subject(
        pretrained=pretrained,
        network=network.to(place.device).to(memory_format=torch.channels_last),
        untrained=config.untrained,
        data=data,
        ignored_holdout="" if config.holdout or data.holdout else own.data.holdout,
        augment=augment,
        resize=resize,
        dtype=autocast_of(config, own, place),
        batch=config.feature_batch,
        place=place,
        console=Console(quiet=not place.is_leader),
    )


def open_network(path: Path, config: NetworkConfig) -> Pretrained:
    """Load a network; if ``config.untrained``, with new weights from the run's seed (or 0).

    Raises:
        CheckpointError: the file cannot be read, or its layout is unknown.
        FastSiamError: the settings do not fit the file.
    """
    try:
        pretrained = load_pretrained(path, backbone=config.backbone, stem=config.stem)
    except ValueError as error:
        raise FastSiamError(str(error)) from error
    if not config.untrained:
        return pretrained
    torch.manual_seed((pretrained.config or TrainConfig()).numerics.seed)
    return replace(pretrained, state=pretrained.build().state_dict(), epoch=0.0, unused_keys=())


def network_facts(pretrained: Pretrained, network: nn.Module, *, untrained: bool) -> NetworkFacts:
    """Describe a network for a record, with a hash of its current weights."""
    return NetworkFacts(
        backbone=pretrained.model.backbone,
        stem=pretrained.model.stem,
        layout=pretrained.layout,
        file=str(pretrained.path),
        epoch=pretrained.epoch,
        untrained=untrained,
        fingerprint=weights_hash(network.state_dict()),
    )


def _image_settings(pretrained: Pretrained, config: EvalConfig) -> tuple[AugmentConfig, int]:
    """Resolve the crop, the normalisation, and the shorter side before the crop."""
    default = pretrained.input_or_default
    augment = AugmentConfig.alike(
        views=1,
        crop=config.crop or default.crop,
        mean=config.mean or default.mean,
        std=config.std or default.std,
    )
    default_resize = default.resize if augment.crop == default.crop else usual_resize(augment.crop)
    resize = config.resize or default_resize
    if resize < augment.crop:
        raise FastSiamError(
            f"--resize {resize} is smaller than the crop of {augment.crop} pixels; pass --crop too"
        )
    return augment, resize


def _data_settings(trained_on: DataConfig, config: EvalConfig, place: Place) -> DataConfig:
    """Resolve which images are loaded, and by which pipeline; the same on every rank.

    By default the run's pipeline is used, if it loads images, works here and can read these images.
    Otherwise one is chosen automatically, without an error, because the user may not have chosen
    the run's pipeline. If the images do not fit into memory, ``native`` replaces ``memory``: it
    makes the same pixels. The run's holdout only applies to the run's own data, and only if they
    have no validation images.
    """
    data = trained_on.at(config.data, ColumnNames(config.image_column, config.label_column))
    holdout = config.holdout
    is_own = trained_on.holdout and data.has_same_root(trained_on)
    if is_own and not holdout and not has_validation(data.root, data.columns):
        holdout = trained_on.holdout
    changes: dict[str, Any] = {} if trained_on.loads_images else {"pipeline": "auto"}
    for name in ("pipeline", "exif", "alpha", "bad_images"):
        if getattr(config, name) != "run":
            changes[name] = getattr(config, name)
    data = replace(data, holdout=holdout, shuffle="full", workers=config.workers, **changes)
    if config.pipeline != "run" and data.pipeline != "auto":
        return data
    try:
        store = open_split(data, "train")
    except DataError:  # validation images may exist; if not, opening them reports the error
        return data
    name = data.pipeline
    if name == "auto" or not BACKENDS[name].works_on(store):
        name = choose_pipeline(store, device=place.device, keeps=False).name
    elif name == "memory" and choose_pipeline(store, device=place.device).name != name:
        name = ENGINE
    return replace(data, pipeline=cast(Pipeline, from_leader(name)))


def autocast_of(config: NetworkConfig, own: TrainConfig, place: Place) -> torch.dtype:
    """Return the autocast type: the requested one, or the run's; the same on all ranks."""
    precision = own.numerics.precision if config.precision == "run" else config.precision
    dtype = autocast_type(resolve_precision(precision, place.device), place.device)
    # A run on a GPU may have used fp16, which is not supported on CPUs.
    return torch.float32 if dtype == torch.float16 and place.device.type == "cpu" else dtype


def devices(place: Place) -> str:
    """Return the number and type of the ranks' devices, such as 8 x NVIDIA H100."""
    gpu = place.device.type == "cuda"
    return f"{place.world} x {torch.cuda.get_device_name(place.device) if gpu else 'CPU'}"


def short_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as float32."""
    return str(dtype).removeprefix("torch.")
