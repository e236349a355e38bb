"""Starting several ranks on this machine."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run ``fastsiam ARGUMENTS`` in several processes of this machine, by torch's elastic launcher.

    Returns:
        Exit code: 0, the first failed process's, or 128 + the signal that ended this one.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("agent.server.api", "multiprocessing.api"):  # the ranks speak for themselves
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.ERROR)
    home = str(Path(__file__).parents[2])  # so that the ranks find the package from any folder
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "fastsiam", *arguments)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
