"""Where the parts of a conversion are made: here, or by the workers of SLURM, ray or dask.

An engine gets command lines and returns what became of each. It knows nothing of conversions. Its
workers need the same files at the same paths, and the same Python environment.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fastsiam.config import ConvertConfig
from fastsiam.environment import be_found_by_children
from fastsiam.errors import FastSiamError
from fastsiam.pipelines.processes import signals_held

LOST = -signal.SIGKILL
"""Exit code of a task whose worker is gone with all that it knew."""
_PR_SET_PDEATHSIG = 1
_TICK = 0.5
"""Seconds for which a signal waits while ray is asked."""
_MOST_SAID = 100_000
"""Characters of what a task said that are kept: the last."""


@dataclass(frozen=True, slots=True)
class Task:
    """A command line that is to be run."""

    number: int
    """Its own, from 1."""
    words: tuple[str, ...]
    folder: str
    """Where it is run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a task."""

    code: int
    """Exit code; minus the number of the signal that ended it."""
    said: str = ""
    """What it wrote to its standard error."""
    seconds: float = 0.0
    megabytes: float = 0.0
    """Most memory of one of its processes; 0 where nobody knows."""
    host: str = ""

    @property
    def is_lost(self) -> bool:
        """Tell whether a signal ended it: another try may do better."""
        return self.code < 0 or self.code > 128

    @property
    def error(self) -> str:
        """The last line that it said, which names the error."""
        lines = self.said.strip().splitlines() or [f"it ended with exit code {self.code}"]
        return lines[-1].removeprefix("error: ")


class Engine(Protocol):
    """Runs tasks somewhere."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Outcome]]:
        """Run tasks, and yield what became of each; ends those under way when it is closed."""
        ...


def run_task(task: Task) -> Outcome:
    """Run a command line in a process that does not outlive this one, and wait for it."""
    host, began = platform.node(), time.monotonic()
    if not Path(task.folder).is_dir():
        return Outcome(
            1, f"{host} does not see {task.folder}: workers need the same files", host=host
        )
    with tempfile.TemporaryFile() as said:
        process = None
        try:
            with signals_held():
                process = subprocess.Popen(
                    task.words,
                    cwd=task.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    preexec_fn=_end_with_the_parent,
                )
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:
            if process is not None:
                process.terminate()
                process.wait()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(max(0, said.seek(0, os.SEEK_END) - _MOST_SAID))
        text = said.read().decode(errors="replace")
    seconds = time.monotonic() - began
    return Outcome(process.returncode, text, seconds, used.ru_maxrss / 1024, host)


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def _end_with_the_parent() -> None:
    """Ask the system to end the process when a worker is killed: its part is begun elsewhere."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Local:
    """Runs tasks here, one after the other: each uses all cores."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Outcome]]:
        """Run tasks; see ``Engine``."""
        for task in tasks:
            yield task, run_task(task)


class Dask:
    """Runs tasks by the workers of dask.

    Args:
        address: of a scheduler; if empty, workers of this machine are started, and ended.

    Raises:
        FastSiamError: dask is not installed, or the scheduler does not answer.
    """

    def __init__(self, address: str = "") -> None:
        self._dask, self._distributed = _required("dask", "dask"), _required("distributed", "dask")
        self._address = address or os.environ.get("DASK_SCHEDULER_ADDRESS", "")

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Outcome]]:
        """Run tasks; see ``Engine``."""
        dask = self._distributed
        with self._dask.config.set({"distributed.scheduler.allowed-failures": 0}):
            cluster = (
                None
                if self._address
                else dask.LocalCluster(
                    threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL
                )
            )
            try:
                try:
                    client = dask.Client(cluster or self._address, set_as_default=False)
                except (OSError, ValueError) as error:
                    raise FastSiamError(
                        f"no scheduler of dask answers at {self._address} ({error})"
                    ) from error
                with client:
                    futures = {
                        client.submit(run_task, x, key=_key(x), pure=False): x for x in tasks
                    }
                    try:
                        for future in dask.as_completed(futures, loop=client.loop):
                            yield futures[future], _outcome(future.result)
                    finally:
                        client.cancel(list(futures), force=True)
            finally:
                if cluster is not None:
                    cluster.close()


class Ray:
    """Runs tasks by the workers of ray.

    Args:
        address: of a cluster; if empty, one of this machine is started, and ended.

    Raises:
        FastSiamError: ray is not installed, or the cluster does not answer.
    """

    def __init__(self, address: str = "") -> None:
        self._ray = _required("ray", "ray")
        self._address = address or os.environ.get("RAY_ADDRESS", "")

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Outcome]]:
        """Run tasks; see ``Engine``."""
        ray = self._ray
        before = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                address=self._address or "local",
                include_dashboard=False if not self._address else None,
                log_to_driver=False,
                logging_level="error",
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise FastSiamError(
                f"no cluster of ray answers at {self._address} ({error})"
            ) from error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # ray's own exits without a word of ours
        try:
            remote = ray.remote(max_retries=0)(run_task)
            waiting = {remote.remote(task): task for task in tasks}
            while waiting:
                with signals_held():  # an exception of a handler's would be ray's own fault to it
                    found, _ = ray.wait(list(waiting), num_returns=1, timeout=_TICK)
                for ready in found:
                    yield waiting.pop(ready), _outcome(partial(ray.get, ready))
        finally:
            ray.shutdown()


