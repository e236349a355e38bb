"""The methods as one writes them with lightly, beside which ours are tested and measured.

The networks have our backbone and lightly's heads; losses, views, momentum updates and memory banks
are lightly's, put together as in its own examples. ``methods`` has the methods, and ``training`` is
``fastsiam bench lightly``.
"""

from __future__ import annotations

from importlib.util import find_spec

from fastsiam.errors import BackendError

NAMES = ("simsiam", "fastsiam", "simclr", "mocov2", "byol", "swav")
"""The methods that lightly has the parts of, by what ``--method`` calls them."""


def require_lightly() -> None:
    """Raise ``BackendError`` unless lightly is installed."""
    if find_spec("lightly") is None:
        raise BackendError("lightly is not installed: pip install lightly")
