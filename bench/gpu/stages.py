"""The table of what ``fastsiam bench gpu`` does, the most telling first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastsiam.bench.variants import AUTHORS

ROOT = Path(__file__).resolve().parents[2]
"""The checkout, if this runs from one."""

_FLOAT32_BATCH = 512
"""Images of a batch of the steps whose activations are float32, where they fit."""
_FLOAT32_BYTES = 90e9
"""GPU memory that such a batch needs, with a margin: about 86 GB by counting activations."""
_SECONDS = {"kernels": 90, "step": 90, "loaders": 90, "runs": 90, "bench": 220, "elsewhere": 120}
"""Seconds that a test file takes; others take 60."""
_SIDE_BY_SIDE = ("kernels", "step", "runs")
"""Test files that compile much and run in several processes. Others use the whole GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A process of the campaign."""

    name: str
    """Of the stage, and of the files that it leaves."""
    arguments: tuple[str, ...]
    """What Python is called with."""
    seconds: int
    """What it takes on an H200, about; it is not begun with less time left."""
    most: int
    """Seconds after which it is ended."""
    endless: bool = False
    """It uses all the time that is left, and goes on when it is called again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the stages depend on."""

    out: Path
    """The campaign's folder."""
    gpu: bool
    """Whether there is one; without, everything is small."""
    gpu_name: str = ""
    """Name of the GPU; empty without one."""
    gpu_bytes: float = math.inf
    """Memory of the GPU, in bytes."""
    pipelines: tuple[str, ...]
    """Pipelines beside torchvision's that can run here."""
    data: str = ""
    """Images to measure with; empty makes some."""
    cifar10: str = ""
    """CIFAR-10, as ``fastsiam train`` takes it; empty trains on the demo's images."""
    test_workers: int = 0
    """Processes of pytest-xdist that run tests side by side; 0 where it is not installed."""
    test_timeout: int = 0
    """Seconds that a test may take; 0 is any time."""

    @property
    def run(self) -> Path:
        """The run folder of the CIFAR-10 recipe: on other images it is another run."""
        return self.out / ("cifar10" if self.cifar10 else "made")

    @property
    def float32_batch(self) -> int:
        """Images of a batch of the steps in float32: half as many on a GPU with less memory."""
        return _FLOAT32_BATCH // (1 if self.gpu_bytes >= _FLOAT32_BYTES else 2)

    @property
    def float32_batch_note(self) -> str:
        """Why the steps in float32 have a smaller batch; empty if they have not."""
        if self.float32_batch == _FLOAT32_BATCH:
            return ""
        return (
            f"The authors' step and the one in float32 use batch {self.float32_batch}: at batch "
            f"{_FLOAT32_BATCH} they need about 86 GB, and this GPU has {self.gpu_bytes / 1e9:.0f}."
        )

    @property
    def demo(self) -> Path:
        """Where images are made, if there is no CIFAR-10."""
        return self.out / "demo"


def stages(setup: Setup) -> list[Stage]:
    """Return the stages that can be done here, in their order."""
    tests = {stage.name: stage for stage in _tests(setup)}

    def tested(*names: str) -> Iterator[Stage]:
        for name in names:
            found = [one for one in tests if f"{one}-".startswith(f"tests-{name}-")]
            yield from (tests.pop(one) for one in found)

    def bench(name: str, *asked: str, seconds: int, **more: Any) -> Stage:
        return _bench(setup, name, *asked, seconds=seconds, **more)

    def steps(name: str, gpus: str, cpus: str, *, seconds: int, **more: Any) -> Stage:
        variants = gpus if setup.gpu else cpus
        return bench(name, "step", "--variants", variants, seconds=seconds, **more)

    fed = ("--pipelines", ",".join(setup.pipelines or ("memory",)))
    found = [
        bench("machine", "machine", seconds=25),
        *tested("kernels"),
        steps("step-512", "default,eager", "eager", seconds=160),
        bench("photometric-512", "photometric", seconds=30),
        _profile(setup),
        *tested("loaders"),
        bench("train", "train", *fed, images=8192, seconds=280),
        steps("step-authors", AUTHORS, AUTHORS, batch=setup.float32_batch, seconds=70),
    ]
    if "dali" in setup.pipelines:
        asked = ("sweep", "--over", "jpeg-engine", "--pipelines", "dali")
        found.append(bench("jpeg-engine", *asked, images=32768, seconds=110))
    found += [
        *tested("step"),
        bench("loader", "loader", *fed, images=8192, seconds=220),
        steps("step-graphs", "cuda-graphs", "plain", seconds=110),
        steps("step-fp32", "fp32", "plain", batch=setup.float32_batch, seconds=70),
        bench("geometric-512", "geometric", seconds=35),
        steps("step-cifar10", "default,eager,cuda-graphs", "eager", recipe="cifar10", seconds=150),
        *tested("knn", "runs", "ranks", "bench"),
        bench("photometric-4096", "photometric", batch=4096, seconds=35),
        bench("geometric-4096", "geometric", batch=4096, seconds=40),
        Stage(name="info", arguments=("-m", "fastsiam", "info"), seconds=30, most=90),
        *tests.values(),
    ]
    if not setup.cifar10:
        made = ("-m", "fastsiam", "convert", "demo", "--out", str(setup.demo))
        found.append(Stage(name="images", arguments=made, seconds=15, most=120))
    return [*found, _training(setup)]


