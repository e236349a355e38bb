"""A network that is quick to compile, where a test is not about its size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from torchvision.models.resnet import BasicBlock

from fastsiam.model.backbones import BLOCKS


@contextlib.contextmanager
def short_resnet10() -> Iterator[None]:
    """Let "resnet10" end after its stem inside: a convolution, BN, ReLU and the pool.

    The compiler writes some ten kernels for it and SimSiam's heads; for all of it twice as many.
    """
    with mock.patch.dict(BLOCKS, resnet10=(BasicBlock, (0, 0, 0, 0))):
        yield
