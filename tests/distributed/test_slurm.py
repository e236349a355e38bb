"""SLURM jobs: the generated script and its effects, and one job on a real local cluster."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastsiam.cli.options import settings_of_resumed
from fastsiam.config import TrainConfig
from fastsiam.config.run import SlurmConfig
from fastsiam.distributed import slurm
from fastsiam.distributed.slurm import slurm_script
from fastsiam.errors import FastSiamError
from fastsiam.run import checkpoint as checkpoints
from tests.commands import parse
from tests.configs import flags, with_settings
from tests.conftest import ROOT, import_or_skip
from tests.processes import fastsiam
from tests.ranks import fastsiam_on_ranks
from tests.slurm import Cluster, cluster
from tests.sources import put
from tests.train.runs import history, train_run

SEVERAL = {"nodes": 4, "gpus": 8, "rendezvous": "node:29500", "batch": 512}
SBATCH_OPTIONS = {
    # options of sbatch(1), and patterns of valid values
    "job-name": r"\S+", "partition": r"\S+", "account": r"\S+", "array": r"[\d,-]+",
    "nodes": r"\d+", "ntasks-per-node": r"\d+", "gpus-per-node": r"\d+", "cpus-per-task": r"\d+",
    "mem": r"\d+[KMGT]?", "time": r"\d+-\d+|\d+:\d\d:\d\d", "signal": r"USR1@\d+",
    "open-mode": r"append|truncate", "output": r"\S+\.log", "requeue": "", "exclusive": "",
    "constraint": "h100 & nvme",
}  # fmt: skip


def options(script: str) -> dict[str, str]:
    lines = re.findall(r"^#SBATCH (--.+)$", script, re.M)
    assert len(lines) == script.count("#SBATCH")
    directives = [word.removeprefix("--").partition("=") for x in lines for word in shlex.split(x)]
    assert len({name for name, _, _ in directives}) == len(directives)
    return {name: value for name, _, value in directives}


@pytest.mark.parametrize(
    ("run", "job"),
    [
        (SEVERAL, SlurmConfig(time="2-12", partition="gpu", account="a", mem="0", seeds="0-4")),
        ({"gpus": 2}, SlurmConfig(sbatch="--constraint='h100 & nvme' --exclusive", warning=60)),
    ],
)
def test_sbatch_directives_are_valid(
    run: dict[str, object], job: SlurmConfig, small: TrainConfig
) -> None:
    script = slurm_script("imagenet", with_settings(small, device="auto", **run), job)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    directives = options(script)
    for name, value in directives.items():
        assert re.fullmatch(SBATCH_OPTIONS[name], value), (name, value)
    ranks = int(str(run.get("gpus", 1)))
    assert directives["ntasks-per-node"] == "1" and directives["gpus-per-node"] == str(ranks)
    assert directives["cpus-per-task"] == str(12 * ranks) and directives["nodes"] == str(
        run.get("nodes", 1)
    )
    assert directives["signal"] == f"USR1@{job.warning}" and "requeue" in directives
    on_cpu = slurm_script("imagenet", with_settings(small, **run), job)
    assert "gpus-per-node" not in options(on_cpu)
    elastic = slurm_script("imagenet", with_settings(small, **SEVERAL | {"nodes": "2:4"}), job)
    assert options(elastic)["nodes"] == "2-4" and " --nodes 2:4 --rendezvous " in elastic


@pytest.mark.parametrize("run", [{}, SEVERAL])
def test_srun_command_has_every_setting(run: dict[str, object], small: TrainConfig) -> None:
    """The command has every setting, except those that the job sets with shell variables."""
    config = with_settings(small, **run)
    script = slurm_script("cifar10", config, SlurmConfig())
    (line,) = re.findall(r"^srun .* -m fastsiam train (.*)$", script, re.M)
    line, count = re.subn(r"\$head:\S+ \+ .*\)\)", "node:29500", line)
    assert count == bool(run)
    recipe, parsed_config = parse(*shlex.split(line))
    assert recipe == "cifar10" and parsed_config.run.out == "$out"
    assert with_settings(parsed_config, out=config.run.out) == config


def test_srun_command_resumes_with_given_settings(small: TrainConfig, tmp_path: Path) -> None:
    """This includes settings equal to the recipe's. All others keep the values of the run."""
    run = tmp_path / "run"
    began = with_settings(small, lr=0.1, max_steps=100, init="weights.pt", out=run)
    record = {"recipe": "imagenet", "config": began.to_dict()}
    put(run / "config.json", json.dumps(record))
    arguments = ["--resume", str(run), "--out", "$out", "--lr", "0.05", "--max-steps", "0"]
    config = parse(*arguments)[1]
    assert config.optim.lr == TrainConfig().optim.lr
    resumed = settings_of_resumed(config.run)
    script = slurm_script("imagenet", config, SlurmConfig(), resumed=resumed)
    (line,) = re.findall(r"^srun .* -m fastsiam train (.*)$", script, re.M)
    line = line.replace('"$start"', str(run))
    assert parse(*shlex.split(line))[1] == config and "--init" not in line


