"""Starting several ranks on this machine."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastsiam.errors import RANK_LOST

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_WHY = {
    signal.SIGKILL: ": was its memory too small?",
    signal.SIGABRT: ": by NCCL, perhaps, after --rank-timeout; see what is written above",
}


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
        rank, code = _first_failure(error.failures)
        if code > 0:
            return code
        name, why = signal.Signals(-code).name, _WHY.get(signal.Signals(-code), "")
        print(f"error: rank {rank} was ended by {name}{why}", file=sys.stderr)
        return 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, int]:
    """Return which rank failed first, and its exit code; it is below 0 if a signal ended it.

    Of several in the same moment it is the one that a signal ended: the others left because it was
    gone, without a word. SIGTERM is what the launcher ends the rest with.
    """
    causes = {r: x for r, x in failures.items() if x.exitcode != RANK_LOST} or failures
    since = min(failure.timestamp for failure in causes.values())
    first = [(rank, x.exitcode) for rank, x in causes.items() if x.timestamp <= since + 1]
    ended = [(rank, code) for rank, code in first if code < 0 and code != -signal.SIGTERM]
    return (ended or first)[0]
