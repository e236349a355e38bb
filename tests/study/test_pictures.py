"""The picture of a study: it shows every row's figures, and no text is cut or hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation, Text
from PIL import Image

from fastsiam.report.drawing import BLUE
from fastsiam.study.catalogue import STUDIES
from fastsiam.study.pictures import picture
from fastsiam.study.record import Result, StudyRecord, write_record
from fastsiam.study.verdicts import interval
from tests.processes import fastsiam
from tests.study import results

SEEDS = (38.0, 32.0, 43.0)
"""Top-1 of three seeds."""
LINES = ((3.0, 6.0, 9.0, 12.0), (0.99, 0.95, 0.9, 0.9), (80.0, 60.0, 50.0, 40.0))
"""Epochs, std and rank of the log lines."""


def result(seed: int, top1: float, *, diverged: bool = False) -> Result:
    """Return the results of a run; one that diverged ended after two of four log lines."""
    lines = 2 if diverged else 4
    epochs, z_std, rank = (column[:lines] for column in LINES)
    return replace(
        results.result(seed, top1, untrained=22.0, diverged=diverged),
        epochs=epochs,
        loss_curve=(-0.2 - seed / 10, -0.5, -0.7, -0.8)[:lines],
        z_std_curve=z_std,
        rank_curve=rank,
        knn_epochs=(0.0, 12.0)[: lines // 2],
        knn_curve=(22.0, top1)[: lines // 2],
    )


def of_seeds(*top1: float) -> tuple[Result, ...]:
    return tuple(result(seed, value) for seed, value in enumerate(top1))


def record(name: str = "predictor", rows: Sequence[Sequence[Result]] = ()) -> StudyRecord:
    """Return a study's record with these rows' results; rows beyond them have three seeds."""
    others = [of_seeds(*SEEDS)] * (len(STUDIES[name].rows) - len(rows))
    return results.record(name, [*rows, *others])


def parts(figure: Figure) -> tuple[list[Axes], Axes]:
    """Return the axes of the curves, and those of the bars."""
    *curves, bars = figure.axes
    return curves, bars


def xs(line: Line2D) -> list[float]:
    return [float(x) for x in np.asarray(line.get_xdata())]


def ys(line: Line2D) -> list[float]:
    return [float(y) for y in np.asarray(line.get_ydata())]


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def widths(axes: Axes) -> list[float]:
    return [patch.get_width() for patch in axes.patches if isinstance(patch, Rectangle)]


@pytest.mark.parametrize("name", ["predictor", "batch", "related", "reproduction"])
def test_every_study_shows_all_of_its_rows_and_cuts_no_text(name: str) -> None:
    shown = record(name)
    figure = picture(shown)
    figure.draw_without_rendering()
    curves, bars = parts(figure)
    assert all(len(axes.lines) >= len(shown.rows) for axes in curves)
    assert curves[-1].get_title(loc="left") == "kNN top-1, %"
    assert widths(bars) == pytest.approx([sum(SEEDS) / 3] * len(shown.rows))
    names = [text for text in bars.texts if "." not in text.get_text().partition(" (paper")[0]]
    for row, text in zip(shown.rows, names, strict=True):
        said = "" if row.paper is None else f" (paper: {row.paper})"
        assert text.get_text().replace("\n", " ") == row.title + said
    heads = [axes.xaxis.label for axes in figure.axes]
    for text in [*figure.texts, *bars.texts, *heads]:
        box = Text.get_window_extent(text)  # an annotation's own has its arrow
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width, text.get_text()
        assert box.y0 >= 0 and box.y1 <= figure.bbox.height, text.get_text()
    patches = [patch for patch in bars.patches if isinstance(patch, Rectangle)]
    boxes = [patch.get_window_extent() for patch in patches]
    for text in bars.texts:
        assert isinstance(text, Annotation)
        if "paper" in text.get_text():
            box = Text.get_window_extent(text)
            assert not any(box.y0 < bar.y1 and bar.y0 < box.y1 for bar in boxes), text.get_text()
    colours = [to_hex(patch.get_facecolor()) for patch in patches]
    assert len(set(colours)) == len(colours)
    place = [row.variant.name for row in STUDIES[name].rows].index(STUDIES[name].reference)
    assert colours[place] == BLUE


def test_whiskers_dots_and_lines_are_the_figures() -> None:
    bars = parts(picture(record()))[1]
    found = interval(SEEDS)
    assert found
    lines = [xs(line) for line in bars.lines]
    whisker = pytest.approx([found.low, found.high])
    assert sum(line == whisker for line in lines) == 4
    assert all(lines.count([top1]) == 4 for top1 in SEEDS)
    assert [10.0, 10.0] in lines and [22.0, 22.0] in lines  # chance, the untrained network
    assert texts(bars).count("37.7") == 4


def test_curves_are_means_in_bands_of_all_seeds() -> None:
    loss, std, _ = parts(picture(record("stop-gradient")))[0]
    assert ys(loss.lines[0]) == pytest.approx([-0.3, -0.5, -0.7, -0.8])
    low, high = loss.collections[0].get_paths()[0].get_extents().intervaly
    assert (low, high) == pytest.approx((-0.8, -0.2))
    assert [1, 1] in [ys(line) for line in std.lines]  # over the whole sphere


def test_a_diverged_seed_ends_its_curve_with_a_cross() -> None:
    rows = [(*of_seeds(38.0, 32.0), result(2, 0, diverged=True))]
    curves, bars = parts(picture(record(rows=rows)))
    crosses = [line for line in curves[0].lines if line.get_marker() == "x"]
    assert [(xs(x), ys(x)) for x in crosses] == [([6.0], [-0.5])]
    assert ys(curves[0].lines[0]) == pytest.approx([-0.3, -0.5, -0.7, -0.8])
    assert "26.7, 1 diverged" in texts(bars)
    assert [xs(line) for line in bars.lines if line.get_marker() == "x"] == [[10.0]]


def test_the_command_draws_the_same_picture_each_time(tmp_path: Path) -> None:
    file, written = tmp_path / "record.json", tmp_path / "pictures" / "predictor.png"
    write_record(file, record())
    asked = ["study", "table", "predictor", "--record", str(file), "--picture", str(written)]
    fastsiam(*asked)
    with Image.open(written) as image:
        assert image.format == "PNG" and image.width == 900
    first = written.read_bytes()
    fastsiam(*asked)
    assert written.read_bytes() == first
    err = fastsiam("study", "table", "predictor", "--picture", "a.pdf", code=2).stderr
    assert "--picture a.pdf: its name must end in .png" in err
    err = fastsiam("study", "table", "all", "--picture", "a.png", code=2).stderr
    assert "are of one study" in err
