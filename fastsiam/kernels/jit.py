"""What numba compiles: one way for all kernels, and a cache that knows what each is made of."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import IndexDataCacheFile

log = logging.getLogger(__name__)

_OURS = frozenset({__file__, str(Path(__file__).with_name("threads.py"))})


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function without the interpreter's lock, and keep the result between runs.

    numba's own cache watches the file that holds the function. Others that the function calls are
    compiled into it, so here their files are watched too.
    """
    dispatcher: Any = njit(nogil=True, error_model="numpy")(function)
    files = {function.__code__.co_filename, *_OURS}
    for used in function.__globals__.values():
        if isinstance(used, type(dispatcher)):
            files |= getattr(used, "made_of", frozenset())
    dispatcher.made_of = frozenset(files)
    try:
        dispatcher.enable_caching()
    except RuntimeError:  # neither beside the file nor in the user's cache folder
        _say_that_nothing_is_kept()
        return dispatcher
    kept = dispatcher._cache
    kept._cache_file = IndexDataCacheFile(  # type: ignore[no-untyped-call]
        cache_path=kept._cache_path,
        filename_base=kept._impl.filename_base,
        source_stamp=_stamp(dispatcher.made_of),
    )
    return dispatcher


@cache
def _stamp(files: frozenset[str]) -> str:
    whole = hashlib.sha256()
    for file in sorted(files):
        whole.update(Path(file).read_bytes())
    return whole.hexdigest()


@cache
def _say_that_nothing_is_kept() -> None:
    log.warning(
        "numba cannot write compiled code anywhere, so every start compiles for some seconds; "
        "set NUMBA_CACHE_DIR to a folder that can be written"
    )
