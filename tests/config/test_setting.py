"""Settings: defined once, converted and checked when their group is built."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import pytest

from fastsiam.bench.config import BenchConfig, GpuConfig, SoakConfig
from fastsiam.config import METHOD_CONFIGS, ConvertConfig, TrainConfig
from fastsiam.config.detect import DetectConfig
from fastsiam.config.evaluate import (
    FeaturesConfig,
    FinetuneConfig,
    KnnConfig,
    LinearConfig,
    NeighboursConfig,
)
from fastsiam.config.run import SlurmConfig, VerifyConfig
from fastsiam.config.setting import Config, setting, settings_of
from fastsiam.config.study import StudyRunConfig, StudyTableConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(Config):
    """Group: of settings for this test. More is said here."""

    rate: float = setting(0.5, "A rate.", above=0)
    share: float = setting(1.0, "A share.", at_least=0, at_most=1)
    log_every: int = setting(1, "Steps.", at_least=1)
    kind: Literal["native", "dali", "ffcv"] = setting("native", "A kind.")
    std: tuple[float, float] | None = setting(None, "Two numbers.", above=0)
    ks: tuple[int, ...] = setting((), "Numbers.")
    raw: bool | None = setting(None, "A switch.")
    nodes: int | str = setting(1, "Machines.")
    name: str = setting("", "A name.")

    def check(self) -> None:
        """Check that the rate is not above the share."""
        if self.rate > self.share:
            raise ValueError("rate is above share")


@dataclass(frozen=True, slots=True, kw_only=True)
class Larger(Group):
    """Larger: a group with one more."""

    rate: float = 0.25
    more: bool = setting(False, "More.", option=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": 0.0}, "rate must be above 0, not 0.0"),
        ({"rate": float("nan")}, "rate must be above 0, not nan"),
        ({"rate": float("inf")}, "rate must be finite, not inf"),
        ({"rate": 10**400}, "rate must be a number, not 1000"),
        ({"share": 1.5}, "share must be at least 0 and at most 1, not 1.5"),
        ({"log_every": 0}, "log-every must be at least 1, not 0"),
        ({"log_every": 2.0}, "log-every must be a whole number, not 2.0"),
        ({"log_every": True}, "log-every must be a whole number, not True"),
        ({"kind": "fcv"}, "kind must be one of native, dali, ffcv, not 'fcv'"),
        ({"std": (1.0, -1.0)}, "std must be above 0, not -1.0"),
        ({"std": (1.0,)}, "std must be 2 numbers or nothing, not (1.0,)"),
        ({"ks": "1,b"}, "ks must be a whole number, not 'b'"),
        ({"raw": 1}, "raw must be true or false or nothing, not 1"),
        ({"nodes": 1.5}, "nodes must be a whole number or text, not 1.5"),
        ({"name": 3}, "name must be text, not 3"),
        ({"share": 0.1}, "rate is above share"),
    ],
)
def test_invalid_value_is_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        Group(**values)
    assert str(refused.value).startswith(message)


def test_values_are_converted() -> None:
    """From text of the command line or YAML, and from TOML's lists and integers."""
    text: dict[str, Any] = {
        "rate": "1", "log_every": "3", "kind": "dali", "std": "[1, 2.5]", "ks": "1,2",
        "raw": "false", "nodes": "4", "name": "7",
    }  # fmt: skip
    group = Group(**text)
    expected = Group(
        rate=1.0, log_every=3, kind="dali", std=(1.0, 2.5), ks=(1, 2), raw=False, nodes=4, name="7"
    )
    assert group == expected and isinstance(group.rate, float)
    assert Group(rate=1, std=[1, 2.5], nodes="1:2") == Group(std=(1.0, 2.5), rate=1.0, nodes="1:2")  # type: ignore[arg-type]


def test_subclass_inherits_settings_and_overrides_default() -> None:
    settings = settings_of(Larger)
    assert [*settings] == [*settings_of(Group), "more"]
    assert (settings["rate"].default, settings["rate"].help) == (0.25, "A rate.")
    sections = settings["rate"].section, settings["more"].section
    assert sections == ("Group: of settings for this test", "Larger: a group with one more")
    assert settings["rate"].option and not settings["more"].option
    with pytest.raises(ValueError, match="rate is above share"):
        Larger(share=0.2)


def test_every_field_is_setting_with_help() -> None:
    train = [type(getattr(TrainConfig(), section.name)) for section in fields(TrainConfig)]
    jobs = [
        *(ConvertConfig, KnnConfig, LinearConfig, FinetuneConfig, FeaturesConfig, NeighboursConfig),
        *(DetectConfig, SlurmConfig, StudyRunConfig, StudyTableConfig, VerifyConfig),
        *(BenchConfig, GpuConfig, SoakConfig),
    ]
    for group in [*train, *jobs, *METHOD_CONFIGS.values()]:
        assert {group_field.name for group_field in fields(group)} == settings_of(group).keys()
        for one in settings_of(group).values():
            assert one.help.endswith((".", ").", ".)")) and "\n" not in one.help, one.name
    assert settings_of(DetectConfig)["data"].help.endswith("required.")  # other commands: the run's
