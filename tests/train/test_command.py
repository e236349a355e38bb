"""What a training run begins with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastsiam.config import TrainConfig
from fastsiam.errors import CheckpointError, FastSiamError
from fastsiam.interchange import load_pretrained
from fastsiam.train.command import preflight, train_here
from tests.configs import flags, with_settings
from tests.conftest import write_images
from tests.processes import fastsiam
from tests.ranks import fastsiam_on_ranks


@pytest.mark.parametrize(
    ("variant", "fresh"),
    [
        ({"head_bn": "hidden"}, "projector"),  # its output has a bias for the BN; h is the same
        ({"head_bn": "none"}, "projector, predictor"),
        ({"predictor": "none", "target_average": 0.8}, ""),
        ({"alternate_every": 10}, ""),
    ],
    ids=str,
)
def test_a_variant_starts_from_what_fits_of_another(
    variant: dict[str, Any], fresh: str, small: TrainConfig, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """There and back; a predictor that is not there before is fresh."""
    small = with_settings(small, max_steps=1, knn_every=0)
    first = train_here(small, "imagenet")
    other = with_settings(small, init=str(first), out=str(tmp_path / "other"), **variant)
    run = train_here(other, "imagenet")
    said = capsys.readouterr().err
    assert (f"; new: {fresh}\n" in said) if fresh else "; new: " not in said
    given, state = load_pretrained(first).state, load_pretrained(run).state
    if "alternate_every" in variant:  # the frozen encoder is what was given
        for part, name in enumerate(("backbone", "projector")):
            frozen = {k.removeprefix(f"frozen.{part}."): v for k, v in state.items()
                      if k.startswith(f"frozen.{part}.") and k.endswith("weight")}  # fmt: skip
            assert frozen and all(torch.equal(given[f"{name}.{k}"], v) for k, v in frozen.items())
    back = with_settings(small, init=str(run), out=str(tmp_path / "back"))
    train_here(back, "imagenet")
    fresh = fresh or ("predictor" if variant.get("predictor") == "none" else "")
    said = capsys.readouterr().err
    assert (f"; new: {fresh}\n" in said) if fresh else "; new: " not in said


def refusals(small: TrainConfig, tmp_path: Path) -> Iterator[tuple[TrainConfig, str]]:
    """Yield runs that are refused at their start, each with a part of the message."""
    ones = write_images(tmp_path / "ones", classes=9, each=1)
    yield (
        with_settings(small, data=str(ones), holdout="10%"),
        "--holdout 10% leaves at least one image of each class in training, and no class of "
        f"{ones} has two: leave --holdout out, or sort the images into train/ and val/ yourself",
    )
    yield with_settings(small, data=str(tmp_path / "none")), "no data at"
    yield with_settings(small, batch=64), "fewer than one batch of 64"
    yield with_settings(small, extend=9), "needs a run to extend"
    first = train_here(with_settings(small, max_steps=1), "imagenet")
    yield with_settings(small, resume=str(first), crop=14), "crop: 16 -> 14"


def test_a_run_that_is_refused_leaves_no_folder(small: TrainConfig, tmp_path: Path) -> None:
    for config, message in refusals(small, tmp_path):
        with pytest.raises(FastSiamError, match=re.escape(message)):
            train_here(with_settings(config, out=str(tmp_path / "runs" / "new")), "imagenet")
        assert not (tmp_path / "runs").exists(), message


def test_ranks_that_are_refused_leave_no_folder(small: TrainConfig, tmp_path: Path) -> None:
    """By the launcher before it starts them, and after; by rank 0 of torchrun's."""
    two = ["--gpus", "2", "--out", str(tmp_path / "runs" / "new")]
    found = [*refusals(small, tmp_path)]
    for config, message in (found[0], found[-1]):
        said = fastsiam("train", *flags(config), *two, code=1).stderr
        assert message in said and not (tmp_path / "runs").exists()
        ranks = fastsiam_on_ranks(2, "train", *flags(config), *two, code=1)
        assert message in ranks[0].stderr and not (tmp_path / "runs").exists()


def test_training_starts_from_a_files_weights(
    small: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train_here(with_settings(small, max_steps=3), "imagenet")
    torch.save({"state_dict": load_pretrained(first).part("backbone")}, tmp_path / "some.pth")
    zero = {"lr": 1e-30, "max_steps": 1, "weight_decay": 0.0}
    weights = {}
    for name, init in (("all", str(first)), ("some", str(tmp_path / "some.pth")), ("none", "")):
        run = train_here(
            with_settings(small, out=str(tmp_path / name), init=init, **zero), "imagenet"
        )
        weights[name] = load_pretrained(run).state
    given = load_pretrained(first).state
    for key, value in given.items():
        if "running" in key or "tracked" in key:
            continue
        torch.testing.assert_close(weights["all"][key], value, rtol=0, atol=1e-20)
        other = weights["all"] if key.startswith("backbone.") else weights["none"]
        torch.testing.assert_close(weights["some"][key], other[key], rtol=0, atol=1e-20)
    assert not torch.equal(weights["none"]["backbone.conv1.weight"], given["backbone.conv1.weight"])
    assert "new: projector, predictor" in capsys.readouterr().err
    wide = with_settings(small, out=str(tmp_path / "wide"), width=8, init=str(first))
    padded = with_settings(small, out=str(tmp_path / "wide"), stem="cifar-pad2", init=str(first))
    for different in (wide, padded):
        with pytest.raises(CheckpointError, match="pass the same --backbone, --stem and --width"):
            preflight(different, world=1)
    lost = with_settings(small, out=str(tmp_path / "lost"), init=str(tmp_path / "nowhere.pth"))
    error = fastsiam("train", *flags(lost), code=1).stderr
    assert error.startswith("error: no checkpoint at") and error.count("\n") == 1
    assert not (tmp_path / "lost").exists() and not (tmp_path / "wide").exists()
    (tmp_path / "some.pth").unlink()  # a run that continues needs it no more
    begun = with_settings(small, out=str(tmp_path / "some"), init=str(tmp_path / "some.pth"))
    preflight(begun, world=1)
