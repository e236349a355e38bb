"""The table of what ``fastsiam bench gpu`` does, the most telling first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout, if this runs from one."""

_TESTS = ("kernels", "knn", "loaders", "step", "runs", "bench", "ranks")
"""Files of tests/gpu, from cheap to dear; others follow them."""


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
    pipelines: tuple[str, ...]
    """Pipelines beside torchvision's that can run here."""
    data: str = ""
    """Images to measure with; empty makes some."""
    cifar10: str = ""
    """CIFAR-10, as ``fastsiam train`` takes it; empty trains on the demo's images."""
    test_workers: int = 0
    """Processes that run tests side by side; 0 is none but pytest's own."""

    @property
    def run(self) -> Path:
        """The run folder of the CIFAR-10 recipe."""
        return self.out / "cifar10"

    @property
    def demo(self) -> Path:
        """Where images are made, if there is no CIFAR-10."""
        return self.out / "demo"


def stages(setup: Setup) -> list[Stage]:
    """Return the stages that can be done here, in their order."""
    tests = {stage.name: stage for stage in _tests(setup)}

    def tested(name: str) -> Iterator[Stage]:
        if stage := tests.pop(f"tests-{name}", None):
            yield stage

    pipelines = ",".join(setup.pipelines or ("memory",))
    fed = next((p for p in ("dali", "ffcv") if p in setup.pipelines), "torchvision")
    steps = "default,eager,authors,cuda-graphs" if setup.gpu else "eager,authors"
    found = [
        Stage(name="info", arguments=("-m", "fastsiam", "info"), seconds=20, most=90),
        _bench(setup, "machine", "machine", seconds=25, most=90),
        *tested("kernels"),
        _bench(setup, "photometric-512", "photometric", batch=512, seconds=30, most=120),
        _bench(setup, "photometric-4096", "photometric", batch=4096, seconds=35, most=120),
        _bench(setup, "geometric-512", "geometric", batch=512, seconds=35, most=120),
        _bench(setup, "geometric-4096", "geometric", batch=4096, seconds=40, most=120),
        _bench(setup, "step-512", "step", "--variants", steps, batch=512, seconds=200, most=400),
        *tested("step"),
        *tested("loaders"),
        _bench(
            setup, "loader", "loader", "--pipelines", pipelines, batch=512, seconds=130, most=330
        ),
        _bench(setup, "train", "train", "--pipelines", pipelines, batch=512, seconds=160, most=400),
    ]
    if "dali" in setup.pipelines:
        found.append(
            _bench(
                setup, "jpeg-engine", "sweep", "--over", "jpeg-engine", "--pipelines", "dali",
                batch=512, seconds=90, most=240,
            )
        )  # fmt: skip
    found += [
        _profile(setup, fed),
        _bench(
            setup, "step-cifar10", "step", "--variants", steps, recipe="cifar10", batch=512,
            seconds=120, most=300,
        ),
        *tested("knn"),
        *tested("runs"),
        *tested("ranks"),
        _bench(
            setup, "step-fp32", "step", "--variants", "fp32" if setup.gpu else "plain", batch=512,
            seconds=70, most=240,
        ),
        *tests.values(),
    ]  # fmt: skip
    if not setup.cifar10:
        made = ("-m", "fastsiam", "convert", "demo", "--out", str(setup.demo))
        found.append(Stage(name="images", arguments=made, seconds=15, most=120))
    return [*found, _training(setup)]


def _bench(
    setup: Setup,
    name: str,
    case: str,
    *flags: str,
    batch: int = 0,
    recipe: str = "imagenet",
    seconds: int,
    most: int,
) -> Stage:
    """Return a measurement; on a CPU one of the demo's recipe, as small as can be."""
    asked = ["-m", "fastsiam", "bench", case, *flags]
    takes_images = case in {"loader", "train", "sweep"}
    if takes_images and setup.data:
        asked += ["--data", setup.data]
    if case != "machine":
        asked += ["--recipe", recipe if setup.gpu else "demo"]
        asked += ["--batch", str(batch if setup.gpu else 8)]
    if takes_images:
        asked += ["--images", "8192"] if setup.gpu else ["--images", "16", "--workers", "1"]
    if case == "sweep" and not setup.gpu:
        asked += ["--values", "0,100"]
    repeats = {"machine": 3, "train": 3, "loader": 3, "sweep": 3}.get(case, 5)
    asked += ["--repeats", str(repeats if setup.gpu else 1)]
    asked += ["--device", "cuda" if setup.gpu else "cpu"]
    asked += ["--json", str(records_of(setup.out, name))]
    return Stage(name=name, arguments=tuple(asked), seconds=seconds, most=most)


def _profile(setup: Setup, pipeline: str) -> Stage:
    stage = _bench(setup, "profile", "profile", "--pipeline", pipeline, seconds=70, most=240)
    asked = list(stage.arguments)
    del asked[asked.index("--repeats") : asked.index("--repeats") + 2]
    asked[asked.index("--batch") + 1] = "512" if setup.gpu else "8"
    if setup.data:
        asked += ["--data", setup.data]
    asked += ["--steps", "20" if setup.gpu else "2", "--out", str(setup.out / "trace.json")]
    return Stage(name="profile", arguments=tuple(asked), seconds=stage.seconds, most=stage.most)


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
    """Yield the tests that need a GPU: a stage for each file of tests/gpu, one for all others."""
    folder = ROOT / "tests" / "gpu"
    files = sorted(path.stem.removeprefix("test_") for path in folder.glob("test_*.py"))
    ordered = [name for name in _TESTS if name in files]
    for name in ordered + [name for name in files if name not in ordered]:
        yield _pytest(setup, f"tests-{name}", f"tests/gpu/test_{name}.py")
    if files:
        yield _pytest(setup, "tests-elsewhere", "tests", "--ignore", "tests/gpu")


def _pytest(setup: Setup, name: str, *which: str) -> Stage:
    asked = [
        "-m",
        "pytest",
        *which,
        "-m",
        "gpu",
        "-q",
        "--durations",
        "5",
        "-p",
        "no:cacheprovider",
    ]
    asked += ["--junitxml", str(pytest_results_of(setup.out, name))]
    if setup.test_workers:
        asked += ["-n", str(setup.test_workers)]
    return Stage(name=name, arguments=tuple(asked), seconds=60, most=330)


def records_of(out: Path, stage: str) -> Path:
    """Return the file that gets a stage's records."""
    return out / "records" / f"{stage}.json"


def pytest_results_of(out: Path, stage: str) -> Path:
    """Return the file that gets what pytest found in a stage."""
    return out / "tests" / f"{stage}.xml"
