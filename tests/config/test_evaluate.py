"""Settings of evaluations: what linear evaluation does by default, by the number of images."""

from __future__ import annotations

import pytest

from fastsiam.config.evaluate import FinetuneConfig, LinearConfig

IMAGENET = 1_281_167
RATES = [0.1, 0.3, 1, 3, 10, 30]


@pytest.mark.parametrize(
    "images, given, optimizer, batch, rates",
    [
        (IMAGENET, {}, "lars", 4096, [0.1]),
        (IMAGENET // 10, {}, "lars", 4096, [0.1]),
        (91_023, {}, "lars", 4096, [0.1]),  # x 90 epochs are 2,000 steps
        (91_022, {}, "sgd", 256, RATES),
        (50_000, {"epochs": 164}, "lars", 4096, [0.1]),
        (IMAGENET, {"epochs": 6}, "sgd", 256, RATES),
        (2048, {}, "sgd", 256, RATES),
        (2047, {}, "sgd", 128, RATES),
        (500, {}, "sgd", 32, RATES),
        (24, {}, "sgd", 16, RATES),
        (3, {}, "sgd", 16, RATES),
        (500, {"batch": 200}, "sgd", 200, RATES),
        (500, {"lrs": "0.1,3"}, "lars", 4096, [0.1, 3]),  # rates were LARS's all the time
        (500, {"optimizer": "lars"}, "lars", 4096, [0.1]),
        (500, {"optimizer": "sgd"}, "sgd", 256, [30]),
        (IMAGENET, {"optimizer": "sgd"}, "sgd", 256, [30]),
    ],
)
def test_the_papers_protocol_where_data_are_enough(
    images: int, given: dict[str, object], optimizer: str, batch: int, rates: list[float]
) -> None:
    config = LinearConfig(**given)  # type: ignore[arg-type]
    settled = config.settled(images)
    assert (settled.optimizer, settled.global_batch, settled.rates) == (optimizer, batch, rates)
    assert settled.settled(images) == settled
    assert (config.optimizer == "auto") == bool(config.why_settled(images))
    assert not settled.why_settled(images)


def test_what_was_chosen_is_said_with_why() -> None:
    assert LinearConfig().why_settled(IMAGENET) == (
        "LARS, the paper's: 1,281,167 images x 90 epochs are enough for it"
    )
    few = LinearConfig().why_settled(4000)
    assert few.startswith("SGD with several rates, not the paper's LARS: 4,000 images x 90 epochs")
    assert "are 87 steps of 4096" in few and "--optimizer lars" in few


def test_other_evaluations_do_not_depend_on_the_images() -> None:
    config = FinetuneConfig()
    assert config.settled(5) is config
