"""Preload the modules of all commands in the fork server, except for FFCV and DALI.

Nothing is computed here, so that forked processes start without threads.
"""

import contextlib
import importlib
import pkgutil
import threading

import torch.utils.tensorboard  # noqa: F401

import fastsiam

with contextlib.suppress(ImportError):
    import pydantic.type_adapter  # noqa: F401  # newer versions of Typer parse options with it

_BACK_ENDS = ("dali", "ffcv", "fastsiam.bench", "__main__")
_LIBRARIES = "fastsiam.kernels.kernels-"

for _module in pkgutil.walk_packages(fastsiam.__path__, "fastsiam."):
    if not any(name in _module.name for name in (*_BACK_ENDS, _LIBRARIES)):
        try:
            importlib.import_module(_module.name)
        except ModuleNotFoundError:  # an optional package is not installed
            pass
        except ImportError as error:  # the fork server would ignore it and preload no more
            raise RuntimeError(f"cannot import {_module.name}") from error

assert threading.active_count() == 1
