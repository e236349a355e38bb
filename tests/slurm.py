"""A local SLURM cluster: the real daemons, two nodes and a preempting partition."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import free_port

_PROGRAMS = "munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol"
_NODES = "127.1", "127.2"
"""Host names that resolve without a name server: inet(3) reads them as 127.0.0.1 and 127.0.0.2."""
_CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PartitionName=low Nodes={nodes} Default=YES PriorityTier=1 GraceTime=120 MaxTime=INFINITE
PartitionName=high Nodes={nodes} PriorityTier=2 PreemptMode=OFF MaxTime=INFINITE
"""


@dataclass(frozen=True)
class Cluster:
    """Client of a running cluster."""

    environment: dict[str, str]

    def call(self, *words: str, folder: Path | None = None, check: bool = True) -> str:
        """Run a SLURM program; return its stdout."""
        environment = {**os.environ, **self.environment}
        result = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True)
        assert not (check and result.returncode), result.stderr
        return result.stdout

    @property
    def idle(self) -> int:
        """Number of idle nodes; 0 while the controller does not answer."""
        line = ["sinfo", "--noheader", "--partition=low", "--states=idle", "--format=%D"]
        return int(self.call(*line, check=False).strip() or 0)

    def shows(self, job: str) -> str:
        """Return the ``scontrol show job`` record of a job."""
        return self.call("scontrol", "show", "job", "--oneliner", job)

    def wait(self, until: Callable[[], bool]) -> None:
        end = time.monotonic() + 300
        while not until():
            assert time.monotonic() < end, self.call("squeue")
            time.sleep(0.2)


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Start a cluster; skip the test if SLURM is not installed or does not start."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: apt-get install slurm-wlm munge")
    if os.geteuid():
        pytest.skip("needs root to run slurmd")
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, ExitStack() as stack:
        folder, host = Path(name), socket.gethostname().partition(".")[0]
        folder.chmod(0o755)  # munged's socket must be accessible to all users
        (folder / "state").mkdir()
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        config = folder / "slurm.conf"
        text = _CONFIG.format(host=host, port=free_port(), folder=folder, nodes=",".join(_NODES))
        for node in _NODES:
            (folder / node).mkdir()
            text += f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 CPUs=4 "
            text += f"RealMemory=1000 Port={free_port()}\n"
        config.write_text(text)
        instance = Cluster({"SLURM_CONF": str(config)})
        names = {"socket": "munge", "pid-file": "pid", "seed-file": "seed", "key-file": "key"}
        files = [f"--{x}={folder}/{name}" for x, name in (names | {"log-file": "l"}).items()]
        for line in (
            ["munged", "--foreground", "--force", *files],
            ["slurmctld", "-D", "-i", "-c", "-f", str(config)],
            *(["slurmd", "-D", "-N", node, "-f", str(config)] for node in _NODES),
        ):
            stack.callback(_end, _start(line, folder, instance))
        end = time.monotonic() + 60
        while instance.idle < len(_NODES):
            if time.monotonic() > end:
                pytest.skip(f"SLURM does not start: {_last_words(folder)}")
            time.sleep(0.2)
        yield instance


def _start(line: list[str], folder: Path, instance: Cluster) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **instance.environment}
    with (folder / "said").open("ab") as log:
        return subprocess.Popen(line, env=environment, stdout=log, stderr=log)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_words(folder: Path) -> str:
    lines = (folder / "said").read_text(errors="replace").splitlines()
    return next((x for x in reversed(lines) if "fatal" in x or "error" in x), "no reason given")
