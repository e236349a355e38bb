"""The seam between methods and all else, tried with a method that has what SimSiam lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastsiam.config import AugmentConfig, ModelConfig, TrainConfig, ViewConfig
from fastsiam.config.flags import differences, from_flags, to_flags
from fastsiam.errors import CheckpointError
from fastsiam.interchange import load_pretrained
from fastsiam.methods import Moment, SimSiam, build_method, image_rows, method_skeleton
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from fastsiam.train.command import train_here
from tests import rank_jobs
from tests.configs import with_settings
from tests.methods import everything
from tests.methods.everything import Everything, EverythingConfig
from tests.networks import short_resnet10
from tests.tiers import slow
from tests.train.runs import history, run_once, run_until, same_state

Ranks = Callable[[str, int], list[Any]]
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


@pytest.mark.parametrize(
    ("pipeline", "kills"),
    [("memory", (4, 6)), slow(("torchvision", (5,)))],
)
def test_it_is_killed_and_resumed_bit_for_bit(
    pipeline: str, kills: Sequence[int], config: TrainConfig, tmp_path: Path
) -> None:
    """Killed before a step, within epochs of 3 steps and between them."""
    config = with_settings(config, pipeline=pipeline, save_every=1)
    whole = tmp_path / "whole"
    expected = checkpoints.load(run_once(config, whole))
    assert expected.step == 12
    for kill_at in kills:
        run = tmp_path / f"killed{kill_at}"
        run_until(config, run, kill_at)
        start = checkpoints.load(run) if checkpoints.last(run).exists() else None
        assert start is None or start.step <= kill_at
        state = checkpoints.load(run_once(config, run, start=start))
        assert same_state(state.model, expected.model), kill_at
        assert same_state(state.optimizer, expected.optimizer), kill_at
        assert history(run)[-1] == history(whole)[-1]


def test_its_state_moves(config: TrainConfig, tmp_path: Path) -> None:
    """The momentum encoder follows, the queue fills up and goes round, each image gets a row."""
    run = run_once(config, tmp_path / "run").parents[1]
    model = checkpoints.load(run).model
    torch.manual_seed(config.numerics.seed)
    fresh = build_method(config.model, images=24).state_dict()
    assert model["memory"].abs().sum(1).min() > 0 and model["memory"].shape == (24, 8)
    assert model["pointer"] == (12 * 8) % 20
    assert not (model["queue"] == fresh["queue"]).all(1).any()
    before, now = (state["target.0.layer1.0.conv1.weight"] for state in (fresh, model))
    own = model["backbone.layer1.0.conv1.weight"]
    assert 0 < (now - own).abs().max() < (before - own).abs().max()


def test_groups_have_their_own_schedules(config: TrainConfig, tmp_path: Path) -> None:
    state = checkpoints.load(run_once(config, tmp_path / "run"))
    backbone, head = state.optimizer["param_groups"]
    assert (backbone["name"], head["name"]) == ("backbone", "head")
    assert 0 < backbone["lr"] < 0.1 * head["lr"]
    assert (backbone["weight_decay"], head["weight_decay"]) == (1e-4, 0.0)
    lines = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "train"]
    assert lines[-1]["lr"] == backbone["lr"]


def test_gradients_can_be_dropped_before_the_optimizer(config: TrainConfig, tmp_path: Path) -> None:
    """BN's scale, whose gradient is dropped in the first 3 of 10 parts, only moves after that."""
    early = checkpoints.load(run_once(with_settings(config, max_steps=3), tmp_path / "early"))
    late = checkpoints.load(run_once(with_settings(config, max_steps=8), tmp_path / "late"))
    assert torch.equal(early.model["head.1.weight"], torch.ones(8))
    assert not torch.equal(late.model["head.1.weight"], torch.ones(8))


def test_two_ranks_are_one(ranks: Ranks) -> None:
    """Losses, weights, queue, and rows of three steps: on one rank and on two, with SyncBN."""
    parts = ranks("everything", 2)
    whole = rank_jobs.everything(0, 1)
    for name in ("state", "loss"):
        torch.testing.assert_close(parts[0][name], parts[1][name], atol=0, rtol=0)
        torch.testing.assert_close(parts[0][name], whole[name], atol=2e-5, rtol=1e-4)


