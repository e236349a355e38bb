"""What we use of FFCV, imported and opened so that the rest of the process stays as it is.

The first import of FFCV sets torch's and numba's numbers of threads to one; so does each of its
loaders, which also compiles a reader of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numba
import numba.typed
import torch

_threads = torch.get_num_threads(), numba.get_num_threads()

_typed, numba.typed.Dict = numba.typed.Dict, dict  # for two names, it would compile for seconds
import ffcv._libffcv  # noqa: E402
from ffcv.fields.rgb_image import RGBImageField, SimpleRGBImageDecoder  # noqa: E402
from ffcv.loader import Loader, OrderOption, epoch_iterator  # noqa: E402
from ffcv.loader.epoch_iterator import EpochIterator  # noqa: E402
from ffcv.memory_managers.os_cache import OSCacheManager  # noqa: E402
from ffcv.pipeline.compiler import Compiler  # noqa: E402
from ffcv.pipeline.state import State  # noqa: E402

__all__ = ["PATH", "EpochIterator", "Loader", "SimpleRGBImageDecoder", "State", "open_loader"]

numba.typed.Dict = _typed
torch.set_num_threads(_threads[0])
numba.set_num_threads(_threads[1])
epoch_iterator.IS_CUDA = False  # it would make new streams for every epoch; we copy ourselves

PATH = str(ffcv._libffcv.__file__)
"""FFCV's library. It is linked with libjpeg-turbo: whoever knows the one finds the other."""


def open_loader(
    path: str,
    pipelines: Mapping[str, Any],
    *,
    images: str,
    batch: int,
    prefetch: int,
    os_cache: bool,
) -> Loader:
    """Open FFCV's loader, and keep it from what it would do to others.

    The reader that it compiles declares numba's type of all byte arrays read-only: whatever was
    compiled for such arrays before cannot be called any more.

    Args:
        path: of the .beton file.
        pipelines: the operations of each of its fields.
        images: the field that holds the images. FFCV takes it for an image field even if the file
            says that it is one of ours, whose images FFCV itself cannot read.
        batch: images in a batch.
        prefetch: batches that are made ahead.
        os_cache: whether the file is mapped; otherwise FFCV reads its pages itself.
    """
    threads = torch.get_num_threads(), numba.get_num_threads()
    compiling, reader = Compiler.is_enabled, OSCacheManager.compile_reader
    Compiler.set_enabled(False)  # our operation is compiled already
    OSCacheManager.compile_reader = lambda manager: None  # and reads by itself
    try:
        return Loader(
            path,
            batch_size=batch,
            num_workers=1,
            order=OrderOption.SEQUENTIAL,  # ours is handed to each epoch
            os_cache=os_cache,
            pipelines=dict(pipelines),
            custom_fields={images: RGBImageField},
            batches_ahead=prefetch,
        )
    finally:
        Compiler.set_enabled(compiling)
        OSCacheManager.compile_reader = reader
        torch.set_num_threads(threads[0])
        numba.set_num_threads(threads[1])
