"""Run commands on several ranks. The ranks are forked; a real launcher starts interpreters."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import torch.distributed as dist

from tests.processes import Forked, command


def fastsiam_on_ranks(
    world: int, *arguments: str, code: int = 0, begin: Callable[..., Forked] = command
) -> list[subprocess.CompletedProcess[str]]:
    """Run a command line on several ranks; check that at least one exits with ``code``.

    ``begin`` starts a rank, like ``command``.
    """
    # This process acts as the launcher, whose store is the ranks' rendezvous.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "localhost", 0, is_master=True, wait_for_workers=False
    )
    meeting = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(world),
    }
    processes = [
        begin(*arguments, environment={**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]
    results = [one.wait(300) for one in processes]
    codes = [one.returncode for one in results]
    assert code in codes and (code or not any(codes)), "\n".join(one.stderr for one in results)
    return results