def test_job_resumes_on_requested_devices_with_data_of_run(
    small: TrainConfig, tmp_path: Path
) -> None:
    """The run was trained on four machines; its settings may change before the job starts."""
    run = tmp_path / "run"
    began = with_settings(small, **SEVERAL, data="a", mixed_with=("b",), weights=(0.7, 0.3))
    put(run / "config.json", json.dumps({"recipe": "imagenet", "config": began.to_dict()}))
    config = parse("--resume", str(run), "--nodes", "1")[1]
    script = slurm_script(
        "imagenet", config, SlurmConfig(), resumed=settings_of_resumed(config.run)
    )
    assert options(script)["nodes"] == "1"
    (line,) = re.findall(r"^srun .* -m fastsiam train (.*)$", script, re.M)
    line = line.replace('"$start"', str(run)).replace('"$out"', str(run))
    put(run / "config.json", json.dumps({"recipe": "imagenet", "config": small.to_dict()}))
    resumed = parse(*shlex.split(line))[1]
    assert (resumed.run.max_nodes, resumed.run.gpus, resumed.run.device) == (1, 8, "cpu")
    assert (resumed.data.data, resumed.data.mixed_with) == ("a", ("b",))


def test_requeued_branch_resumes_itself(small: TrainConfig, tmp_path: Path) -> None:
    """The original run may have overtaken it."""
    config = with_settings(small, resume="a b/run", out=tmp_path / "run")
    script = slurm_script("imagenet", config, SlurmConfig(), resumed=small.to_flags())
    for start in ("a b/run", str(tmp_path / "run")):
        (call,) = re.findall(r"^srun .*", run_script(script, tmp_path)[1], re.M)
        assert call.endswith(f"--resume {start} --out {tmp_path}/run")
        put(tmp_path / "run" / "checkpoints" / "last.pt", "")


def test_first_data_set_of_mixture_may_be_default() -> None:
    config = with_settings(TrainConfig(), mixed_with=("b", "c"))
    line = slurm_script("imagenet", config, SlurmConfig())
    assert " --data '' --data b --data c " in line
    assert parse("--data", "", "--data", "b", "--data", "c")[1].data == config.data


FAKE_PROGRAM = """\
#!/bin/bash
echo "${0##*/} $*" >> "$CALLS"
case "${0##*/} $*" in
    srun*) exit "$CODE" ;;
    *hostnames*) printf 'node7\\nnode8\\n' ;;
    *"show job"*) echo "JobId=7 JobState=$STATE Restarts=0" ;;
esac
"""


def run_script(script: str, folder: Path, **environment: str) -> tuple[int, str]:
    """Run a job script with fake SLURM programs that log their calls; return exit code and log."""
    for name in ("srun", "scontrol"):
        (folder / name).write_text(FAKE_PROGRAM)
        (folder / name).chmod(0o755)
    calls = folder / "calls"
    calls.unlink(missing_ok=True)
    of_slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_CPUS_PER_TASK": "96"}
    usual = {"CALLS": str(calls), "CODE": "0", "STATE": "RUNNING", **of_slurm}
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    result = subprocess.run(
        ["bash"], input=script, text=True, env={"PATH": path, **usual, **environment}
    )
    return result.returncode, calls.read_text()


