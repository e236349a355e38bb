"""The paper's comparisons with related methods: section 6, Table 4 and Table B.1."""

from __future__ import annotations

from fastsiam.study.tables import GOOD, Claim, Row, Study, worse_than
from fastsiam.study.variants import (
    Change,
    Variant,
    byol_times_epochs,
    of_method,
    times_epochs,
    unchanged,
)

_TITLES = {
    "simclr": "SimCLR",
    "mocov2": "MoCo v2",
    "byol": "BYOL",
    "swav": "SwAV",
    "simsiam": "SimSiam",
}
_AS_LONG = {
    1: {"simclr": 66.5, "mocov2": 67.4, "byol": 66.5, "swav": 66.5, "simsiam": 68.1},
    2: {"simclr": 68.3, "mocov2": 69.9, "byol": 70.6, "swav": 69.1, "simsiam": 70.0},
    4: {"simclr": 69.8, "mocov2": 71.0, "byol": 73.2, "swav": 70.7, "simsiam": 70.8},
    8: {"simclr": 70.4, "mocov2": 72.2, "byol": 74.3, "swav": 71.8, "simsiam": 71.3},
}
"""Table 4: figures by how many times 100 epochs."""


def _of(method: str, longer: int = 1, title: str = "") -> Variant:
    """Return a method's recipe, so many times as long."""
    name = method if longer == 1 else f"{method}-{longer}x"
    by = byol_times_epochs if method == "byol" else times_epochs
    change: Change = unchanged if longer == 1 else by(longer)
    return Variant(name, title or _TITLES[method], change, method)


_SIMCLR = Study(
    "simclr",
    "SimCLR with predictor and stop-gradient",
    "section 6.2",
    (
        Row(_of("simclr"), 66.5, GOOD),
        Row(
            Variant("simclr-predictor", "with predictor", of_method(predictor="trained"), "simclr"),
            66.4,
            (*GOOD, Claim("no better", "simclr")),
        ),
        Row(
            Variant(
                "simclr-stop-gradient",
                "with predictor and stop-gradient",
                of_method(predictor="trained", stop_gradient=True),
                "simclr",
            ),
            66.0,
            (*GOOD, Claim("no better", "simclr")),
        ),
    ),
    reference="simclr",
)

_SWAV = Study(
    "swav",
    "SwAV with predictor, without stop-gradient",
    "section 6.2",
    (
        Row(_of("swav"), 66.5, GOOD),
        Row(
            Variant("swav-predictor", "with predictor", of_method(predictor="trained"), "swav"),
            65.2,
            worse_than("swav"),
        ),
        Row(
            Variant(
                "swav-no-stop-gradient",
                "without stop-gradient",
                of_method(stop_gradient=False),
                "swav",
            ),
            "NaN",
            (Claim("diverges"),),
        ),
    ),
    reference="swav",
)

_BYOL = Study(
    "byol",
    "The momentum encoder",
    "section 6.2; Table 4",
    (
        Row(_of("byol"), 66.5, GOOD),
        Row(
            Variant(
                "byol-no-momentum",
                "BYOL without momentum encoder",
                of_method(encoder_momentum=0.0, momentum_schedule="constant"),
                "byol",
            ),
            None,
            (Claim("stands"),),
        ),
        Row(_of("simsiam"), 68.1, GOOD),
        Row(
            Variant(
                "simsiam-momentum",
                "SimSiam with momentum encoder",
                of_method(encoder_momentum=0.99),
                "simsiam",
            ),
            None,
            GOOD,
        ),
    ),
    reference="byol",
)


def _table_4(longer: int) -> Study:
    """Return the column of Table 4 with runs of so many times 100 epochs."""
    names = {method: _of(method, longer).name for method in _TITLES}
    said: dict[str, tuple[Claim, ...]] = dict.fromkeys(_TITLES, ())
    if longer == 1:
        others = [method for method in _TITLES if method != "simsiam"]
        said["simsiam"] = tuple(Claim("better", names[method]) for method in others)
    else:
        said["simsiam"] = (Claim("better", names["simclr"]),)
        said["byol"] = (Claim("better", names["simsiam"]),)
    times = "" if longer == 1 else f", {longer} x the epochs"
    return Study(
        "related" if longer == 1 else f"related-{longer}x",
        f"Related methods{times}",
        "Table 4",
        tuple(
            Row(_of(method, longer), figure, (*GOOD, *said[method]))
            for method, figure in _AS_LONG[longer].items()
        ),
        reference=names["simsiam"],
        figure=f"linear top-1 of ResNet-50 on ImageNet after {100 * longer} epochs",
    )


def _reproduced(
    method: str, longer: int, original: float | str, reproduced: float | None = None
) -> Row:
    """Return a row of Table B.1; figures that Table 4 has, too, are that one's."""
    figure = _AS_LONG[longer][method] if reproduced is None else reproduced
    title = f"{_TITLES[method]}, {longer} x the epochs"
    return Row(_of(method, longer, title), figure, GOOD, original=original)


_REPRODUCTION = Study(
    "reproduction",
    "Reproduction of the related methods",
    "Table B.1",
    (
        _reproduced("simclr", 2, 66.6),
        _reproduced("simclr", 8, "68.3; 69.3 at 10 x"),
        _reproduced("mocov2", 2, 67.5),
        _reproduced("mocov2", 8, 71.1),
        _reproduced("byol", 3, 72.5, 72.4),
        _reproduced("byol", 8, "74.3 at 10 x"),
        _reproduced("swav", 4, 70.1),
    ),
    reference="simclr-2x",
    figure="linear top-1 of ResNet-50 on ImageNet after 200 to 800 epochs, its reproduction's",
)

COMPARISONS = (_SIMCLR, _SWAV, _BYOL, *map(_table_4, _AS_LONG), _REPRODUCTION)
"""The studies, in the paper's order but that section 6.2 comes first: its runs are the shortest."""
