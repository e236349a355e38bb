"""The picture of a study: figures of every row, and no text that is cut off or covered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from fastsiam.report.drawing import BLUE
from fastsiam.study.catalogue import STUDIES
from fastsiam.study.pictures import picture
from fastsiam.study.verdicts import interval
from tests.study.results import record, result, row

SEEDS = (38.0, 32.0, 43.0)
"""Top-1 by seed of the default rows of ``record``."""


def points(line: Line2D) -> Any:
    """Return a list of points [x, y]."""
    return np.asarray(line.get_xydata(), float).tolist()


def bars_of(axes: Axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


@pytest.mark.parametrize("name", ["predictor", "related"])
def test_picture_shows_all_rows_without_clipped_text(name: str) -> None:
    study_record, rows = record(name), STUDIES[name].rows
    figure = picture(study_record)
    figure.draw_without_rendering()
    *curves, bars = figure.axes
    assert all(len(axes.lines) >= len(rows) for axes in curves)
    assert curves[-1].get_title(loc="left") == "kNN top-1, %"
    assert [bar.get_width() for bar in bars_of(bars)] == pytest.approx([sum(SEEDS) / 3] * len(rows))
    texts = [text.get_text().replace("\n", " ") for text in bars.texts]
    for one in rows:
        assert one.title + ("" if one.paper is None else f" (paper: {one.paper})") in texts
    boxes = [bar.get_window_extent() for bar in bars_of(bars)]
    for text in [*figure.texts, *bars.texts, *(axes.xaxis.label for axes in figure.axes)]:
        box = Text.get_window_extent(text)  # Annotation's method includes the arrow
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width, text.get_text()
        assert box.y0 >= 0 and box.y1 <= figure.bbox.height, text.get_text()
        if "(paper" in text.get_text():
            assert not any(box.y0 < bar.y1 and bar.y0 < box.y1 for bar in boxes), text.get_text()
    colours = [to_hex(bar.get_facecolor()) for bar in bars_of(bars)]
    assert len(set(colours)) == len(colours)
    assert colours[[one.variant for one in rows].index(study_record.reference)] == BLUE


def test_picture_plots_recorded_values() -> None:
    """Curves are means with a band over all seeds; a diverged seed's curve ends with a cross."""
    losses = (-0.2, -0.5, -0.7, -0.8)
    results = [result(seed, top1, losses=losses) for seed, top1 in enumerate(SEEDS[:2])]
    lost = result(2, losses=(-0.5, -0.5), z_std_curve=(0.9, 0.9), diverged=True)
    lost = replace(lost, knn_epochs=(0.0,), knn_curve=(20.0,))
    results = [replace(one, z_std_curve=(0.9,) * 4, rank_curve=(30.0,) * 4) for one in results]
    *curves, bars = picture(record(rows=[(*results, lost), row(*SEEDS)])).axes
    loss, std, _ = curves
    assert dict(points(loss.lines[0])) == pytest.approx({0: -0.3, 1: -0.5, 2: -0.7, 3: -0.8})
    low, high = loss.collections[0].get_paths()[0].get_extents().intervaly
    assert (low, high) == pytest.approx((-0.8, -0.2))
    assert [[1.0, -0.5]] in [points(x) for x in loss.lines if x.get_marker() == "x"]
    assert any([y for _, y in points(line)] == [1, 1] for line in std.lines)  # maximal spread
    expected = interval(SEEDS)
    assert expected
    line_ends = [[x for x, _ in points(line)] for line in bars.lines]
    assert sum(line == pytest.approx([expected.low, expected.high]) for line in line_ends) == 3
    assert all(line_ends.count([top1]) >= 3 for top1 in SEEDS)
    assert [10.0, 10.0] in line_ends and [20.0, 20.0] in line_ends  # chance and untrained
    texts = [text.get_text() for text in bars.texts]
    assert texts.count("37.7") == 3 and "26.7, 1 diverged" in texts
