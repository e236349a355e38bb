"""The run report: one self-contained page with every curve and setting."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError
from matplotlib import rc_context

from fastsiam.config import TrainConfig
from fastsiam.config.evaluate import KnnConfig, LinearConfig
from fastsiam.config.settings_files import RunSettings
from fastsiam.errors import DataError
from fastsiam.evaluate.command import evaluate_knn, evaluate_linear
from fastsiam.report import run_report as report
from fastsiam.report.page import render
from fastsiam.report.run_report import Run, curves, evaluation_tables, write_report
from fastsiam.run.log import read_metrics
from fastsiam.train.command import train_here
from tests.configs import with_settings
from tests.train.runs import CPU, OLD_RUN


def _read_first_table(page: str) -> list[list[str]]:
    """Return the cells of the page's first table."""
    table = page[page.index("<table>") : page.index("</table>")]
    return [re.findall(r"<t[dh]>(.*?)</t[dh]>", row) for row in table.split("</tr>")[:-1]]


def copy_edited_run(folder: Path, name: str = "", old: str = "", new: str = "") -> Path:
    """Copy the run of version 0.2, optionally replacing a text in one of its files."""
    shutil.copytree(OLD_RUN, folder)
    if name:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))
    return folder


def test_unknown_names_in_template_are_errors() -> None:
    sections: list[Any] = [{}]
    with pytest.raises(UndefinedError, match="figures"):
        render("title", "facts", sections)