def test_compiled_steps_are_the_same_steps() -> None:
    """Compiled, views of one size in one batch."""
    with short_resnet10():
        torch._dynamo.reset()
        plain, compiled = rank_jobs.everything(0, 1), rank_jobs.compiled_everything(0, 1)
    torch.testing.assert_close(compiled, plain, atol=1e-4, rtol=1e-4)


def test_hooks_know_the_step(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each hook sees each step once, of a run of two epochs that was resumed after four steps."""
    seen: dict[str, list[Moment]] = {"before_optimizer": [], "after_step": []}
    for hook, moments in seen.items():
        usual = getattr(Everything, hook)

        def noting(
            self: Everything, *outputs: Any, at: Moment, usual: Any = usual, moments: Any = moments
        ) -> None:
            moments.append(at)
            usual(self, *outputs, at=at)

        monkeypatch.setattr(Everything, hook, noting)
    config = with_settings(config, epochs=2)
    saved = run_once(with_settings(config, max_steps=4), tmp_path / "run")
    run_once(config, tmp_path / "run", start=checkpoints.load(saved))
    expected = [Moment(step, 3, 6) for step in range(6)]
    assert seen == {"before_optimizer": expected, "after_step": expected}


def test_rows_of_images_are_found(config: TrainConfig) -> None:
    assert {name: row.shape for name, row in image_rows(config.model).items()} == {"memory": (1, 8)}
    assert image_rows(rank_jobs.MODEL) == {}


def test_import_and_init_ask_for_its_parts(
    config: TrainConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = train_here(with_settings(config, max_steps=4), "imagenet")
    read = load_pretrained(run)
    assert read.model == config.model and read.part("head")
    network = read.network()
    torch.testing.assert_close(network.state_dict(), {
        key.removeprefix("backbone."): value for key, value in read.part("backbone").items()
    })  # fmt: skip
    with pytest.raises(CheckpointError, match="holds no projector"):
        read.network("projector")
    again = with_settings(config, init=str(run), out=str(tmp_path / "again"), max_steps=1)
    train_here(again, "imagenet")
    assert "starts from" in (said := capfd.readouterr().err) and "fresh" not in said
    method = build_method(config.model)
    method.start_from(read.part("backbone", "head"))
    started = method.state_dict()
    assert torch.equal(started["target.0.conv1.weight"], read.state["backbone.conv1.weight"])
    simsiam = with_settings(small_simsiam(config), init=str(run), out=str(tmp_path / "simsiam"))
    train_here(simsiam, "imagenet")
    assert "new: projector, predictor" in capfd.readouterr().err


def small_simsiam(config: TrainConfig) -> TrainConfig:
    model = rank_jobs.MODEL
    return replace(
        with_settings(config, max_steps=1),
        augment=AugmentConfig.alike(crop=16),
        model=replace(config.model, method=model.method),
    )


def test_settings_of_a_method_are_its_own(config: TrainConfig) -> None:
    assert from_flags(to_flags(config)) == config
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert config.to_dict()["model"]["method"]["name"] == "everything"
    assert differences(config, with_settings(config, queue=30)) == {"queue": (20, 30)}
    with pytest.raises(ValueError, match="predictor-dim is no setting of everything"):
        from_flags(to_flags(config) | {"predictor_dim": 4})
    with pytest.raises(ValueError, match="three views, not 2"):
        replace(config, augment=AugmentConfig.alike(crop=16))
    with pytest.raises(ValueError, match="unknown method 'nothing'"):
        TrainConfig.from_dict({"model": {"method": {"name": "nothing"}}})


def test_each_kind_of_settings_builds_its_class(config: TrainConfig) -> None:
    assert isinstance(build_method(config.model), Everything)
    assert isinstance(build_method(rank_jobs.MODEL), SimSiam)
    skeleton = method_skeleton(config.model, images=24)
    assert {p.device.type for p in skeleton.parameters()} == {"meta"}
    built = build_method(config.model, images=24).state_dict()
    assert {k: v.shape for k, v in skeleton.state_dict().items()} == {
        k: v.shape for k, v in built.items()
    }
