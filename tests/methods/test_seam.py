"""The seam between methods and all else, tried with a method that has what SimSiam lacks.

What methods keep (queues, averages, momentum encoders) is resumed, compiled and shared by ranks in
``test_variants``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastsiam.config import AugmentConfig, ModelConfig, TrainConfig, ViewConfig
from fastsiam.config.train import differences
from fastsiam.errors import CheckpointError
from fastsiam.interchange import load_pretrained
from fastsiam.methods import Moment, build_method, image_rows, method_skeleton
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from tests import rank_jobs
from tests.configs import with_settings
from tests.methods import everything
from tests.methods.everything import Everything, EverythingConfig
from tests.train.runs import trained

VIEWS = (ViewConfig(crop=16), ViewConfig(crop=16, solarise_p=0.5), ViewConfig(crop=8, blur_p=0.0))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with everything.registered():
        yield


@pytest.fixture
def config(small: TrainConfig) -> TrainConfig:
    """A run of 12 steps on 24 images."""
    backbone = ModelConfig(backbone="resnet10", stem="cifar", width=4, method=EverythingConfig())
    return replace(
        with_settings(small, knn_every=0, lr=0.1),
        augment=AugmentConfig(views=VIEWS),
        model=backbone,
    )


def test_a_run_calls_the_hooks_and_follows_the_groups(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each hook sees each step once, also after the run is resumed in its second epoch.

    BN's scale, whose gradient is dropped in the first 3 of 10 parts, only moves after that.
    """
    seen: dict[str, list[Moment]] = {"before_optimizer": [], "after_step": []}
    for hook, moments in seen.items():
        usual = getattr(Everything, hook)

        def noting(
            self: Everything, *outputs: Any, at: Moment, usual: Any = usual, moments: Any = moments
        ) -> None:
            moments.append(at)
            usual(self, *outputs, at=at)

        monkeypatch.setattr(Everything, hook, noting)
    early = checkpoints.load(trained(config, max_steps=4))
    state = checkpoints.load(trained(config))
    moments = [Moment(step, 3, 12) for step in range(12)]
    assert seen == {"before_optimizer": moments, "after_step": moments}
    assert torch.equal(early.model["head.1.weight"], torch.ones(8))
    assert not torch.equal(state.model["head.1.weight"], torch.ones(8))
    assert state.model["memory"].abs().sum(1).min() > 0 and state.model["memory"].shape == (24, 8)
    backbone, head = state.optimizer["param_groups"]
    assert (backbone["name"], head["name"]) == ("backbone", "head")
    assert 0 < backbone["lr"] < 0.1 * head["lr"]
    assert (backbone["weight_decay"], head["weight_decay"]) == (1e-4, 0.0)
    lines = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "train"]
    assert lines[-1]["lr"] == backbone["lr"]


def test_import_and_init_ask_for_its_parts(
    config: TrainConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = trained(config, max_steps=4)
    read = load_pretrained(run)
    assert read.model == config.model and read.part("head")
    network = read.network()
    torch.testing.assert_close(network.state_dict(), {
        key.removeprefix("backbone."): value for key, value in read.part("backbone").items()
    })  # fmt: skip
    with pytest.raises(CheckpointError, match="holds no projector"):
        read.network("projector")
    again = with_settings(config, init=run, out=tmp_path / "again", max_steps=1)
    trained(again)
    assert "starts from" in (said := capfd.readouterr().err) and "fresh" not in said
    method = build_method(config.model)
    method.start_from(read.part("backbone", "head"))
    started = method.state_dict()
    assert torch.equal(started["target.0.conv1.weight"], read.state["backbone.conv1.weight"])
    simsiam = replace(
        again,
        augment=AugmentConfig.alike(crop=16),
        model=replace(config.model, method=rank_jobs.MODEL.method),
    )
    trained(simsiam, out=tmp_path / "simsiam")
    assert "new: projector, predictor" in capfd.readouterr().err


def test_settings_of_a_method_build_its_class(config: TrainConfig) -> None:
    assert differences(config, with_settings(config, queue=30)) == {"queue": (20, 30)}
    assert isinstance(build_method(config.model), Everything)
    assert {name: row.shape for name, row in image_rows(config.model).items()} == {"memory": (1, 8)}
    assert image_rows(rank_jobs.MODEL) == {}
    skeleton = method_skeleton(config.model, images=24)
    assert {p.device.type for p in skeleton.parameters()} == {"meta"}
    built = build_method(config.model, images=24).state_dict()
    assert {k: v.shape for k, v in skeleton.state_dict().items()} == {
        k: v.shape for k, v in built.items()
    }
