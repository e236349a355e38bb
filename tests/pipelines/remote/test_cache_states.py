"""Whatever happens to the cache's files and the server, reads return the object's bytes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from fastsiam.errors import FileLostError
from fastsiam.pipelines.remote import cache, storage
from tests.pipelines.remote.cached_objects import (
    CHUNK,
    SIZE,
    bytes_of,
    cache_of,
    content,
    files,
    remote,
    serve,
    wait_for_fetches,
)

pytest.importorskip("obstore", reason="needs obstore: pip install 'fastsiam[cloud]'")


class CachedReads(RuleBasedStateMachine):
    """Reads through a cache whose limit changes, and whose files are damaged."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        for module, name in ((storage, "get"), (cache, "CHUNK")):
            self.patch.setattr(module, name, getattr(module, name))
        self.server, self.folder = serve(), Path(tempfile.mkdtemp())
        self.reopen(8)

    @rule(most=st.integers(1, 30))
    def reopen(self, most: int) -> None:
        self.most, self.cache = most, cache_of(self.folder, most)

    @rule(is_down=st.booleans())
    def switch_server(self, is_down: bool) -> None:
        self.server.is_down = is_down

    @rule(
        key=st.sampled_from("ab"),
        start=st.integers(0, SIZE - 1),
        length=st.integers(1, 3 * CHUNK),
        ahead=st.booleans(),
    )
    def read(self, key: str, start: int, length: int, ahead: bool) -> None:
        stop, asked = min(start + length, SIZE), len(self.server.asked)
        one = remote(self.cache, key)
        if ahead:
            one.prefetch([(start, stop)])
        try:
            data = one.read(start, stop)
        except FileLostError:
            assert self.server.is_down
            return
        finally:
            wait_for_fetches()  # so that the next rule always finds the same files
        assert data == content(key)[start:stop]
        if len(self.server.asked) == asked:
            return  # nothing was added
        assert bytes_of(self.folder) <= max(self.most * CHUNK, CHUNK)

    @rule(share=st.floats(0, 1, exclude_max=True), keep=st.floats(0, 1, exclude_max=True))
    def truncate_file(self, share: float, keep: float) -> None:
        if paths := files(self.folder):
            path = paths[int(share * len(paths))]
            path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])

    @rule(share=st.floats(0, 1, exclude_max=True))
    def delete_file(self, share: float) -> None:
        if paths := files(self.folder):
            paths[int(share * len(paths))].unlink()

    @rule(name=st.sampled_from(["0-000001.ab.part", "note.txt"]))
    def leave_other_file(self, name: str) -> None:
        (self.folder / "chunks-1" / name).write_bytes(b"left")

    def teardown(self) -> None:
        self.server.is_down = False
        for key in "ab":
            assert remote(self.cache, key).read(0, SIZE) == content(key)
        self.patch.undo()
        shutil.rmtree(self.folder)


TestCachedReads: Any = CachedReads.TestCase
TestCachedReads.settings = settings(max_examples=25, stateful_step_count=25)