REQUEUE_CASES: list[tuple[str, dict[str, str], str]] = [
    # exit code of srun, other variables, the requeued job
    ("0", {}, ""),
    ("1", {}, ""),
    ("255", {}, ""),  # one of several machines had an error
    ("75", {}, "7"),
    ("137", {}, "7"),
    ("138", {}, "7"),
    ("143", {"STATE": "PREEMPTED"}, "7"),
    ("143", {"STATE": "CANCELLED"}, ""),  # the user ended it with scancel
    ("138", {"SLURM_RESTART_COUNT": "99"}, "7"),
    ("138", {"SLURM_RESTART_COUNT": "100"}, ""),
    # The array task that starts last has the ID of the array, which would requeue all tasks.
    ("75", {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "4"}, "7_4"),
]


def test_requeue_depends_on_exit_code_and_job_state(small: TrainConfig, tmp_path: Path) -> None:
    script = slurm_script("imagenet", small, SlurmConfig())
    for code, variables, again in REQUEUE_CASES:
        exit_code, calls = run_script(script, tmp_path, CODE=code, **variables)
        assert exit_code == int(code)
        requeued = re.findall(r"^scontrol requeue (\S+)$", calls, re.M)
        assert requeued == [again] * bool(again), (code, variables)


def test_error_on_one_machine_outweighs_lost_rank(small: TrainConfig) -> None:
    """srun returns the highest exit code of its tasks: one had an error, others lost a rank."""
    script = slurm_script("imagenet", with_settings(small, **SEVERAL), SlurmConfig())
    (launch,) = re.findall(r"^launch='(.*)'$", script, re.M)
    for code, highest in ((75, 75), (1, 255), (0, 0)):
        one = ["bash", "-c", launch, "-", "bash", "-c", f"exit {code}"]
        assert subprocess.run(one).returncode == highest


def test_job_sets_folder_seed_and_rendezvous(small: TrainConfig, tmp_path: Path) -> None:
    """The job sets the run's folder, the seed and the rendezvous. A requeued job resumes."""
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}
    meeting = f"--out {tmp_path}/run/seed-3 --seed 3 --nodes 4 --rendezvous node7:20007"
    never, again = {"resume": "never"}, {"SLURM_RESTART_COUNT": "1"}
    for run, job, variables, end in (
        ({"out": ""}, SlurmConfig(name="r50"), {}, "--out runs/r50-7"),
        (SEVERAL, SlurmConfig(seeds="0-4"), array, meeting),
        (never, SlurmConfig(), {}, f"--out {tmp_path}/run"),
        (never, SlurmConfig(), again, f"--out {tmp_path}/run --resume auto"),
    ):
        script = slurm_script("imagenet", with_settings(small, **run), job)
        (call,) = re.findall(r"^srun .*", run_script(script, tmp_path, **variables)[1], re.M)
        assert call.endswith(end) and ("--resume never" in call) == (run is never)


def test_invalid_sbatch_values_are_rejected() -> None:
    for name, value, says in (
        ("time", "a day", "time must not contain spaces"),
        ("seeds", "0..4", "seeds must be numbers and ranges"),
        ("seeds", "1,4-0", "seeds 4-0: the smaller number goes first"),
        ("name", "a'b", "name may have letters, digits and"),
        ("sbatch", "--a\n--b", "sbatch must be one line"),
    ):
        with pytest.raises(ValueError, match=says):
            SlurmConfig.from_flags({name: value})


def test_impossible_runs_are_rejected_before_they_queue(small: TrainConfig) -> None:
    remote = with_settings(small, out="s3://bucket/run")
    with pytest.raises(FastSiamError, match="results can only be written to a local path"):
        slurm_script("imagenet", remote, SlurmConfig())
    with pytest.raises(FastSiamError, match="a resumed run keeps its seed"):
        slurm_script("imagenet", small, SlurmConfig(seeds="0-2"), resumed=small.to_flags())
    stderr = fastsiam("slurm", "--nodes", "2:3", "--batch", "16", code=2).stderr
    assert "batch 16 is not divisible by 3 ranks" in " ".join(stderr.split())


def test_slurm_command_prints_script(small: TrainConfig) -> None:
    arguments = ["--nodes", "4", "--gpus", "8", "--time", "2:00:00", "--lr", "0.1"]
    script = fastsiam("slurm", *arguments).stdout
    assert options(script)["time"] == "2:00:00" and options(script)["nodes"] == "4"
    assert " --lr 0.1 " in script and '--rendezvous "$head:' in script


