"""How a training run starts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastsiam.config import TrainConfig
from fastsiam.distributed import Place
from fastsiam.errors import CheckpointError, FastSiamError
from fastsiam.interchange import load_pretrained
from fastsiam.train.command import check_run, preflight
from fastsiam.train.knn_monitor import _knn_batch
from fastsiam.train.start import initial_weights
from tests.configs import flags, with_settings
from tests.conftest import write_images
from tests.processes import fastsiam
from tests.ranks import fastsiam_on_ranks
from tests.train.runs import train_run


def test_variant_is_initialised_from_matching_parts(
    stopped_config: TrainConfig, tmp_path: Path
) -> None:
    """Variants initialise each other. A predictor that the other variant lacks is new."""
    variants: list[tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
        # the projector's output has a bias instead of BN; the predictor is the same
        ({"head_bn": "hidden"}, ("predictor",), ("predictor",)),
        ({"head_bn": "none"}, (), ()),
        ({"predictor": "none", "target_average": 0.8}, ("projector",), ("projector",)),
    ]
    for variant, there, back in variants:
        other = with_settings(stopped_config, max_steps=1, init=stopped_config.run.out, **variant)
        run = train_run(other, out=tmp_path / str(variant))
        for config, heads in ((other, there), (with_settings(stopped_config, init=run), back)):
            assert initial_weights(config)[1] == ("backbone", *heads)


def make_invalid_runs(small: TrainConfig, tmp_path: Path) -> Iterator[tuple[TrainConfig, str]]:
    """Yield runs that fail at startup, each with a part of the error message."""
    ones = write_images(tmp_path / "ones", classes=9, each=1)
    yield (
        with_settings(small, data=ones, holdout="10%"),
        "--holdout 10% keeps at least one image of each class for training, but no class of "
        f"{ones} has two: remove --holdout, or sort the images into train/ and val/ yourself",
    )
    yield with_settings(small, holdout="10%"), "already has validation images"
    yield with_settings(small, data=tmp_path / "none"), "no data at"
    yield with_settings(small, batch=64), "fewer than one batch of 64"
    yield with_settings(small, extend=9), "needs a run to extend"


def test_rejected_run_leaves_no_folder(small: TrainConfig, tmp_path: Path) -> None:
    """The launcher fails before or after it starts ranks; with torchrun, rank 0 fails."""
    out = tmp_path / "runs" / "new"
    cases = [*make_invalid_runs(small, tmp_path)]
    for config, message in cases:
        with pytest.raises(FastSiamError, match=re.escape(message)):
            train_run(config, out=out)
        assert not out.parent.exists(), message
    two = ["--gpus", "2", "--out", str(out)]
    for config, message in (cases[0], cases[-1]):
        stderr = fastsiam("train", *flags(config), *two, code=1).stderr
        assert "error: " in stderr and message in stderr and not out.parent.exists()
    ranks = fastsiam_on_ranks(2, "train", *flags(config), *two, code=1)
    assert message in ranks[0].stderr and not out.parent.exists()


def test_init_loads_pretrained_weights(
    stopped_config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, some = Path(stopped_config.run.out), tmp_path / "some.pth"
    torch.save({"state_dict": load_pretrained(first).part("backbone")}, some)
    zero = with_settings(stopped_config, lr=1e-30, max_steps=1, weight_decay=0.0)
    weights = {
        name: load_pretrained(train_run(zero, out=tmp_path / name, init=init)).state
        for name, init in (("some", some), ("none", ""))
    }
    initial_state = load_pretrained(first).state
    for key, value in initial_state.items():
        if "running" in key or "tracked" in key:
            continue
        expected = value if key.startswith("backbone.") else weights["none"][key]
        torch.testing.assert_close(weights["some"][key], expected, rtol=0, atol=1e-20)
    assert not torch.equal(
        weights["none"]["backbone.conv1.weight"], initial_state["backbone.conv1.weight"]
    )
    assert "randomly initialised: projector, predictor" in capsys.readouterr().err
    lost = tmp_path / "lost"
    for different in ({"width": 8}, {"stem": "cifar-pad2"}):
        with pytest.raises(CheckpointError, match="pass the same --backbone, --stem and --width"):
            preflight(with_settings(stopped_config, out=lost, init=first, **different), world=1)
    missing = with_settings(stopped_config, out=lost, init=tmp_path / "nowhere.pth")
    error = fastsiam("train", *flags(missing), code=1).stderr
    assert error.startswith("error: no checkpoint at") and error.count("\n") == 1
    assert not lost.exists()
    some.unlink()  # a resumed run no longer needs it
    preflight(with_settings(stopped_config, out=tmp_path / "some", init=some), world=1)


def test_max_restarts_needs_out_and_resume_auto(
    stopped_copy: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ValueError, match="--max-restarts needs --out"):
        check_run(with_settings(stopped_copy, out=""))
    with pytest.raises(ValueError, match="--max-restarts needs --resume auto"):
        check_run(with_settings(stopped_copy, resume="never"))
    assert check_run(stopped_copy) == 1


def test_max_restarts_with_one_process_causes_warning(
    small: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    train_run(small, max_restarts=1, max_steps=1)
    assert "warning: --max-restarts has no effect on a run of one" in capsys.readouterr().err


@pytest.mark.parametrize(("batch", "parts", "most"), [(512, 1, 1024), (32, 1, 256), (32, 4, 64)])
def test_knn_batch_on_gpu_scales_with_micro_batch(
    batch: int, parts: int, most: int, small: TrainConfig
) -> None:
    """On a GPU its batch depends on the images and views per rank; on a CPU it is fixed."""
    config = with_settings(small, batch=batch, accumulate=parts)
    assert _knn_batch(config, Place(rank=0, world=2, device=torch.device("cuda"))) == most
    assert _knn_batch(config, Place(rank=0, world=2, device=torch.device("cpu"))) == 256
