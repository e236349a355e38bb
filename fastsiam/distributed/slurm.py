"""SLURM: the job script of a training run, and its submission."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fastsiam
from fastsiam.child_process import own_program
from fastsiam.config import TrainConfig
from fastsiam.config.run import SlurmConfig
from fastsiam.config.settings_files import Settings, merge
from fastsiam.config.train import as_arguments
from fastsiam.errors import FastSiamError
from fastsiam.files import os_errors_as, require_local

_PORT = "$((20000 + SLURM_JOB_ID % 40000))"
"""Port of the rendezvous; two jobs on the same machine rarely share it."""

_SCRIPT = """\
#!/bin/bash
{options}

# Written by fastsiam {version}. On each machine a launcher starts one process for each GPU.
# {warning} s before the time limit, and when the job is preempted, the run saves and exits with one
# of the codes below. The job then requeues itself, and the run resumes.
trap : TERM USR1 CONT  # these are for the run, which this shell waits for
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun ignores the job's own since SLURM 22.05
out={out}
{start}{head}srun --kill-on-bad-exit=0 {command}
code=$?
job=$SLURM_JOB_ID
if [[ ${{SLURM_ARRAY_TASK_ID-}} ]]; then  # the last task has the job number of the whole array
    job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
fi
state=$(scontrol show job --oneliner "$job" | grep -o 'JobState=[A-Z]*')
if [[ $code =~ ^(75|137|138|143)$ && $state != JobState=CANCELLED ]] &&
    ((${{SLURM_RESTART_COUNT:-0}} < {requeues})); then
    scontrol requeue "$job"
fi
exit $code
"""
_START = """\
start={resume}
[[ -e $out/checkpoints/last.pt ]] && start=$out  # a branch continues, even if that run does too
"""
_HEAD = """\
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# srun exits with the highest code of all machines: an error, 255, outweighs a lost rank, 75.
launch='trap : TERM USR1 CONT; "$@"; code=$?; exit $((code == 1 ? 255 : code))'
"""


def slurm_script(
    recipe: str, config: TrainConfig, job: SlurmConfig, *, resumed: Mapping[str, Any] | None = None
) -> str:
    """Return a job script for ``sbatch`` that runs ``fastsiam train``.

    Args:
        recipe: name of the recipe that the settings are based on.
        config: the run's settings.
        job: options of the job.
        resumed: settings of the run passed to ``--resume``, if any.

    Raises:
        FastSiamError: several seeds are to resume one run, or the run's folder is a URL.
    """
    require_local(Path(config.run.out))
    if job.seeds and resumed:
        raise FastSiamError("a resumed run keeps its seed: pass --seeds or --resume RUN, not both")
    is_multi_node = config.run.max_nodes > 1
    arguments = _arguments(recipe, config, job, resumed)
    words = [sys.executable, *own_program(), "train", *arguments]
    command = shlex.join(words) + ' --resume "$start"' * bool(resumed) + ' --out "$out"'
    if config.run.resume == "never":
        command += " ${SLURM_RESTART_COUNT:+--resume auto}"  # if the job was requeued
    if job.seeds:
        command += ' --seed "$SLURM_ARRAY_TASK_ID"'
    if is_multi_node:
        command += f' --nodes {config.run.nodes} --rendezvous "$head:{_PORT}"'
        command = f'bash -c "$launch" fastsiam {command}'
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {line}" for line in _options(config, job)),
        version=fastsiam.__version__,
        warning=job.warning,
        out=_out(config.run.out, job),
        start=_START.format(resume=shlex.quote(config.run.resume)) if resumed else "",
        head=_HEAD if is_multi_node else "",
        command=command,
        requeues=job.requeues,
    )


def _options(config: TrainConfig, job: SlurmConfig) -> list[str]:
    """Return the ``sbatch`` options."""
    run = config.run
    options = {
        "job-name": job.name,
        "partition": job.partition,
        "account": job.account,
        "array": job.seeds,
        "nodes": str(run.nodes).replace(":", "-"),
        "ntasks-per-node": 1,
        "gpus-per-node": 0 if run.device == "cpu" else run.gpus,
        "cpus-per-task": job.cpus * run.gpus,
        "mem": job.mem,
        "time": job.time,
        # Without B:, SLURM signals the ranks directly; this shell would handle it too late.
        "signal": f"USR1@{job.warning}",
        "open-mode": "append",
        "output": f"{job.name}-{'%A_%a' if job.seeds else '%j'}.log",
    }
    extra = [job.sbatch.strip()] if job.sbatch.strip() else []
    return [*(f"--{name}={x}" for name, x in options.items() if x), "--requeue", *extra]


def _out(out: str, job: SlurmConfig) -> str:
    """Return the run's folder as a shell word that is the same after a requeue."""
    number = "$SLURM_ARRAY_JOB_ID" if job.seeds else "$SLURM_JOB_ID"
    folder = shlex.quote(out) if out else f'runs/{job.name}-"{number}"'
    return folder + ('/seed-"$SLURM_ARRAY_TASK_ID"' if job.seeds else "")


def _arguments(
    recipe: str, config: TrainConfig, job: SlurmConfig, resumed: Mapping[str, Any] | None
) -> list[str]:
    """Return the shortest command line for the settings, without those that the script sets."""
    recipe_settings = Settings(recipe=recipe, flags={"method": config.model.method.name})
    defaults = resumed or merge(recipe_settings).flags
    script_settings = {"rendezvous", "out", *["seed"] * bool(job.seeds)}
    script_settings |= {"nodes"} if config.run.max_nodes > 1 else set()
    script_settings |= {"resume"} if resumed else set()
    required = {"method", *(["data", "mixed_with"] if config.data.mixed_with else [])}
    required |= {"nodes", "gpus", "device"} if resumed else set()  # as requested by the job
    flags = {
        name: value
        for name, value in config.to_flags().items()
        if name not in script_settings and (value != defaults.get(name) or name in required)
    }
    return ["--recipe", recipe, *as_arguments(flags)]


def submit(script: str, *, folder: Path) -> str:
    """Submit a script to SLURM through submitit; return the job number.

    submitit's own script would requeue the job at the first signal, before the ranks have saved.
    submitit saves this script in ``folder`` under the job number.

    Raises:
        FastSiamError: submitit or SLURM is missing, ``folder`` cannot be created, or ``sbatch``
            rejects the job.
    """
    try:
        import submitit
    except ImportError as error:
        raise FastSiamError("--submit needs submitit: pip install 'fastsiam[slurm]'") from error
    if shutil.which("sbatch") is None:
        raise FastSiamError("--submit: sbatch not found; run this command on a SLURM machine")

    class Executor(submitit.SlurmExecutor):
        def _make_submission_file_text(self, command: str, uid: str) -> str:
            return script

    with os_errors_as(FastSiamError, f"cannot write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        job = Executor(folder)._submit_command("")
    except submitit.core.utils.FailedJobError as error:
        # submitit's message contains sbatch's.
        messages = re.findall(r"sbatch: error: (.+)", str(error))
        reason = "; ".join(messages) or str(error).strip().splitlines()[-1]
        raise FastSiamError(f"sbatch rejects the job: {reason}") from error
    except (subprocess.SubprocessError, OSError) as error:
        raise FastSiamError(f"cannot submit the job: {error}") from error
    return str(job.job_id)
