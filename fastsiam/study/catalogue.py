"""The paper's experiments, each as rows of a table: what is changed, what the paper found.

A variant (``variants``) is one change of a scale's base recipe. Rows of several studies share
variants, and so share runs.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from fastsiam.study.comparisons import COMPARISONS
from fastsiam.study.tables import COLLAPSED, GOOD, Claim, Row, Study, worse_than
from fastsiam.study.variants import (
    Variant,
    of_method,
    part_of_dim,
    times_batch,
    times_epochs,
    transfer,
    two_pairs,
    unchanged,
    wide_predictor,
    without_head_bn,
)

BASELINE = Variant("baseline", "SimSiam", unchanged)
DECAYED = Variant(
    "predictor-lr-decayed", "predictor's rate decayed", of_method(predictor_lr="cosine")
)
NO_PREDICTOR = Variant("no-predictor", "no predictor", of_method(predictor="none"))
HALF_BATCH = Variant("half-batch", "1/2 of the batch", times_batch(0.5))
TWICE_AS_LONG = Variant("epochs-2x", "2 x the epochs", times_epochs(2))

_STOP_GRADIENT = Study(
    "stop-gradient",
    "With and without stop-gradient",
    "Fig. 2",
    (
        Row(replace(DECAYED, title="with stop-gradient"), 67.7, GOOD),
        Row(
            Variant(
                "no-stop-gradient",
                "without stop-gradient",
                of_method(stop_gradient=False, predictor_lr="cosine"),
            ),
            0.1,
            COLLAPSED,
        ),
    ),
    reference=DECAYED.name,
)

_PREDICTOR = Study(
    "predictor",
    "The predictor",
    "Table 1",
    (
        Row(DECAYED, 67.7, GOOD),
        Row(NO_PREDICTOR, 0.1, COLLAPSED),
        Row(
            Variant("fixed-predictor", "fixed random predictor", of_method(predictor="fixed")),
            1.5,
            (Claim("fails"), Claim("stands")),
        ),
        Row(
            replace(BASELINE, title="predictor's rate not decayed"),
            68.1,
            (*GOOD, Claim("better", DECAYED.name)),
        ),
    ),
    reference=DECAYED.name,
)

_BATCHES = (
    (Variant("eighth-batch", "1/8 of the batch", times_batch(1 / 8)), 66.1),
    (Variant("quarter-batch", "1/4 of the batch", times_batch(1 / 4)), 67.3),
    (HALF_BATCH, 68.1),
    (BASELINE, 68.1),
    (Variant("batch-2x", "2 x the batch", times_batch(2)), 68.0),
    (Variant("batch-4x", "4 x the batch", times_batch(4)), 67.9),
    (Variant("batch-8x", "8 x the batch", times_batch(8)), 64.0),
)
_AS_GOOD = {"half-batch", "batch-2x", "batch-4x"}
"""Batches whose differences from the base are "at the level of random variations"."""

_BATCH = Study(
    "batch",
    "Batch sizes",
    "Table 2",
    tuple(
        Row(
            variant,
            figure,
            GOOD
            if variant is BASELINE
            else (*GOOD, Claim("alike", "baseline"))
            if variant.name in _AS_GOOD
            else worse_than("baseline"),
        )
        for variant, figure in _BATCHES
    ),
)

_BATCH_NORM = Study(
    "batch-norm",
    "BN on the heads",
    "Table 3",
    (
        Row(
            Variant("head-bn-none", "no BN on the heads", without_head_bn),
            34.6,
            (Claim("stands"), Claim("worse", "baseline")),
        ),
        Row(
            Variant("head-bn-hidden", "BN on hidden layers alone", of_method(head_bn="hidden")),
            67.4,
            worse_than("baseline"),
        ),
        Row(
            Variant("output-affine", "default, output's BN affine", of_method(output_affine=True)),
            68.1,
            GOOD,
        ),
        Row(
            replace(BASELINE, title="default, output's BN not affine"),
            68.2,
            (*GOOD, Claim("alike", "output-affine")),
        ),
        Row(
            Variant("head-bn-all", "BN on all layers", of_method(head_bn="all")),
            "unstable",
            (Claim("unstable"), Claim("stands")),
        ),
    ),
)

_SIMILARITY = Study(
    "similarity",
    "Similarity function",
    "section 4.5",
    (
        Row(replace(BASELINE, title="cosine"), 68.1, GOOD),
        Row(
            Variant("cross-entropy", "cross-entropy", of_method(similarity="cross-entropy")),
            63.2,
            worse_than("baseline"),
        ),
    ),
)

_SYMMETRY = Study(
    "symmetry",
    "Symmetrised loss",
    "section 4.6; section 4.2 on the last row",
    (
        Row(replace(BASELINE, title="symmetric"), 68.1, GOOD),
        Row(
            Variant("asymmetric", "asymmetric", of_method(symmetric=False)),
            64.8,
            worse_than("baseline"),
        ),
        Row(
            Variant("asymmetric-2x", "asymmetric, two pairs of each image", two_pairs),
            67.3,
            (*GOOD, Claim("better", "asymmetric")),
        ),
        Row(
            Variant(
                "asymmetric-no-predictor",
                "asymmetric, no predictor",
                of_method(symmetric=False, predictor="none"),
            ),
            "fails",
            (Claim("fails"),),
        ),
    ),
)

_DIMENSION = Study(
    "dimension",
    "Output dimension",
    "appendix B",
    (
        Row(
            Variant("eighth-dim", "1/8 of the dimension", part_of_dim(8)),
            65.3,
            worse_than("baseline"),
        ),
        Row(
            Variant("quarter-dim", "1/4 of the dimension", part_of_dim(4)),
            67.2,
            worse_than("baseline"),
        ),
        Row(
            Variant("half-dim", "1/2 of the dimension", part_of_dim(2)),
            67.5,
            worse_than("baseline"),
        ),
        Row(BASELINE, 68.1, GOOD),
        Row(
            Variant("wide-predictor", "predictor's hidden layer as wide", wide_predictor),
            "can be less stable or fail",
        ),
    ),
)

_ALTERNATION = Study(
    "alternation",
    "Alternating optimisation",
    "section 5.2",
    (
        Row(replace(BASELINE, title="1 step"), 68.1, GOOD),
        Row(
            Variant("alternate-10", "10 steps", of_method(alternate_every=10)),
            68.7,
            (*GOOD, Claim("better", "baseline")),
        ),
        Row(
            Variant("alternate-100", "100 steps", of_method(alternate_every=100)),
            68.9,
            (*GOOD, Claim("better", "baseline")),
        ),
        Row(Variant("alternate-epoch", "1 epoch", of_method(alternate_every=0)), 67.0, GOOD),
    ),
)

_MOVING_AVERAGE = Study(
    "moving-average",
    "Moving average of each image's target",
    "section 5.2",
    (
        Row(replace(BASELINE, title="predictor"), 68.1, GOOD),
        Row(NO_PREDICTOR, 0.1, COLLAPSED),
        Row(
            Variant(
                "moving-average",
                "no predictor, moving average",
                of_method(predictor="none", target_average=0.8),
            ),
            55.0,
            worse_than("baseline"),
        ),
    ),
)

_SCHEDULES = (
    (HALF_BATCH, 68.1),
    (Variant("half-batch-2x", "2 x the epochs", times_epochs(2, batch=0.5)), 70.0),
    (Variant("half-batch-4x", "4 x the epochs", times_epochs(4, batch=0.5)), 70.8),
    (Variant("half-batch-8x", "8 x the epochs", times_epochs(8, batch=0.5)), 71.3),
)

_SCHEDULE = Study(
    "schedule",
    "Longer training",
    "Table 4",
    (
        Row(replace(HALF_BATCH, title="1 x the epochs"), 68.1, GOOD),
        *(
            Row(variant, figure, (*GOOD, Claim("better", shorter.name)))
            for (shorter, _), (variant, figure) in pairwise(_SCHEDULES)
        ),
    ),
    reference=HALF_BATCH.name,
    figure="linear top-1 of ResNet-50 on ImageNet after 100, 200, 400 and 800 epochs",
)

_TRANSFER = Study(
    "transfer",
    "The recipe for transfer",
    "section 6.1",
    (
        Row(replace(TWICE_AS_LONG, title="baseline"), None, GOOD),
        Row(
            Variant("transfer", "10 x the rate, 1/10 of the decay", transfer),
            "similar",
            (*GOOD, Claim("alike", TWICE_AS_LONG.name)),
        ),
    ),
    reference=TWICE_AS_LONG.name,
    figure="linear top-1 of ResNet-50 on ImageNet after 200 epochs",
)

_CIFAR10 = Study(
    "cifar10",
    "CIFAR-10",
    "appendix D",
    (Row(BASELINE, 91.8, GOOD),),
    figure="linear top-1 of ResNet-18 on CIFAR-10 after 800 epochs",
)

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        _STOP_GRADIENT,
        _PREDICTOR,
        _BATCH,
        _BATCH_NORM,
        _SIMILARITY,
        _SYMMETRY,
        _DIMENSION,
        _ALTERNATION,
        _MOVING_AVERAGE,
        _SCHEDULE,
        *COMPARISONS,
        _TRANSFER,
        _CIFAR10,
    )
}
"""Every study by its name, in the paper's order."""
