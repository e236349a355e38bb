"""Evaluations on a page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastsiam.report.evaluations import evaluation_tables
from fastsiam.run.records import DataFacts, ImageFacts, NetworkFacts, Record

DATA = DataFacts(root="/data", train=4000, val=1000, classes=10, labels_crc32="0")
IMAGES = ImageFacts(
    crop=32,
    resize=36,
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
    pipeline="memory",
    precision="fp32",
    ranks=1,
)
NETWORK = NetworkFacts(
    backbone="resnet10",
    stem="cifar",
    layout="fastsiam",
    file="last.pt",
    epoch=7.17391,
    untrained=False,
    fingerprint="x",
)


def knn(*lines: tuple[str, int, float, float], data: DataFacts = DATA) -> Record:
    """Return a record of accuracies by features, k and T."""
    results: list[dict[str, Any]] = [
        {"features": features, "k": k, "temperature": t, "top1": top1, "top5": 99.0}
        | ({"epoch": 7.17391} if features == "trained" else {})
        for features, k, t, top1 in lines
    ]
    return Record(
        kind="knn",
        network=NETWORK,
        data=data,
        images=IMAGES,
        protocol={},
        results=results,
        summary=[],
        per_class={},
        speed={},
        environment={},
        date="2026-11-22",
    )


def test_each_kind_has_a_table_with_a_row_for_each_result() -> None:
    one = knn(("trained", 20, 0.2, 69.86666), ("untrained", 20, 0.2, 22.2))
    other = replace(
        knn(),
        kind="linear",
        protocol={"optimizer": "lars", "batch": 8, "epochs": 90, "cached": False},
        results=[{"lr": 0.1, "top1": 50.0, "top5": 99.0}],
    )
    first, second = evaluation_tables({"a": [one, other], "b": [one]})
    assert (first.title, second.title) == ("kNN", "Linear")
    assert first.heads == [
        "run", "epoch", "features", "k", "T", "top-1 (%)", "top-5 (%)", "images", "on",
    ]  # fmt: skip
    assert [row[:6] for row in first.rows[:3]] == [
        ["a", "7.17", "trained", "20", "0.2", "69.87"],
        ["a", "", "untrained", "20", "0.2", "22.20"],
        ["b", "7.17", "trained", "20", "0.2", "69.87"],
    ]
    assert "4,000 to train on, 1,000 to validate, of /data" in first.rows[0][7]
    assert second.rows[0][:5] == ["a", "7.17", "0.1", "50.00", "99.00"]
    assert second.rows[0][5:8] == ["lars", "8", "90"] and evaluation_tables({"a": []}) == []
