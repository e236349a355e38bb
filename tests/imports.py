"""Preload the modules of all commands in the fork server, except for FFCV and DALI.

Nothing is computed here, so that forked processes start without threads.
"""

import importlib
import pkgutil
import threading

import fastsiam

_BACK_ENDS = ("dali", "ffcv", "fastsiam.bench", "__main__")

for _module in pkgutil.walk_packages(fastsiam.__path__, "fastsiam."):
    if not any(name in _module.name for name in _BACK_ENDS):
        importlib.import_module(_module.name)

assert threading.active_count() == 1
