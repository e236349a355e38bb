"""Linear evaluation: optimizer, batch and learning rates for a number of images."""

from __future__ import annotations

import pytest

from fastsiam.config.evaluate import LinearConfig

IMAGENET = 1_281_167
RATES = [0.1, 0.3, 1, 3, 10, 30]


@pytest.mark.parametrize(
    "images, given, optimizer, batch, rates",
    [
        (IMAGENET, {}, "lars", 4096, [0.1]),
        (91_023, {}, "lars", 4096, [0.1]),  # 2,000 steps in 90 epochs
        (91_022, {}, "sgd", 256, RATES),
        (IMAGENET, {"epochs": 6}, "sgd", 256, RATES),
        (2047, {}, "sgd", 128, RATES),
        (3, {}, "sgd", 16, RATES),
        (500, {"batch": 200}, "sgd", 200, RATES),
        (500, {"lrs": (0.1, 3)}, "lars", 4096, [0.1, 3]),
        (500, {"optimizer": "lars"}, "lars", 4096, [0.1]),
        (IMAGENET, {"optimizer": "sgd"}, "sgd", 256, [30]),
    ],
)
def test_linear_defaults_follow_data_set_size(
    images: int, given: dict[str, object], optimizer: str, batch: int, rates: list[float]
) -> None:
    config = LinearConfig(**given)  # type: ignore[arg-type]
    resolved = config.with_defaults(images)
    assert (resolved.optimizer, resolved.batch, [*resolved.lrs]) == (optimizer, batch, rates)
    assert resolved.with_defaults(images) == resolved
    reason = "--lrs is given" if config.lrs else f"{images:,} images x {config.epochs} epochs are "
    reason = f"{optimizer.upper()}: {reason}"
    assert config.explain_auto(images).startswith(reason if config.optimizer == "auto" else "")
    assert not resolved.explain_auto(images)
    has_few_steps = optimizer == "lars" and images * config.epochs < 2000 * 4096
    assert ("far too low" in config.lars_warning(images)) == has_few_steps


def test_storage_requires_cached() -> None:
    with pytest.raises(ValueError, match="storage needs --cached"):
        LinearConfig(storage="fp16")


def test_non_finite_settings_are_rejected() -> None:
    with pytest.raises(ValueError, match="lrs must be finite, not inf"):
        LinearConfig(lrs=(float("inf"),))
    with pytest.raises(ValueError, match="mean must be finite, not nan"):
        LinearConfig(mean=(float("nan"), 0.0, 0.0))
