"""What is FFCV's own: its page cache, and what it does when it is imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fastsiam.errors import DataError
from tests.pipelines.cases import PAGES, readable
from tests.pipelines.conftest import Loaders
from tests.processes import Forked

pytestmark = pytest.mark.ffcv


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_page_cache_that_cannot_read_is_an_error(images: Path, loaders: Loaders) -> None:
    """FFCV's readers die, and FFCV waits for their pages for ever."""
    loader = loaders(PAGES, images / "train", workers=2)
    path = readable("ffcv", images / "train") / "train.beton"
    path.rename(path.with_suffix(".gone"))
    with pytest.raises(DataError, match="is the file still there"):
        list(loader.epoch(0))


def test_importing_it_leaves_torch_its_threads() -> None:
    """FFCV sets them to one when it is imported."""
    done = Forked(import_it).wait()
    assert done.returncode == 0, done.stderr


def import_it() -> None:
    import numba

    assert "ffcv" not in sys.modules
    torch.set_num_threads(3)
    before = numba.get_num_threads()
    import fastsiam.pipelines.ffcv_backend  # noqa: F401

    assert torch.get_num_threads() == 3 and numba.get_num_threads() == before
