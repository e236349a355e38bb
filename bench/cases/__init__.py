"""The cases that ``fastsiam bench`` measures, one module each, and their table. No torch import.

To add a case, add a module with a function ``measure(session)``, and an entry in the table. The
function passes its rows (``measurements.Row``) to ``runner.compare`` and returns the records.
Functions ``build_...`` run in the measured processes and return a runner's tasks
(``runner.Build``).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastsiam.bench.measurements import Record
    from fastsiam.bench.session import Session

_COMMON = ("repeats", "device", "json")
_DATA = ("data", "image_column", "label_column")
_IMAGES = (*_DATA, "images", "recipe", "crop", "batch", "workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command of ``fastsiam bench`` that measures something."""

    name: str
    """Name of the command, of its records' case, and of its module."""
    help: str
    title: str = ""
    """Heading on the page and in charts; if empty, the name."""
    options: tuple[str, ...]
    """Fields of ``BenchConfig`` that the case uses."""

    def measure(self, session: Session) -> list[Record]:
        """Run the measurements and return the records; imports torch."""
        records: list[Record] = import_module(f"{__name__}.{self.name}").measure(session)
        return records


def title_of(case: str) -> str:
    """Return the heading of a case on the page and in charts; an unknown case has its name."""
    return (case in CASES and CASES[case].title) or case


_ROWS = (
    Case(
        name="all",
        help="What limits training here, and what would help most, in about two minutes.",
        options=(*_IMAGES, "backbone", "pipelines", "stored", *_COMMON),
    ),
    Case(
        name="loader",
        help="Each pipeline, to uint8 crops and to finished views, compared with bare decoding.",
        title="Loading: from files to batches",
        options=(*_IMAGES, "pipelines", "stored", *_COMMON),
    ),
    Case(
        name="decode",
        help="Decoders alone, on the same bytes in memory: the ceiling of a loader.",
        title="Bare decoding",
        options=(*_IMAGES, "stored", *_COMMON),
    ),
    Case(
        name="photometric",
        help="Jitter, gray, blur and normalisation of ready crops.",
        title="The photometric stage",
        options=("recipe", "crop", "batch", *_COMMON),
    ),
    Case(
        name="geometric",
        help="Crop, resize and flip of decoded images, compared with torchvision on tensors.",
        title="The geometric stage",
        options=("recipe", "crop", "batch", *_COMMON),
    ),
    Case(
        name="step",
        help="The training step on ready tensors, in several variants and as in the authors' code.",
        title="A training step",
        options=("recipe", "crop", "backbone", "batch", "variants", *_COMMON),
    ),
    Case(
        name="methods",
        help="The training step of each method, compared with lightly's on the same tensors.",
        title="Steps of the methods",
        options=("methods", "recipe", "crop", "backbone", "batch", "variants", *_COMMON),
    ),
    Case(
        name="digest",
        help="Cost of the digests of images and draws in log lines, relative to a training step.",
        title="Digests of what is trained on",
        options=("recipe", "crop", "backbone", "batch", *_COMMON),
    ),
    Case(
        name="train",
        help="End-to-end training with each pipeline, compared with ready tensors, the ceiling.",
        title="Training",
        options=(*_IMAGES, "backbone", "pipelines", "stored", *_COMMON),
    ),
    Case(
        name="convert",
        help="fastsiam convert, compared with cp and FFCV's writer.",
        title="Converting",
        options=(*_DATA, "images", "workers", *_COMMON),
    ),
    Case(
        name="startup",
        help="Time to the first batch in a new process, and per epoch, with cold and warm caches.",
        title="From the start to the first batch",
        options=(*_IMAGES, "pipelines", *_COMMON),
    ),
    Case(
        name="shuffle",
        help="How well --shuffle window:N mixes, compared with a full shuffle; --values sets N.",
        title="Shuffling within a window",
        options=(*_DATA, "values", "batch", *_COMMON),
    ),
    Case(
        name="storage",
        help="Epochs from the local disk and from object storage, by latency and cache state.",
        title="Reading from object storage",
        options=(*_IMAGES, "latencies", "pipelines", "repeats", "json"),
    ),
    Case(
        name="sweep",
        help="Speed while one setting varies, such as workers, batch, crop, JPEG quality or ranks.",
        options=("over", "values", *_IMAGES, "pipelines", *_COMMON),
    ),
    Case(
        name="peers",
        help="Other libraries that make two views, on the same images.",
        title="Beside other libraries",
        options=(*_IMAGES, "peers", "pipelines", *_COMMON),
    ),
    Case(
        name="knn",
        help="The kNN classifier, compared with lightly's on the same features.",
        options=_COMMON,
    ),
    Case(
        name="machine",
        help="The machine's highest rates of copies and matrix products.",
        title="The machine",
        options=_COMMON,
    ),
)

CASES: dict[str, Case] = {case.name: case for case in _ROWS}
"""The commands that measure, by name."""