def test_job_that_would_resume_another_checkpoint_is_rejected(stopped_copy: TrainConfig) -> None:
    run = train_run(stopped_copy, max_steps=8)
    older = checkpoints.previous(run)
    stderr = fastsiam("slurm", "--resume", str(older), code=1).stderr
    assert f"{older} is at step" in stderr and "or another --out to branch off" in stderr
    assert "srun" in fastsiam("slurm", "--resume", str(run)).stdout


def test_submission_needs_submitit_and_sbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(FastSiamError, match=r"pip install 'fastsiam\[slurm\]'"):
        slurm.submit("", folder=tmp_path)
    monkeypatch.undo()
    import_or_skip("submitit", "slurm")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FastSiamError, match="sbatch not found"):
        slurm.submit("", folder=tmp_path)


def test_submission_returns_job_id_or_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_or_skip("submitit", "slurm")
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))

    def submit(program: str, folder: str = "scripts") -> str:
        for name in ("sbatch", "srun"):
            (tmp_path / name).write_text(f'#!/bin/bash\ncp "$1" {tmp_path}/got\n{program}\n')
            (tmp_path / name).chmod(0o755)
        return slurm.submit("#!/bin/bash\n# ours\n", folder=tmp_path / folder)

    assert submit("echo Submitted batch job 4711") == "4711"
    assert (tmp_path / "got").read_text() == "#!/bin/bash\n# ours\n"
    with pytest.raises(FastSiamError, match=r"^sbatch rejects the job: invalid partition \S+$"):
        submit("echo 'sbatch: error: invalid partition x' >&2; exit 1")
    with pytest.raises(FastSiamError, match=rf"^cannot write {tmp_path}/got: .* is not a folder$"):
        submit("", folder="got")


@pytest.fixture
def here() -> Iterator[Cluster]:
    with cluster() as slurm_cluster:
        yield slurm_cluster


@pytest.mark.slow
@pytest.mark.parametrize("signalled", ["preempted", "USR1"])
def test_requeued_job_reproduces_run(
    signalled: str,
    small: TrainConfig,
    tmp_path: Path,
    here: Cluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run SLURM on two nodes with a launcher on each. Another job interrupts it for a while."""
    import_or_skip("submitit", "slurm")
    run = tmp_path / "run"
    config = with_settings(
        small, nodes=2, rendezvous="node:29500", epochs=10, knn_every=0, out=str(run)
    )
    job = SlurmConfig(time="1:00:00", cpus=1, partition="low")
    script = slurm_script("imagenet", config, job)
    # Rank 0 of the first try waits for the signal. In the second try, the marker file exists.
    fault = {"FAULT": "wait", "FAULT_RANK": "0", "FAULT_AT": "9", "FAULT_ONCE": f"{tmp_path}/once"}
    path = os.pathsep.join([str(ROOT / "tests" / "faults"), str(ROOT)])
    inside = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **here.environment, **fault}
    for name, value in inside.items():  # sbatch passes the environment on
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    number = slurm.submit(script, folder=tmp_path / "scripts")
    here.wait((tmp_path / "once").exists)
    if signalled == "preempted":
        other = ["--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null"]
        here.call("sbatch", *other, "--wrap=sleep 3", folder=tmp_path)
    else:  # like --signal before the time limit
        here.call("scancel", "--signal=USR1", number)
    here.wait(lambda: "Restarts=1" in here.shows(number))
    before = len(history(run))
    assert 0 < before < 30
    # SLURM waits two minutes for remains of the first try. They are gone once the nodes are idle.
    here.wait(lambda: "JobState=PENDING" in here.shows(number) and here.idle == 2)
    # Delay the start: slurmd refuses what is granted in the second in which the first try ended.
    here.call("scontrol", "update", f"jobid={number}", "starttime=now+3")
    final_states = ("COMPLETED", "FAILED", "CANCELLED")
    here.wait(lambda: any(f"JobState={x}" in here.shows(number) for x in final_states))
    log = next(tmp_path.glob("fastsiam-*.log")).read_text()
    assert "JobState=COMPLETED" in here.shows(number), here.shows(number) + log
    assert f"resuming after step {before}" in log and "SIG" in log
    alone = flags(with_settings(config, nodes=1, rendezvous="", gpus=2))
    fastsiam_on_ranks(2, "train", *alone, "--out", str(tmp_path / "whole"))
    assert history(run) == history(tmp_path / "whole") and len(history(run)) == 30
