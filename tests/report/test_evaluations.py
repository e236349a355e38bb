"""Evaluations on a page: grids of k and T, the best marked, however many evaluations there are."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from fastsiam.report.evaluations import evaluations
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


def rows(text: str) -> list[list[str]]:
    """Return the cells of all rows; marked ones with a star."""
    text = re.sub(r'<td class="best">([^<]*)<', r"<td>\1*<", text)
    return [re.findall(r"<t[hd]>([^<]*)<", row) for row in re.findall(r"<tr>(.*?)</tr>", text)]


def test_evaluations_of_one_network_are_one_grid() -> None:
    """Three records: k 20 by two T, k 200 by one, and the untrained network."""
    found = [
        knn(("trained", 200, 0.2, 63.0)),
        knn(("trained", 20, 0.2, 69.86666), ("trained", 20, 0.07, 69.9)),
        knn(("untrained", 20, 0.2, 22.2)),
    ]
    assert rows(evaluations({"run": found})) == [
        ["features", "epoch", "k", "T 0.07", "T 0.2"],
        ["trained", "7.17", "20", "69.90*", "69.87"],
        ["trained", "7.17", "200", "", "63.00"],
        ["untrained", "", "20", "", "22.20*"],
    ]


def test_other_images_and_other_runs_have_grids_of_their_own() -> None:
    one = knn(("trained", 20, 0.2, 50.0))
    other = knn(("trained", 20, 0.2, 40.0), data=replace(DATA, val=500))
    text = evaluations({"a": [one, other], "b": [one]})
    assert re.findall(r"<h3>([^<]+)</h3>", text) == [f"kNN top-1 (%) of {x}" for x in "aab"]
    assert "500 to validate" in text and evaluations({"a": []}) == ""
