"""A resumable loader for any training loop, like torchdata's ``StatefulDataLoader``."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from fastsiam.bad_image_list import format_list, parse_list
from fastsiam.config import AugmentConfig, DataConfig

from .builders import build_loader

if TYPE_CHECKING:  # loads torch
    import torch
    from torch import Tensor

    from fastsiam.views.batch import Batch, Loader

    from .loaders import CropTransform


class ViewLoader:
    """An iterable over batches of augmented views that can resume in the middle of an epoch.

    Each iteration yields the next epoch, in a new order with new augmentations. ``set_epoch``
    chooses the next epoch. ``state_dict`` and ``load_state_dict`` save and restore the position, as
    in torchdata's ``StatefulDataLoader``; Lightning calls both automatically.

    The images are opened on first use. Until then, and when pickled, the loader consists of its
    arguments and its position. ``close`` or a ``with`` block ends its threads and processes.

    Args:
        data: a folder, a file or an address of training images; or a ``DataConfig``, which also
            chooses the pipeline.
        augment: ranges and probabilities of the augmentations; by default two views with those of
            the SimSiam paper.
        batch: *global* batch size, in images. Each rank gets ``batch // world`` of them. The
            incomplete last batch of an epoch is dropped.
        seed: seed of the order and of the augmentations.
        rank: rank of this process; by default torch.distributed's, or 0.
        world: number of ranks; by default torch.distributed's, or 1.
        device: device of the views.
        dtype: floating type of the views; float32 by default.
        chosen: ascending positions of the images to load; all by default. With a holdout, they are
            positions among the training images.
        crop_transform: called with the uint8 crops of each batch; see ``build_loader``.
        transform: called with each ``Batch``; the loader yields its result instead.
    """

    def __init__(
        self,
        data: DataConfig | Path | str,
        augment: AugmentConfig | None = None,
        *,
        batch: int,
        seed: int = 0,
        rank: int | None = None,
        world: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        chosen: NDArray[np.int64] | None = None,
        crop_transform: CropTransform | None = None,
        transform: Callable[[Batch], Any] | None = None,
    ) -> None:
        if not isinstance(augment, AugmentConfig | None):
            raise TypeError(
                f"augment must be an AugmentConfig, not a {type(augment).__name__}: set ranges and "
                "probabilities there; pass your own functions as transform or crop_transform"
            )
        self._data = DataConfig.of(data)
        # A state with numpy's integers could not be loaded with ``weights_only``.
        self._batch, self._seed = operator.index(batch), operator.index(seed)
        self._options: dict[str, Any] = {
            "augment": augment,
            "device": device,
            "dtype": dtype,
            "chosen": chosen,
            "crop_transform": crop_transform,
        }
        self._rank, self._world, self._transform = rank, world, transform
        self._next = self._position = 0, 0
        self._known = ""
        """Known bad images from a loaded state or a closed loader, as text."""
        self._loader: Loader | None = None
        self._opened_in = 0, False
        """PID that opened the loader, and whether torch.distributed was initialised then."""

    def __repr__(self) -> str:
        name = self._data.pipeline if self._loader is None else self.pipeline
        return f"ViewLoader({self._data.data!r}, batch={self._batch}, pipeline={name})"

    def __len__(self) -> int:
        """Return the number of batches in a complete epoch."""
        return self._open_loader().steps

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of the epoch of a loaded state, or else the next epoch.

        Raises:
            FastSiamError: the data cannot be read, or the pipeline does not work here.
        """
        loader = self._open_loader()
        epoch, skip = self._next
        self._next, self._position = (epoch + 1, 0), (epoch, skip)
        for step, batch in enumerate(loader.epoch(epoch, skip=skip), skip + 1):
            result = batch if self._transform is None else self._transform(batch)
            self._position = (epoch, step) if step < loader.steps else (epoch + 1, 0)
            yield result

    def set_epoch(self, epoch: int) -> None:
        """Choose the next epoch, counted from 0. A loaded position within that epoch is kept."""
        if epoch != self._next[0]:
            self._next = operator.index(epoch), 0
        self._position = self._next  # after ``break``, it was in the epoch before

    @property
    def sampler(self) -> Self:
        """This loader: Lightning calls ``loader.sampler.set_epoch`` before each epoch."""
        return self

    batch_sampler: ClassVar[None] = None
    """Lightning reads it if there is a ``sampler``."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded batch, and the settings that it depends on.

        After the last batch of an epoch, the position is the start of the next epoch.
        If bad images are replaced, the state includes those that this rank knows.
        """
        identity, (epoch, step) = self._identity(), self._position
        return {"epoch": epoch, "step": step, "bad": self._bad_images(), **identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch at which a state was saved, on any number of ranks.

        Raises:
            ValueError: the loader that saved the state had another seed, batch size, number of
                images, shuffle or mixture, or the state is not a ``ViewLoader``'s.
        """
        if not {"epoch", "step", "seed", "batch", "images"} <= state.keys():
            raise ValueError(f"not a ViewLoader's state: it has {', '.join(map(str, state))}")
        for name, value in self._identity().items():
            if (saved := state.get(name, value)) != value:  # 0.2 saved neither shuffle nor weights
                raise ValueError(
                    f"the state is from a loader with {name} {saved}, but this one has "
                    f"{name} {value}: load it with the same data and arguments"
                )
        self._next = self._position = state["epoch"], state["step"]
        self._known = state.get("bad", "")
        self._add_known()

    def _identity(self) -> dict[str, Any]:
        """Return the settings that determine which images a position refers to."""
        return {
            "seed": self._seed,
            "batch": self._batch,
            "images": self.images,
            "shuffle": self._data.shuffle,
            "weights": list(self._data.weights),
        }

    @property
    def images(self) -> int:
        """Number of images in an epoch over all ranks, the dropped last batch included."""
        return self._open_loader().images

    @property
    def pipeline(self) -> str:
        """Name of the pipeline; with ``auto``, the one that was chosen."""
        return self._open_loader().pipeline

    def close(self) -> None:
        """End threads and processes, and free memory. The next iteration reopens the images."""
        if self._loader is not None:
            self._known, loader = self._bad_images(), self._loader
            self._loader = None
            if self._opened_in[0] == os.getpid():  # a forked process lacks the loader's threads
                loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments and the position; open images are not pickled."""
        return self.__dict__ | {"_known": self._bad_images(), "_loader": None}

    def _open_loader(self) -> Loader:
        from torch import distributed

        is_distributed = distributed.is_available() and distributed.is_initialized()
        process, was_distributed = self._opened_in
        if process != os.getpid() or (is_distributed and not was_distributed):
            self.close()  # opened by another process, or before the group was initialised
        if self._loader is None:
            self._opened_in = os.getpid(), is_distributed
            rank = distributed.get_rank() if is_distributed else 0
            world = distributed.get_world_size() if is_distributed else 1
            self._loader = build_loader(
                self._data,
                batch=self._batch,
                seed=self._seed,
                rank=rank if self._rank is None else self._rank,
                world=world if self._world is None else self._world,
                **self._options,
            )
            self._add_known()
        return self._loader

    def _bad_images(self) -> str:
        bad = getattr(self._loader, "bad", None)
        return self._known if bad is None else format_list(bad.list())

    def _add_known(self) -> None:
        """Add the bad images of a loaded state to the open loader, if any."""
        if (bad := getattr(self._loader, "bad", None)) is not None:
            bad.add(parse_list(self._known))


def lightly_batch(batch: Batch) -> tuple[list[Tensor], Tensor, list[str]]:
    """Convert a batch to the format of lightly's examples: views, labels, file names."""
    return list(batch.views), batch.label, batch.names


def solo_learn_batch(batch: Batch) -> tuple[Tensor, list[Tensor], Tensor]:
    """Convert a batch to the format of solo-learn's methods: image positions, views, labels."""
    return batch.index, list(batch.views), batch.label


def transformers_batch(batch: Batch) -> dict[str, Tensor]:
    """Convert a batch to keyword arguments of Hugging Face models: first views and labels."""
    return {"pixel_values": batch.view1, "labels": batch.label}


def supervised_batch(batch: Batch) -> tuple[Tensor, Tensor]:
    """Convert a batch to a pair of first views and labels, for supervised training."""
    return batch.view1, batch.label
