"""Training settings as flags and as plain values, including files of version 0.2."""

from __future__ import annotations

from dataclasses import make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fastsiam.config import (
    METHOD_CONFIGS,
    AugmentConfig,
    ColumnNames,
    DataConfig,
    MethodConfig,
    ModelConfig,
    OptimConfig,
    SimSiamConfig,
    TrainConfig,
    ViewConfig,
)
from fastsiam.config.setting import setting
from fastsiam.config.train import all_settings, differences, train_settings

PAPER = TrainConfig()


def test_train_settings_match_flags() -> None:
    methods = [replace(PAPER, model=ModelConfig(method=kind())) for kind in METHOD_CONFIGS.values()]
    assert train_settings().keys() == {name for config in methods for name in config.to_flags()}


def test_view_settings_accept_one_value_or_one_per_view() -> None:
    flags = PAPER.to_flags() | {"crop": "96", "blur_p": "1.0,0.1", "solarise_p": [0, 0.2]}
    views = TrainConfig.from_flags(flags).augment.views
    assert [(v.crop, v.blur_p, v.solarise_p) for v in views] == [(96, 1.0, 0.0), (96, 0.1, 0.2)]
    again = TrainConfig.from_flags(flags).to_flags()
    assert (again["crop"], again["blur_p"], again["hue"]) == (96, "1.0,0.1", 0.1)


@pytest.mark.parametrize(
    ("crop", "given", "side"), [(224, 0, 256), (65, 0, 74), (64, 0, 64), (32, 256, 256)]
)
def test_eval_resize_default_follows_crop(crop: int, given: int, side: int) -> None:
    config = TrainConfig.from_flags(PAPER.to_flags() | {"crop": str(crop), "eval_resize": given})
    assert config.eval_resize == side
    assert TrainConfig.from_dict(config.to_dict()).monitor.eval_resize == given


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"crop": "96,64,32"}, "crop has 3 values for 2 views; pass one, or one per view"),
        ({"crop": "big"}, "crop must be a whole number, not 'big'"),
        ({"views": 3}, "simsiam compares two views of each image, not 3"),
        ({"views": 1}, "views must be at least 2, not 1"),
        ({"views": -1}, "views must be at least 1, not -1"),
        ({"views": 10**23}, "views must be at most 1000, not 1000"),
        ({"method": "nothing"}, "unknown method 'nothing'; choose one of simsiam"),
        ({"batch": 10, "accumulate": 3}, "batch 10 is not divisible by accumulate 3"),
        ({"crop": "224,8"}, "crop 8 is too small for the imagenet stem"),
        ({"eval_resize": 200}, r"eval-resize \(200\) must be at least crop \(224\)"),
    ],
)
def test_invalid_flags_are_named_in_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_flags(PAPER.to_flags() | change)


def test_image_column_change_is_detected_for_same_data(tmp_path: Path) -> None:
    here = replace(PAPER, data=DataConfig(data=str(tmp_path / "a"), image_column="photo"))
    same = replace(here, data=here.data.at(f"{tmp_path}/b/../a", ColumnNames("", "kind")))
    assert same.data.columns == ("photo", "kind") and differences(here, same) == {}
    other = replace(here, data=here.data.at("", ColumnNames("mask")))
    assert differences(here, other) == {"image_column": ("photo", "mask")}
    moved = replace(here, data=here.data.at(str(tmp_path / "b"), ColumnNames()))
    assert moved.data.columns == ("", "") and differences(here, moved) == {}


def test_settings_of_0_2_are_read() -> None:
    method = {"name": "simsiam", "dim": 64, "stop_gradient": False}
    old: dict[str, Any] = {
        "augment": {"views": [{"crop": 32}, {"blur_p": 0.0}], "mean": [0.5, 0.5, 0.5]},
        "model": {"backbone": "resnet18", "stem": "cifar", "method": method},
        "optim": {"lr": 0.03, "restarts": ""},
        "run": {"extend_schedule": "whole", "gpus": 4},
        "step": {"batch_views": False, "keep_memory": True, "bucket_mb": 25, "compile": "on"},
    }
    config = TrainConfig.from_dict(old)
    views = ViewConfig(crop=32), ViewConfig(blur_p=0.0)
    assert config.augment == AugmentConfig(views=[*views], mean=(0.5, 0.5, 0.5))  # type: ignore[arg-type]
    assert hash(config.augment) == hash(AugmentConfig(views=views, mean=(0.5, 0.5, 0.5)))
    assert config.model.backbone == "resnet18" and config.optim == OptimConfig(lr=0.03)
    assert config.model.method == SimSiamConfig(dim=64, stop_gradient=False)
    assert (config.run.gpus, config.step.compile) == (4, "on")
    assert method["name"] == "simsiam" and "restarts" in old["optim"], "the argument is unchanged"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"nothing": {}}, "unknown setting 'nothing'"),
        ({"augment": {"views": [{"sides": 1}, {}]}}, r"unknown setting 'augment\.views\.sides'"),
        ({"model": {"method": {"name": "simsiam", "queue": 1}}}, "model.method.queue"),
        ({"model": {"method": {"dim": 1}}}, "unknown method ''"),
        ({"model": {"method": 3}}, "model.method must be a table of settings"),
        ({"model": {"dim": 64}}, "it was written by fastsiam 0.1, which is too old"),
        ({"optim": 3}, "optim must be a table of settings, not 3"),
        ({"optim": {"lrr": 1}}, r"unknown setting 'optim\.lrr'; did you mean optim\.lr\?"),
        ({"augment": {"mean": [0.5]}}, r"augment\.mean must be 3 numbers, not \[0\.5\]"),
    ],
)
def test_invalid_sections_are_rejected(sections: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_dict(sections)


@pytest.mark.parametrize("name", ["momentum", "crop", "backbone", "config"])
def test_method_setting_with_duplicate_name_is_rejected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method_config = make_dataclass(
        "Own", [(name, float, setting(0.25, "Its own."))], bases=(MethodConfig,), frozen=True
    )
    monkeypatch.setitem(METHOD_CONFIGS, "own", method_config)
    with pytest.raises(ValueError, match=f"a method cannot have a setting {name}: "):
        all_settings()
