"""Measurements are made as they say: in turns, warmed up, each in its process, on equal work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.JpegImagePlugin import get_sampling

from fastsiam.bench import suite, training
from fastsiam.bench.config import CASES, FIELDS, PEERS, VARIANTS, BenchConfig
from fastsiam.bench.contest import Contender, ContenderFailed, Contest, Work
from fastsiam.bench.images import make_images, take_images
from fastsiam.bench.measure import (
    Sample,
    Timing,
    children,
    cpu_seconds,
    forget,
    host_memory,
    in_turns,
)
from fastsiam.bench.peers import PEERS as KNOWN_PEERS
from fastsiam.bench.profile import gaps
from fastsiam.bench.records import Record, caption, read, record, table, write
from fastsiam.bench.roofline import H200, Layer, Machine, floor, layers
from fastsiam.bench.roofline import table as roofline_table
from fastsiam.bench.session import session
from fastsiam.bench.sweep import _settings, sweep
from fastsiam.errors import BackendError, DataError
from fastsiam.pipelines.store import open_store
from tests.conftest import ROOT, fastsiam, with_method, write_images


def build_words(
    *, log: str, words: list[str], die: str = "", fail: bool = False
) -> dict[str, Work]:
    """A contender that writes down when it works."""
    if fail:
        raise FileNotFoundError("the thing is missing\nand more")

    def say(word: str) -> None:
        if word == die and Path(log).read_text().count(word) == 2:
            os._exit(3)
        with open(log, "a") as file:
            file.write(word)

    return {w: Work(lambda w=w: say(w), 10, lambda w=w: {"said": w}) for w in words}  # type: ignore[misc]


def build_ranks(*, log: str) -> dict[str, Work]:
    place = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    return {"meet": Work(lambda: time.sleep(0.1 * (int(place["RANK"]) + 1)), 4, lambda: place)}


def build_failing_rank(*, log: str) -> dict[str, Work]:
    if os.environ["RANK"] == "1":
        raise RuntimeError("rank 1 fails")
    time.sleep(600)  # in a collective, say
    return {}


def build_timed(*, log: str) -> dict[str, Work]:
    held: list[Any] = []

    def work() -> None:
        began = time.process_time()
        while time.process_time() - began < 0.1:
            pass
        if not held:
            held.append(np.ones(50_000_000, np.uint8))

    return {"work": Work(work, 1, before=lambda: time.sleep(1.5))}


def build_started(*, log: str) -> dict[str, Work]:
    import multiprocessing

    return {"say": Work(lambda: None, 1, lambda: {"start": multiprocessing.get_start_method()})}


def sample(wall: float, cpu: float = 0.0) -> Sample:
    return Sample(wall, cpu)


def made(name: str = "a", case: str = "loader", wall: float = 2.0, **more: Any) -> Record:
    timing = Timing([sample(wall, 3.0)], 8)
    return record(case, name, timing, config={"batch": 8}, **more)


def test_work_is_done_in_turns_and_given_up_when_it_fails() -> None:
    calls: list[str] = []

    def work(name: str, last: int = 9) -> Callable[[], Sample | None]:
        def run() -> Sample | None:
            calls.append(name)
            return sample(1.0) if calls.count(name) <= last else None

        return run

    timings = in_turns({"a": work("a"), "b": work("b", last=1), "c": work("c")}, repeats=3)
    assert "".join(calls) == "abcabcac"
    assert {name: len(timing.samples) for name, timing in timings.items()} == {"a": 3, "c": 3}


def test_medians_and_spreads() -> None:
    timing = Timing([sample(1.0, 5.0), sample(4.0, 6.0), sample(2.0, 9.0)], images=10)
    assert (timing.median, timing.spread, timing.cpu, timing.rate) == (2.0, 0.75, 6.0, 5.0)


def test_contenders_take_turns_after_warming_up(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    with Contest(lambda _: None) as contest:
        assert contest.enter("one", build_words, log=str(log), words=["a", "b"])
        assert contest.enter("two", build_words, log=str(log), words=["c"])
        assert not contest.enter("three", build_words, log=str(log), words=[], fail=True)
        timings = contest.run(2)
        assert contest.contenders["one"].facts("b") == {"said": "b"}
        processes = [p._process for c in contest.contenders.values() for p in c._processes]
    assert log.read_text() == "abc" + "abc" * 2
    assert set(timings) == {("one", "a"), ("one", "b"), ("two", "c")}
    assert all(len(t.samples) == 2 and t.images == 10 for t in timings.values())
    assert contest.failed == {"three": "the thing is missing"}
    assert not any(process.is_alive() for process in processes)


def test_a_contender_that_dies_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    with Contest(lambda _: None) as contest:
        contest.enter("dies", build_words, log=str(log), words=["x"], die="x")
        contest.enter("lives", build_words, log=str(log), words=["y"])
        timings = contest.run(4)
    assert list(timings) == [("lives", "y")] and log.read_text() == "xyxyyyy"
    assert "code 3" in contest.failed["dies"]


def test_ranks_work_together(tmp_path: Path) -> None:
    contender = Contender(build_ranks, {"log": ""}, ranks=2)
    try:
        assert contender.run("meet").wall >= 0.2  # as long as the slowest
        facts = contender.facts("meet")
        assert (facts["RANK"], facts["WORLD_SIZE"]) == ("0", "2") and int(facts["MASTER_PORT"])
    finally:
        contender.close()


def test_a_rank_that_fails_is_not_waited_for() -> None:
    began = time.monotonic()
    with pytest.raises(ContenderFailed, match="rank 1 fails"):
        Contender(build_failing_rank, {"log": ""}, ranks=2)
    assert time.monotonic() - began < 60


def test_time_and_memory_are_those_of_the_contender() -> None:
    contender = Contender(build_timed, {"log": ""})
    try:
        found = contender.run("work")
        assert 0.05 <= found.cpu < 1.5 and 0.1 <= found.wall < 1.5  # preparing does not count
        assert 50e6 < found.host < 50e6 + host_memory() + 100e6
    finally:
        contender.close()


def test_contenders_start_processes_as_any_program_does() -> None:
    import multiprocessing

    contender = Contender(build_started, {"log": ""})
    assert contender.facts("say")["start"] == multiprocessing.get_context().get_start_method()
    contender.close()


def test_a_contender_that_cannot_be_built_says_why() -> None:
    with pytest.raises(ContenderFailed, match=r"^the thing is missing$"):
        Contender(build_words, {"log": "", "words": [], "fail": True})


def test_processor_time_of_living_children_counts() -> None:
    before = cpu_seconds()
    script = (
        "import sys, time\nwhile time.process_time() < 0.5: pass\n"
        "print(flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout and child.stdin
        child.stdout.readline()
        assert cpu_seconds() - before > 0.4
        child.stdin.close()


def test_forgetting_files_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2**20))
    with path.open("rb") as file:
        file.read()
    share = forget([path])
    assert 0 <= share <= 1
    path.read_bytes()
    from fastsiam.bench.measure import _cached

    with path.open("rb") as file:
        assert _cached(file.fileno()) == (256, 256)  # what was read is there again


def test_records_say_what_they_depend_on(tmp_path: Path) -> None:
    slow, fast = Timing([sample(4.0)], 8), Timing([sample(1.0)], 16)
    one = made(torchvision=slow, ceiling=("bare", fast), pipeline="ffcv")
    assert (one.images_per_second, one.ratio_to_torchvision, one.ratio) == (4.0, 2.0, 2.0)
    assert (one.share_of_ceiling, one.cpu_seconds_per_image, one.cores_busy) == (0.25, 0.375, 1.5)
    contract = {
        "case", "pipeline", "images_per_second", "spread", "n", "ratio_to_torchvision",
        "share_of_ceiling", "cpu_seconds_per_image", "config", "environment", "date",
    }  # fmt: skip
    assert contract <= set(asdict(one))
    assert one.environment["packages"]["torch"] and one.environment["commit"]
    write(tmp_path / "new" / "records.json", [one, made("b")])
    assert read(tmp_path / "new" / "records.json") == [one, made("b")]
    assert len(json.loads((tmp_path / "new" / "records.json").read_text())) == 2


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"case": "loader"}]'])
def test_other_files_are_no_records(text: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(text)
    if text == "{}":
        assert read(tmp_path / "file.json") == []
        return
    with pytest.raises(DataError, match="holds no records"):
        read(tmp_path / "file.json")


def test_tables_leave_out_what_nobody_has() -> None:
    slow = Timing([sample(4.0)], 8)
    rows = table([made("a", torchvision=slow), made("b|c", torchvision=slow)]).splitlines()
    heads = [cell.strip() for cell in rows[0].split(" | ")]
    assert "times torchvision" in heads and "GPU MB" not in heads and len(rows) == 4
    assert len({len(row) for row in rows}) == 1 and "b\\|c" in rows[3]
    mixed = table([made("a", torchvision=slow), made("d", "step", baseline=("authors", slow))])
    assert "2 x torchvision" in mixed and "2 x authors" in mixed and "step" in mixed
    assert "8 images a repeat" in caption([made()])


def test_wide_spreads_are_marked() -> None:
    steady, wide = ([sample(t) for t in times] for times in ((1.0, 1.1), (1.0, 2.0)))
    rows = [record("loader", str(i), Timing(t, 4), config={}) for i, t in enumerate((steady, wide))]
    marks = ["(unsteady)" in line for line in table(rows).splitlines()[2:]]
    assert marks == [False, True]


def test_made_images_resemble_imagenet(tmp_path: Path) -> None:
    paths = make_images(tmp_path / "images", 96, copies=2)
    assert len(paths) == 96 and len(list((tmp_path / "images").rglob("*.jpg"))) == 192
    sizes, chroma, share = [], [], []
    for path in paths:
        with Image.open(path) as image:
            sizes.append(image.size)
            chroma.append(get_sampling(image) == 0)
            share.append(path.stat().st_size / image.width / image.height)
    # A sample of ImageNet: 467 x 397, 76% without subsampling; .15 and 1.08 are its 5% and 95%.
    assert 430 < np.mean(sizes, 0)[0] < 510 and 350 < np.mean(sizes, 0)[1] < 430
    assert 0.6 < np.mean(chroma) < 0.9 and 0.45 < np.mean(share) < 0.68
    assert np.percentile(share, 5) < 0.3 and np.percentile(share, 95) > 0.85


def test_made_images_are_like_real_ones(real_images: Path, tmp_path: Path) -> None:
    def bytes_per_pixel(paths: list[Path]) -> float:
        size = pixels = 0
        for path in paths:
            with Image.open(path) as image:
                pixels += image.width * image.height
            size += path.stat().st_size
        return size / pixels

    real = [path for path in real_images.rglob("*") if path.suffix.lower() == ".jpeg"]
    own = list(make_images(tmp_path / "images", 256))
    assert bytes_per_pixel(own) == pytest.approx(bytes_per_pixel(real), rel=0.15)


def test_images_are_taken_evenly_and_repeated(tmp_path: Path) -> None:
    data = write_images(tmp_path / "data" / "train", classes=3, each=4)
    config = BenchConfig(data=str(data.parent))
    said: list[str] = []
    some = take_images(config, 6, tmp_path / "some", said.append)
    assert some.count == 6 == len(open_store(some.folder, "train"))
    kept = {path.read_bytes() for path in data.rglob("*.jpg")}
    taken = [path.read_bytes() for path in some.folder.rglob("*.jpg")]
    assert set(taken) <= kept and len(set(taken)) == 6
    assert len(list(some.folder.iterdir())) == 3  # of every class
    more = take_images(config, 30, tmp_path / "more", said.append)
    assert {path.read_bytes() for path in more.folder.rglob("*.jpg")} == kept
    assert "12 of the 12 images" in said[-1]
    again = some.encoded(30)
    assert sum(p.stat().st_size for p in again.folder.rglob("*.jpg")) < sum(map(len, taken))


@pytest.mark.parametrize(
    "settings",
    [
        {"pipelines": "torchvision,ffvc"},
        {"pipelines": "dali,"},
        {"stored": "raw"},
        {"variants": "fast"},
        {"peers": "lightning"},
        {"recipe": "nothing"},
        {"backbone": "vit"},
        {"values": "1,x"},
        {"repeats": 0},
        {"batch": 1},
        {"crop": 2},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        BenchConfig(**settings)


def test_names_are_the_same_everywhere() -> None:
    assert set(CASES) == set(FIELDS) == {*suite.CASES, "all"}
    assert set(VARIANTS) == set(training.VARIANTS) and set(PEERS) == set(KNOWN_PEERS)


@pytest.fixture
def little(tmp_path: Path) -> BenchConfig:
    """24 images of 40 pixels, views of 32, two repeats."""
    data = write_images(tmp_path / "data" / "train", classes=2, each=12, side=40)
    return BenchConfig(
        data=str(data.parent), images=24, recipe="demo", batch=8, workers=1, repeats=2, device="cpu"
    )


def test_the_authors_step_is_the_same_training(little: BenchConfig) -> None:
    """Their loop and ours, both in float32, come to the same weights."""
    import torch

    from fastsiam import distributed
    from fastsiam.config import DataConfig
    from fastsiam.pipelines import build_loader

    with session(little) as own:
        config = training.train_config(own, 8, **training.VARIANTS["authors"])
    place = distributed.start(config.run)
    data = DataConfig(data=str(little.data), pipeline="memory", workers=0)
    batches = list(build_loader(data, config.augment, batch=8).epoch(0))
    weights = []
    for take, method in (
        training.step_of(config, place),
        training.authors_step(config, place),
    ):
        for batch in batches:
            take(batch)
        weights.append(torch.cat([p.detach().flatten() for p in method.parameters()]))
    assert torch.allclose(weights[0], weights[1], rtol=1e-3, atol=1e-4)


def test_two_ranks_share_the_work(little: BenchConfig) -> None:
    with session(replace(little, over="ranks", values="1,2")) as own:
        one, two = sweep(own)
    assert (one.facts["value"], two.facts["value"]) == (1, 2) and two.ratio is not None
    assert two.images % 16 == 0 and two.host_bytes > one.host_bytes


def test_sweeps(little: BenchConfig) -> None:
    with session(replace(little, over="batch", values="4,8", pipelines="memory")) as own:
        records = {one.name: one for one in sweep(own)}
    names = [f"{p}, batch {v}" for p in ("torchvision", "memory") for v in (4, 8)]
    assert set(records) == set(names)
    assert [records[name].facts["value"] for name in names] == [4, 8, 4, 8]
    assert records["memory, batch 8"].baseline == "batch 4"
    assert all(one.images == 24 for one in records.values())


@pytest.mark.parametrize("over", ["workers", "crop", "quality"])
def test_what_a_sweep_varies(over: Any, little: BenchConfig) -> None:
    with session(replace(little, over=over)) as own:
        plain, changed = (_settings(own, over, value, "memory") for value in (32, 20))
    assert [name for name in plain if plain[name] != changed[name]] == [
        {"workers": "data", "crop": "augment", "quality": "data"}[over]
    ]


@pytest.mark.ffcv
def test_conversion_beside_cp_and_ffcv(little: BenchConfig) -> None:
    with session(little) as own:
        records = {one.name: one for one in suite.CASES["convert"](own)}
    files = ["cp, files", "fastsiam, files", "ffcv, files"]
    assert list(records) == [*files, "cp, a tar", "fastsiam, a tar"]  # FFCV's reads no tar
    ours = records["fastsiam, files"]
    assert ours.ratio == pytest.approx(
        ours.images_per_second / records["cp, files"].images_per_second
    )
    assert ours.facts["megabytes_per_second"] > 0 and ours.images == 24


def test_the_machines_limits(little: BenchConfig) -> None:
    with session(little) as own:
        most = suite.CASES["machine"](own)
    assert [one.facts["rate"].split()[1] for one in most] == ["GB/s", "TFLOP/s", "TFLOP/s"]


def test_startup_is_measured_in_new_processes(little: BenchConfig) -> None:
    with session(replace(little, pipelines="memory", repeats=1)) as own:
        records = {one.name: one for one in suite.CASES["startup"](own)}
    warm = records["memory, warm cache"]
    assert 0 < warm.facts["imports"] < warm.facts["first_batch"] < warm.all_seconds[0]
    cold = records.get("torchvision, cold cache")
    assert cold is None or cold.facts["cached"] <= 0.05


@pytest.mark.ffcv
@pytest.mark.parametrize("pipeline", ["torchvision", "ffcv"])
def test_a_trace_has_named_ranges(pipeline: str, little: BenchConfig, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    done = fastsiam(
        "bench", "profile", "--pipeline", pipeline, "--data", little.data, "--recipe", "demo",
        "--batch", "4", "--steps", "2", "--workers", "1", "--device", "cpu", "--out", str(out),
    )  # fmt: skip
    events = json.loads(out.read_text())["traceEvents"]
    ours = [event for event in events if event.get("cat") == "fastsiam"]
    named = {event["name"] for event in ours}
    names = {"forward", "backward", "optimizer", "wait for data", "decode", "crop", "photometric"}
    assert names <= named and ("read" in named) == (pipeline == "torchvision")  # ffcv maps its file
    assert [event["name"] for event in ours].count("forward") == 2
    theirs = [e for e in events if e.get("name") == "aten::convolution_backward"]
    backward = [e for e in ours if e["name"] == "backward"]
    assert theirs and all(  # both clocks are one
        any(b["ts"] - 2e3 <= e["ts"] <= b["ts"] + b["dur"] + 2e3 for b in backward) for e in theirs
    )
    assert "| backward" in done.stdout and "aten::convolution_backward" in done.stdout


def test_gaps_are_those_of_the_gpu() -> None:
    def kernel(began: float, ended: float, cat: str = "kernel") -> dict[str, Any]:
        return {"ts": began, "dur": ended - began, "cat": cat}

    events = [
        kernel(900, 1000),
        {"ts": 0, "dur": 1000, "cat": "cpu_op"},
        kernel(100, 400),
        kernel(200, 300),  # on another stream
        kernel(420, 700, "gpu_memcpy"),
        kernel(1000, 1100),
    ]
    assert gaps(events, 4) == (
        "; the GPU was busy for 78.0% of the time, its longest gap was 0.20 ms, 80.0% of a step"
    )
    assert gaps(events[1:2], 4) == ""


def test_work_is_counted_by_hand() -> None:
    """A narrow network and images of 8 pixels: the stem and the heads, number by number."""
    from fastsiam.config.recipes import demo

    config = demo()
    config = replace(
        config,
        augment=config.augment.changed(crop=8),
        model=with_method(config.model, width=4, dim=6, predictor_dim=2),
    )
    own = layers(config)
    image, stem = 3 * 8 * 8, 4 * 8 * 8
    assert own[0].flops == 2 * 2 * (2 * 27 * stem)  # both views; no gradient of the images
    assert own[0].elements == 2 * (2 * image + 2 * stem)
    assert own[0].fewest == 2 * (2 * image + 3 * stem)
    assert own[1] == Layer(0, 2 * 8 * stem, 0)  # BN: 3 passes forward, 5 backward
    assert own[-1] == Layer(2 * 3 * 2 * 2 * 6, 2 * 3 * (2 + 6), 2 * 3 * (2 + 6))
    slow = Machine(flops=1.0, bytes=1e12), Machine(flops=1e12, bytes=1.0)
    assert floor(config, slow[0]) == pytest.approx(sum(one.flops for one in own), rel=1e-3)
    assert floor(config, slow[1]) == pytest.approx(2 * sum(one.elements for one in own), rel=1e-3)
    assert floor(config, slow[1], fused=True) < 0.5 * floor(config, slow[1])


def test_a_resnet_50_takes_as_many_operations_as_is_known() -> None:
    """4.1 billion multiply-adds for one view forward; torchvision puts the stride in the 3x3."""
    from fastsiam.config.recipes import imagenet

    total = sum(one.flops for one in layers(imagenet()))
    assert 4.0e9 < total / 2 / 3 / 2 < 4.2e9


def test_the_roofline_stands_in_the_documentation() -> None:
    from fastsiam.config.recipes import cifar10, imagenet

    trainings = {"ResNet-50, 224 pixels": imagenet(), "ResNet-18, 32 pixels": cifar10()}
    assert roofline_table(trainings, H200) in (ROOT / "docs" / "performance.md").read_text()


def rows(loads: float, takes: float, trained: dict[str, float]) -> list[Record]:
    def one(case: str, name: str, speed: float, **more: Any) -> Record:
        timing = Timing([sample(1.0, 1.0)], round(speed))
        return record(case, name, timing, config={}, **more)

    ceiling = Timing([sample(1.0)], round(takes))
    return [
        one("decode", "PIL", 2 * loads),
        one("loader", "torchvision views", loads, pipeline="torchvision", facts={"what": "views"}),
        one("train", "synthetic", takes, pipeline="synthetic", ceiling=("ready tensors", ceiling)),
        *(
            one("train", name, speed, pipeline=name, ceiling=("ready tensors", ceiling))
            for name, speed in trained.items()
        ),
    ]


def test_the_finding_says_what_bounds_training() -> None:
    said = suite.finding(rows(400, 1600, {"torchvision": 400, "ffcv": 900, "dali": 1568}))
    assert "delivers 400 images/s, the model can take 1,600" in said
    assert "data-bound, training reaches 25%" in said and "decoding is 50%" in said
    assert said.endswith("--pipeline dali reaches 98%.")
    said = suite.finding(rows(400, 10, {"torchvision": 10, "ffcv": 10}))
    assert "the model is the bound, and training reaches 100%" in said
    said = suite.finding(rows(400, 1600, {"torchvision": 400, "ffcv": 300}))
    assert said.endswith("no other pipeline that can run here is faster.")
    assert "No finding" in suite.finding([])


@pytest.mark.parametrize(
    ("wanted", "there", "ahead", "whole", "expected"),
    [
        (2, 128, 4, False, (2, 2)),
        (7, 64, 32, True, (32, 32)),
        (7, 8, 32, True, (4, 4)),
        (7, 2502, 0, True, (0, 7)),  # ready tensors: an epoch of ImageNet's length
        (50, 20, 3, False, (3, 17)),
    ],
)
def test_what_is_timed_of_an_epoch(
    wanted: int, there: int, ahead: int, whole: bool, expected: tuple[int, int]
) -> None:
    assert training.window(wanted, there, ahead, whole=whole) == expected


def test_nothing_measured_is_an_error(little: BenchConfig, monkeypatch: Any) -> None:
    monkeypatch.setitem(suite.CASES, "loader", lambda _: [])
    with pytest.raises(BackendError, match="nothing could be measured"):
        suite.run("loader", little)


@pytest.mark.ffcv
@pytest.mark.dali
def test_bench_alone_measures_all(little: BenchConfig, tmp_path: Path) -> None:
    """The command as users type it, on their data, with everything small."""
    file = tmp_path / "out.json"
    done = fastsiam(
        "bench", "--data", little.data, "--recipe", "demo", "--batch", "8", "--images", "24",
        "--workers", "1", "--repeats", "2", "--device", "cpu", "--json", str(file),
        "--stored", "original,pixels256", "--variants", "eager,authors",
    )  # fmt: skip
    assert "| loader" in done.stdout and "ffcv views" in done.stdout
    assert "torchvision's loader delivers" in done.stdout.splitlines()[-1]
    assert not Path(next(w for w in done.stderr.split() if "fastsiam-bench-" in w)[:-1]).exists()
    records = read(file)
    assert records[0].command.startswith("fastsiam bench --data")
    assert all(one.n == 2 and one.host_bytes > 0 for one in records)
    cases = {one.case for one in records}
    assert cases == {"decode", "loader", "photometric", "train", "step"}

    loaded = {one.name: one for one in records if one.case in ("decode", "loader")}
    assert {"PIL", "torchvision.io", "libjpeg-turbo", "DALI"} <= set(loaded)
    for pipeline in ("torchvision", "ffcv", "dali", "memory"):
        assert {f"{pipeline} crops", f"{pipeline} views"} <= set(loaded)
    assert {"ffcv views, pixels256", "dali crops, pixels256"} <= set(loaded)
    assert all(one.images == 24 for one in loaded.values())
    views, base = loaded["ffcv views"], loaded["torchvision views"]
    fastest = max(one.images_per_second for one in records if one.case == "decode")
    assert views.ratio == pytest.approx(views.images_per_second / base.images_per_second)
    assert views.share_of_ceiling == pytest.approx(views.images_per_second / fastest)
    assert loaded["memory views"].share_of_ceiling is None
    assert loaded["ffcv views, pixels256"].share_of_ceiling is None
    assert base.facts["processes"] >= 2 and base.facts["workers"] == 1

    stage = {one.name: one for one in records if one.case == "photometric"}
    assert stage["one pass over the bytes"].share_of_ceiling == 1
    assert stage["fastsiam"].ratio and stage["reference, in torch operations"].ratio == 1

    steps = {one.name: one for one in records if one.case == "step"}
    assert set(steps) == {"eager", "authors"} and steps["authors"].ratio == 1
    assert steps["eager"].facts["batch"] == 8 and steps["eager"].ceiling == "the roofline"
    fed = {one.name: one for one in records if one.case == "train"}
    assert set(fed) == {"synthetic", "torchvision", "ffcv", "ffcv, pixels256", "dali", "memory"}
    assert fed["synthetic"].share_of_ceiling == 1 and fed["torchvision"].ratio_to_torchvision == 1
    assert all(0 <= one.facts["data_wait"] <= 1 for one in fed.values())
    assert fed["torchvision"].images == fed["torchvision"].facts["steps"] * 8

    fastsiam("bench", "report", str(file), "--out", str(tmp_path / "report"))
    assert (tmp_path / "report" / "index.html").exists()


def test_a_signal_leaves_nothing_behind(little: BenchConfig, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "fastsiam", "bench", "decode", "--data", little.data]
    with subprocess.Popen(
        [*command, "--images", "24", "--batch", "8", "--repeats", "100000", "--device", "cpu"],
        stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:  # fmt: skip
        assert process.stderr
        try:
            assert any(line.startswith("measuring") for line in process.stderr)
            started = children(process.pid)
            assert started and any(temporary.glob("fastsiam-bench-*"))
            process.terminate()
            assert process.wait(60) == 143
        finally:
            process.kill()
    assert not any(temporary.glob("fastsiam-bench-*"))
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{child}/exe").exists() for child in started):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_wrong_usage(tmp_path: Path) -> None:
    assert "pipelines are some of" in fastsiam("bench", "--pipelines", "x", code=2).stderr
    assert "No such command" in fastsiam("bench", "fast", code=2).stderr
    missing = fastsiam("bench", "decode", "--data", str(tmp_path / "none"), code=1).stderr
    assert missing.splitlines()[-1].startswith("error: ") and "Traceback" not in missing
    assert "name files" in fastsiam("bench", "report", code=2).stderr
    said = fastsiam("bench", "machine", "--json", str(tmp_path), code=1).stderr
    assert said == f"error: cannot write {tmp_path}: it is a folder, or not yours to write\n"


@pytest.mark.gpu
@pytest.mark.dali
@pytest.mark.ffcv
def test_bench_on_a_gpu(little: BenchConfig) -> None:
    with session(replace(little, device="cuda", repeats=1)) as own:
        loaded = {one.name: one for one in suite.CASES["loader"](own)}
        fed = {one.name: one for one in suite.CASES["train"](own)}
        most = {one.name for one in suite.CASES["machine"](own)}
    assert {"nvJPEG", "DALI on the GPU"} <= set(loaded) and "copy from host to device" in most
    assert all(one.gpu_bytes > 0 for one in loaded.values() if one.case == "loader")
    assert set(fed) == {"synthetic", "torchvision", "ffcv", "dali", "memory"}
    assert fed["synthetic"].environment["driver"]
