"""A network that is quick to compile, for tests in which its size does not matter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from torchvision.models.resnet import BasicBlock

from fastsiam.model.backbones import BLOCKS


@contextlib.contextmanager
def short_resnet10(blocks: int = 0) -> Iterator[None]:
    """Shorten "resnet10" to its stem inside the context, plus a residual block if ``blocks`` is 1.

    The block has a shortcut. The compiler generates 19 kernels for the stem and SimSiam's heads,
    25 with the block, and 41 for the full network.
    """
    with mock.patch.dict(BLOCKS, resnet10=(BasicBlock, (0, blocks, 0, 0))):
        yield
