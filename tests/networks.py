"""A network that is quick to compile, where a test is not about its size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from torchvision.models.resnet import BasicBlock

from fastsiam.model.backbones import BLOCKS


@contextlib.contextmanager
def short_resnet10(blocks: int = 0) -> Iterator[None]:
    """Let "resnet10" be its stem inside, and one residual block with a shortcut if ``blocks`` is 1.

    The compiler writes 19 kernels for the stem and SimSiam's heads, 25 with the block, and 41 for
    all of it.
    """
    with mock.patch.dict(BLOCKS, resnet10=(BasicBlock, (0, blocks, 0, 0))):
        yield
