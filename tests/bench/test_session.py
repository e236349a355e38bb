"""``fastsiam bench`` end to end, with small data and networks."""

from __future__ import annotations

import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastsiam.bench.bench_images import Images
from fastsiam.bench.cases.decode import OUR_PART, OURS, TURBO, TURBO_PART
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.measurements import read
from fastsiam.bench.session import run, session
from fastsiam.config import METHOD_CONFIGS, Pipeline, SimSiamConfig
from fastsiam.errors import BackendError, FastSiamError
from fastsiam.pipelines.backends import BACKENDS
from tests.bench.sample_records import bench
from tests.processes import Forked, fastsiam, wait_until


def test_unmeasurable_variant_ends_with_error(bench_config: BenchConfig, tmp_path: Path) -> None:
    """The other variants are still measured and written."""
    config = replace(bench_config, recipe="simclr_cifar10", backbone="resnet10", crop=16)
    config = replace(config, variants=("authors", "eager"), json=str(tmp_path / "out.json"))
    with pytest.raises(BackendError, match=r"not measured: authors \(the authors' step is for "):
        run("step", config)
    assert [one.name for one in read(tmp_path / "out.json")] == ["eager"]


def test_error_if_nothing_could_be_measured(
    bench_config: BenchConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    engine: dict[str, Any] = {"over": "jpeg-engine", "pipelines": ("native", "dali")}
    for case, changes in (("step", {"variants": ("fp16",)}), ("sweep", engine)):
        with pytest.raises(BackendError, match="nothing could be measured; the reasons are above"):
            run(case, replace(bench_config, **changes))
    stderr = capsys.readouterr().err
    assert "fp16: not measured: needs a GPU" in stderr
    assert "jpeg-engine does not affect torchvision, native, dali on a CPU\n" in stderr


def test_skipped_form_is_logged(
    bench_config: BenchConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    skipped: dict[Pipeline, str] = {"memory": "images only once", "ffcv": "a .beton file anyway"}
    with session(replace(bench_config, stored=("tar", "pixels256"))) as bench_session:
        assert bench_session.forms("native") == ["tar", "pixels256"]
        for pipeline, reads in skipped.items():
            assert bench_session.forms(pipeline) == ["pixels256"]
            assert capsys.readouterr().err == f"{pipeline}, tar: not measured: it reads {reads}\n"


@pytest.mark.parametrize(
    ("case", "recipe"), [("peers", "fastsiam_cifar10"), ("peers", "byol"), ("storage", "byol")]
)
def test_recipe_with_other_views_is_rejected(
    case: str, recipe: str, bench_config: BenchConfig
) -> None:
    with pytest.raises(FastSiamError, match=f"--recipe {recipe} does not make two views with the"):
        run(case, replace(bench_config, recipe=recipe))


@pytest.mark.dali
def test_bench_without_case_measures_all(bench_config: BenchConfig, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    result = bench(
        "--pipelines", "native,memory", "--data", bench_config.data, "--recipe", "demo",
        "--batch", "8", "--images", "24", "--workers", "1", "--repeats", "1", "--device", "cpu",
        "--json", str(file), "--stored", "original,pixels256",
    )  # fmt: skip
    last = result.stdout.splitlines()[-1]
    assert "torchvision's loader delivers" in last
    assert "--workers auto would choose about 1 of 1 loader threads" in last
    assert not Path(next(w for w in result.stderr.split() if "fastsiam-bench-" in w)[:-1]).exists()
    records = read(file)
    assert records[0].command.startswith("fastsiam bench --")
    assert all(one.n == 1 and one.host_bytes > 0 for one in records)
    assert {one.case for one in records} == {"decode", "loader", "train"}

    loaded = {one.name: one for one in records if one.case in ("decode", "loader")}
    assert {"PIL", "torchvision.io", "DALI", TURBO, TURBO_PART, OURS, OUR_PART} <= set(loaded)
    assert {one.decoder for one in BACKENDS.values() if one.decoder} <= set(loaded)
    for pipeline in ("torchvision", "native", "memory"):
        assert {f"{pipeline} crops", f"{pipeline} views"} <= set(loaded)
    assert {"native crops, pixels256", "native views, pixels256"} <= set(loaded)
    assert all(one.images == 24 for one in loaded.values())
    views, base = loaded["native views"], loaded["torchvision views"]
    bare = {"PIL", "torchvision.io", TURBO, "DALI"}
    fastest = max(one.images_per_second for one in records if one.name in bare)
    assert views.ratio == pytest.approx(views.images_per_second / base.images_per_second)
    assert views.share_of_ceiling == pytest.approx(views.images_per_second / fastest)
    assert loaded["memory views"].share_of_ceiling is None
    assert loaded["native views, pixels256"].share_of_ceiling is None
    assert base.facts["processes"] >= 2 and base.facts["workers"] == 1

    fed = {one.name: one for one in records if one.case == "train"}
    smaller = {"native, pixels256", "memory, pixels256"}
    assert set(fed) == {"synthetic", "torchvision", "native", "memory"} | smaller
    assert fed["synthetic"].share_of_ceiling == 1 and fed["torchvision"].ratio_to_torchvision == 1
    assert all(0 <= one.facts["data_wait"] <= 1 for one in fed.values())
    assert fed["torchvision"].images == fed["torchvision"].facts["steps"] * 8
    used = [one.config["numerics"]["precision"] for one in fed.values()]
    assert len(set(used)) == 1 and used[0] in ("bf16", "fp32")  # the resolved precision, not "auto"

    bench("report", str(file), "--out", str(tmp_path / "report"))
    assert (tmp_path / "report" / "index.html").exists()


@pytest.mark.parametrize(
    ("device", "workers", "batches"),
    [("cpu", 2, 8), ("cpu", 24, 48), ("cpu", 128, 128), ("cuda", 16, 64), ("cuda", 48, 96)],
)
def test_workers_load_equal_numbers_of_batches(
    device: str, workers: int, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise some DataLoader workers would be idle."""

    def take(_: object, count: int, folder: Path, __: object) -> Images:
        return Images(folder, count, "")

    monkeypatch.setattr("fastsiam.bench.session.take_images", take)
    with session(BenchConfig(workers=workers, device="cpu")) as bench_session:
        bench_session.device = device
        assert (
            bench_session.images(bench_session.loaded_batch).count
            == batches * bench_session.loaded_batch
        )


def test_signal_removes_processes_and_temporary_files(tmp_path: Path) -> None:
    """Also if a second signal follows: `timeout` signals the process and then its group."""
    process = Forked(_measure_for_ever, environment={"TMPDIR": str(tmp_path)})
    try:
        wait_until(process, lambda: "\nmeasuring" in process.messages())
        started = psutil.Process(process.pid).children(recursive=True)
        assert started and any(tmp_path.glob("fastsiam-bench-*"))
    finally:
        for number in (signal.SIGSTOP, signal.SIGHUP, signal.SIGTERM, signal.SIGCONT):
            process.send(number)
        result = process.wait(60)
    assert result.returncode == 128 + signal.SIGHUP and "Traceback" not in result.stderr
    assert not any(tmp_path.glob("fastsiam-bench-*"))
    assert not psutil.wait_procs(started, timeout=30)[1]


def _measure_for_ever() -> None:
    from fastsiam.cli import main

    tempfile.tempdir = None  # the parent's value may be cached
    sys.argv = [
        "fastsiam", "bench", "photometric", "--recipe", "demo", "--batch", "8",
        "--repeats", "100000", "--device", "cpu",
    ]  # fmt: skip
    main()


def test_wrong_usage_is_rejected(tmp_path: Path) -> None:
    assert "pipelines must be one of" in bench("--pipelines", "x", code=2).output
    assert "No such command" in bench("fast", code=2).output
    missing = fastsiam("bench", "decode", "--data", str(tmp_path / "none"), code=1).stderr
    assert missing.splitlines()[-1].startswith("error: ") and "Traceback" not in missing
    message = fastsiam("bench", "machine", "--json", str(tmp_path), code=1).stderr
    assert message.startswith(f"error: cannot write {tmp_path}: Is a directory; ")
    message = bench("lightly", "--recipe", "demo", code=2).output
    assert "pass a folder for the weights" in message
    message = bench("lightly", "--recipe", "demo", "--loader", "tar", code=2).output
    assert "'tar' is not one of 'lightly', 'fastsiam'" in message


def test_methods_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHOD_CONFIGS, "own", SimSiamConfig)
    assert BenchConfig(methods=("own",)).names("methods") == ("own",)
    assert BenchConfig().names("methods") == tuple(METHOD_CONFIGS)


def test_invalid_settings_are_rejected() -> None:
    bad: dict[str, Any] = {
        "pipelines": "torchvision,ffvc", "stored": "raw", "variants": "fast", "peers": "lightning",
        "methods": "dino", "recipe": "nothing", "backbone": "vit", "values": "1,x", "repeats": -1,
        "batch": 1, "crop": 2,
    }  # fmt: skip
    for name, value in bad.items():
        with pytest.raises(ValueError, match=name):
            BenchConfig(**{name: value})