@pytest.fixture
def one_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw only the last chart, to save time."""
    monkeypatch.setattr(report, "_CURVES", dict([*report._CURVES.items()][-1:]))


def test_report_is_self_contained_and_complete(tmp_path: Path) -> None:
    run, stopped = (
        copy_edited_run(tmp_path / "run"),
        ('"stop_gradient": true', '"stop_gradient": false'),
    )
    other = copy_edited_run(tmp_path / "other", "config.json", *stopped)
    page = write_report([run, other], tmp_path / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', page) and "<script" not in page
    charts = re.findall(r'<img alt="([^"]+)" src="data:image/svg\+xml;base64,', page)
    assert len(charts) == 6 and any("kNN" in chart for chart in charts)
    last = [line for line in read_metrics(run) if line["kind"] == "train"][-1]
    assert f"<td>{last['loss']:.4f}</td>" in page
    for setting in ("stop_gradient", "weight_decay", "knn_temperature", "pipeline"):
        assert f"<td>{setting}</td>" in page
    assert _read_first_table(page)[0][:3] == ["run", "--stop-gradient", "epochs"]
    assert [row[:2] for row in _read_first_table(page)[1:]] == [["run", "yes"], ["other", "no"]]


def test_report_shows_knn_and_rejects_other_folders(tmp_path: Path, one_chart: None) -> None:
    run = copy_edited_run(tmp_path / "run")
    lines = read_metrics(run)
    knn = {"kind": "knn", "k": 20, "temperature": 0.2, "bank": 24, "top1": 50.0, "epoch": 7.17391}
    (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in [*lines, knn]))
    shutil.copytree(run, tmp_path / "same")
    out = tmp_path / "new" / "folder" / "page.html"
    page = write_report([run, tmp_path / "same"], out).read_text()
    assert "50.00 at epoch 7.17 (k 20" in page and "All runs have the same settings." in page
    (run / "metrics.jsonl").write_text(json.dumps(knn) + "\n")
    assert write_report([run], out).read_text().count("50.00 at") == 1
    with pytest.raises(DataError, match="is not a run folder"):
        write_report([tmp_path], out)


def test_sweep_runs_are_compared(small: TrainConfig, tmp_path: Path, one_chart: None) -> None:
    """Runs are compared by the settings that differ and by kNN, during or after training."""
    config = with_settings(small, max_steps=2, knn_every=0)
    runs = [
        train_here(with_settings(config, lr=lr, out=str(tmp_path / f"lr-{lr}")), "imagenet")
        for lr in (0.1, 0.5)
    ]
    record = evaluate_knn(runs[1], KnnConfig(workers=0, baselines=True, k=(3,)), CPU)
    other = shutil.copytree(str(small.data.root), tmp_path / "other")
    shutil.rmtree(tmp_path / "other" / "val")
    config_of_other = KnnConfig(workers=0, k=(3,), data=str(other), holdout="20%")
    on_other = evaluate_knn(runs[1], config_of_other, CPU).first_with("trained")["top1"]
    unusual = evaluate_knn(runs[1], KnnConfig(workers=0, k=(3,), mean=(0.5, 0.5, 0.25)), CPU)
    (table,) = evaluation_tables({"b": [record, unusual]})
    assert "mean" in table.heads and not {"std", "seed"}.intersection(table.heads)
    linear = LinearConfig(workers=0, cached=True, optimizer="lars", batch=8, epochs=2, percent=50)
    of_knn, of_linear = evaluation_tables({"b": [evaluate_linear(runs[1], linear, CPU), record]})
    assert (of_knn.title, of_linear.title) == ("kNN", "Linear")
    top1 = record.first_with("trained")["top1"]
    *other_rows, row = (dict(zip(of_knn.heads, cells, strict=True)) for cells in of_knn.rows)
    expected = {"run": "b", "epoch": "0.67", "features": "trained", "k": "3", "T": "0.2"}
    assert (expected | {"top-1 (%)": f"{top1:.2f}"}).items() <= row.items()
    assert of_knn.facts.startswith("24 images for training, 12 for validation, from ")
    assert [(x["features"], x["epoch"]) for x in other_rows] == [("pixels", ""), ("untrained", "")]
    (row,) = (dict(zip(of_linear.heads, cells, strict=True)) for cells in of_linear.rows)
    expected = {"epoch": "0.67", "base rate": "0.1", "optimizer": "lars", "epochs": "2"}
    assert expected.items() <= row.items()
    images = "12 images for training (50% of each class, at least one), 12 for validation, from "
    assert of_linear.facts.startswith(images)
    page = write_report(runs[1:], tmp_path / "page.html").read_text()
    assert f'<h3>kNN</h3><p class="facts">{of_knn.facts}</p>' in page
    halved = replace(unusual, images=replace(unusual.images, crop=8))
    tables = evaluation_tables({"b": [record], "c": [halved]})
    assert [table.facts[-7:] for table in tables] == ["crop 16", " crop 8"]
    assert all("mean" in table.heads for table in tables)  # the means of the tables differ
    for run, compiled in zip(runs, (False, True), strict=True):
        settings = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**settings, "compiled": compiled}))
    heads, first, second = _read_first_table(write_report(runs, tmp_path / "page.html").read_text())
    assert heads[:3] == ["run", "--lr", "epochs"]
    assert (first[:2], second[:2]) == (["lr-0.1", "0.1"], ["lr-0.5", "0.5"])
    assert first[-1] == "not measured"
    of_other, of_run, of_unusual = sorted(second[-1].split("; "))
    assert of_unusual.endswith(" (k 3, T 0.2, bank 24) with mean 0.5, 0.5, 0.25")
    assert of_run == f"evaluated: {top1:.2f} at epoch 0.67 (k 3, T 0.2, bank 24)"
    assert of_other == f"evaluated on {other}: {on_other:.2f} at epoch 0.67 (k 3, T 0.2, bank 18)"
    assert first[-2].endswith(" (not compiled)") and "compiled" not in second[-2]


def test_run_may_have_any_name(tmp_path: Path, one_chart: None) -> None:
    """For example matplotlib's markup, a leading underscore, or bytes that are not UTF-8."""
    names = ["a$^$b", "_own", os.fsdecode(b"\xe9")]
    runs = [copy_edited_run(tmp_path / name) for name in names]
    page = write_report(runs, tmp_path / "page.html").read_text("utf-8")
    assert all(name in page for name in ("a$^$b", "_own", r"\udce9"))
    with rc_context({"svg.fonttype": "none"}):
        (chart,) = curves(
            [
                Run(x, y, read_metrics(y), RunSettings.read(y), [], [])
                for x, y in zip(names, runs, strict=True)
            ]
        )
    assert all(name in chart.image.decode() for name in ("a$^$b", "_own", r"\udce9"))


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("metrics.jsonl", '"loss": -', '"lost": ', r"metrics\.jsonl has .* line, number 2: "),
        ("metrics.jsonl", '"bank": 24', '"bank": "x"', "bank must be a number, not 'x'; restore"),
        ("config.json", '"gpus"', '"gpu"', r"cannot .*config\.json"),
        ("config.json", '"environment": {', '"environment": null, "": {', r"cannot .*config\.json"),
    ],
)
def test_report_rejects_invalid_run_files(
    name: str, old: str, new: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        write_report([copy_edited_run(tmp_path / "run", name, old, new)], tmp_path / "page.html")


def test_points_on_chart_edge_are_not_clipped(tmp_path: Path, one_chart: None) -> None:
    """Shares of 0 and 1 of time waiting for data lie on the edges of their chart."""
    fields = ("epoch", "loss", "z_std", "rank", "images_per_second", "data_wait")
    lines = [{"kind": "train", **dict.fromkeys(fields, x)} for x in (0.0, 1.0)]
    settings = RunSettings.read(OLD_RUN)
    (chart,) = curves([Run("run", tmp_path, lines, settings, [], [])])
    assert chart.caption == "Share of time waiting for data"
    pattern = r'<path d="[^"]*" (clip-path="[^"]*" )?style="[^"]*stroke: #1f77b4'
    assert re.findall(pattern, chart.image.decode()) == [""]