def _bench(
    setup: Setup,
    name: str,
    case: str,
    *flags: str,
    batch: int = 512,
    images: int = 0,
    recipe: str = "imagenet",
    seconds: int,
) -> Stage:
    """Return a measurement; on a CPU one of the demo's recipe, as small as can be.

    Args:
        setup: of the campaign.
        name: of the stage.
        case: of ``fastsiam bench``.
        flags: of it alone.
        batch: images of a batch, on a GPU.
        images: of a repeat, on a GPU, where it takes images at all.
        recipe: that is measured, on a GPU.
        seconds: that it takes.
    """
    asked = ["-m", "fastsiam", "bench", case, *flags]
    if case != "machine":
        asked += ["--recipe", recipe if setup.gpu else "demo"]
        asked += ["--batch", str(batch if setup.gpu else 8)]
    if images:
        asked += ["--data", setup.data] if setup.data else []
        asked += ["--images", str(images)] if setup.gpu else ["--images", "16", "--workers", "1"]
    if "jpeg-engine" in flags and not setup.gpu:
        asked += ["--values", "0,100"]
    if case != "profile":
        asked += ["--repeats", ("3" if images else "5") if setup.gpu else "1"]
    asked += ["--device", "cuda" if setup.gpu else "cpu"]
    asked += ["--json", str(records_of(setup.out, name))]
    most = min(400, 2 * seconds + 60)
    return Stage(name=name, arguments=tuple(asked), seconds=seconds, most=most)


def _profile(setup: Setup) -> Stage:
    fed = next((name for name in ("dali", "ffcv") if name in setup.pipelines), "torchvision")
    asked = ["--pipeline", fed, "--steps", "20" if setup.gpu else "2"]
    asked += ["--out", str(setup.out / "trace.json")]
    asked += ["--data", setup.data] if setup.data else []
    return _bench(setup, "profile", "profile", *asked, seconds=80)


def _training(setup: Setup) -> Stage:
    """Return the CIFAR-10 recipe's run, which goes on whenever there is time left."""
    asked = ["-m", "fastsiam", "train", "--data", setup.cifar10 or str(setup.demo)]
    asked += ["--out", str(setup.run), "--save-every", "2000"]
    if setup.gpu:
        asked += ["--recipe", "cifar10", "--knn-every", "25", "--device", "cuda"]
    else:
        asked += ["--recipe", "demo", "--epochs", "2", "--max-steps", "4", "--log-every", "2"]
        asked += ["--knn-every", "0", "--device", "cpu"]
    return Stage(name="cifar10", arguments=tuple(asked), seconds=60, most=86400, endless=True)


def _tests(setup: Setup) -> Iterator[Stage]:
    """Yield the tests that need a GPU: by the files of tests/gpu, and one stage for all others.

    The many tests of the step have a stage each, so that a cut loses few of them.
    """
    folder = ROOT / "tests" / "gpu"
    for path in sorted(folder.glob("test_*.py")):
        name, file = path.stem.removeprefix("test_"), str(path.relative_to(ROOT))
        if name == "step":
            for test in re.findall(r"^def test_(\w+)", path.read_text(), re.MULTILINE):
                yield _pytest(setup, f"{name}-{test.replace('_', '-')}", f"{file}::test_{test}")
        else:
            yield _pytest(setup, name, file)
    if folder.is_dir():
        yield _pytest(setup, "elsewhere", *_with_gpu_tests(ROOT / "tests"))


def _with_gpu_tests(folder: Path) -> list[str]:
    """Return the other test files with tests that need a GPU: collecting all takes minutes."""
    return [
        str(path.relative_to(ROOT))
        for path in sorted(folder.rglob("test_*.py"))
        if path.parent.name != "gpu" or path.parent.parent != folder
        if re.search(r"\bmark\.gpu\b", path.read_text())
    ]


def _pytest(setup: Setup, name: str, *which: str) -> Stage:
    stage, kind = f"tests-{name}", name.partition("-")[0]
    asked = ["-m", "pytest", *which, "-m", "gpu", "-v", "--durations", "5"]
    asked += ["-p", "no:cacheprovider", "--junitxml", str(pytest_results_of(setup.out, stage))]
    if setup.test_timeout:
        # A thread ends the process of a test that hangs in compiled code: of a worker only one test
        # is lost then, of pytest itself the results of all.
        method = "thread" if setup.test_workers else "signal"
        asked += ["--timeout", str(setup.test_timeout), "--timeout-method", method]
    if setup.test_workers:
        asked += ["-n", str(setup.test_workers if kind in _SIDE_BY_SIDE else 1)]
    seconds = _SECONDS.get(kind, 60)
    return Stage(name=stage, arguments=tuple(asked), seconds=seconds, most=2 * seconds + 60)


def records_of(out: Path, stage: str) -> Path:
    """Return the file that gets a stage's records."""
    return out / "records" / f"{stage}.json"


def pytest_results_of(out: Path, stage: str) -> Path:
    """Return the file that gets what pytest found in a stage."""
    return out / "tests" / f"{stage}.xml"