_ARRAY = """\
#!/bin/bash
#SBATCH --job-name=fastsiam-convert
#SBATCH --output=/dev/null
#SBATCH --array={numbers}
{options}
# Written by fastsiam. Each task of the array makes one part; what it said and its exit code are
# kept beside this file, until the conversion has read them.
cd {folder} || exit 1
{here}/$SLURM_ARRAY_TASK_ID.task > /dev/null 2> {here}/$SLURM_ARRAY_TASK_ID.said
code=$?
hostname > {here}/$SLURM_ARRAY_TASK_ID.host
echo $code > {here}/$SLURM_ARRAY_TASK_ID.code
"""


class Slurm:
    """Runs tasks as an array of SLURM's, and waits for all of it.

    Args:
        options: of sbatch, such as ``--partition=cpu``.
        folder: where all machines can write.

    Raises:
        FastSiamError: there is no ``sbatch``, or it refuses the job.
    """

    def __init__(self, options: str, folder: Path) -> None:
        if shutil.which("sbatch") is None:
            raise FastSiamError("there is no sbatch here; run it on a machine of SLURM's")
        self._options, self._folder = shlex.split(options), folder.resolve()

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Outcome]]:
        """Run tasks; see ``Engine``."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder, prefix=".slurm-") as name:
            here = Path(name)
            for task in tasks:
                file = here / f"{task.number}.task"
                file.write_text(f"#!/bin/sh\nexec {shlex.join(task.words)}\n")
                file.chmod(0o755)
            script = here / "array"
            script.write_text(
                _ARRAY.format(
                    numbers=",".join(str(task.number) for task in tasks),
                    options="".join(f"#SBATCH {option}\n" for option in self._options),
                    folder=shlex.quote(tasks[0].folder),
                    here=shlex.quote(str(here)),
                )
            )
            self._wait_for(script)
            for task in tasks:
                yield task, _left_by(here, task.number)

    def _wait_for(self, script: Path) -> None:
        """Submit an array and wait until the last of its tasks has ended."""
        process, job = None, ""
        try:
            with signals_held():  # until it is known what is to be cancelled
                process = subprocess.Popen(
                    ["sbatch", "--wait", "--parsable", str(script)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,  # Ctrl-C is for this process alone
                )
                assert process.stdout is not None
                job = process.stdout.readline().strip().partition(";")[0]
            _, said = process.communicate()
        except BaseException:
            if process:
                process.kill()
            if job:
                subprocess.run(["scancel", job], check=False)
            raise
        if not job:
            raise FastSiamError(f"sbatch refuses the job: {' '.join(said.split())}")


def _left_by(folder: Path, number: int) -> Outcome:
    """Return what a task of an array left; one that left no exit code is lost."""
    code, said, host = (folder / f"{number}.{kind}" for kind in ("code", "said", "host"))
    if not code.is_file():
        return Outcome(LOST)
    return Outcome(
        int(code.read_text()),
        said.read_text(errors="replace")[-_MOST_SAID:],
        host=host.read_text().strip(),
    )


def engine_of(config: ConvertConfig, out: Path) -> Engine:
    """Return the engine that is asked for.

    Args:
        config: names it.
        out: the folder of the parts.

    Raises:
        FastSiamError: it is not there.
    """
    be_found_by_children()
    match config.engine:
        case "dask":
            return Dask(config.engine_address)
        case "ray":
            return Ray(config.engine_address)
        case "slurm":
            return Slurm(config.engine_options, out)
    return Local()


def _required(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise FastSiamError(
            f"--engine {extra} needs {extra}: pip install 'fastsiam[{extra}]'"
        ) from error


def _outcome(result: Callable[[], Outcome]) -> Outcome:
    """Return a task's outcome; an error of the engine's own is that its worker is lost."""
    try:
        return result()
    except FastSiamError:
        raise
    except Exception as error:
        return Outcome(LOST, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _key(task: Task) -> str:
    return f"fastsiam-{os.getpid()}-{time.monotonic_ns()}-{task.number}"


def tasks_of(words: Sequence[str], numbers: Iterable[int], count: int) -> list[Task]:
    """Return the tasks that make parts.

    Args:
        words: the arguments of the whole conversion, after ``fastsiam``.
        numbers: of the parts.
        count: how many there are in all.
    """
    own = ("--engine", "local", "--parts", "0")
    return [
        Task(
            number,
            (sys.executable, "-m", "fastsiam", *words, *own, "--part", f"{number}/{count}"),
            os.getcwd(),
        )
        for number in numbers
    ]
