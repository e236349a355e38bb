"""Reading runs and plain files: complete, read once, no side effects, one-line errors."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from fastsiam.config import TrainConfig
from fastsiam.config.evaluate import EvalConfig
from fastsiam.distributed import Place
from fastsiam.errors import CheckpointError
from fastsiam.evaluate.subject import open_subject
from fastsiam.interchange import Pretrained, export_weights, load_pretrained
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.checkpoint import weights_hash
from fastsiam.train.start import initial_weights
from tests.configs import TINY, with_model_settings, with_settings
from tests.interchange.networks import X, saved_run, untrained


def test_run_is_read_from_folder_or_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is read from its folder or checkpoint without advancing torch's generator.

    The frozen encoder of ``alternate_every``, zeroed here, is not part of the network.
    """
    model, last = with_model_settings(TINY, alternate_every=10), checkpoints.last(tmp_path / "run")
    method = saved_run(tmp_path / "run", model)
    for weight in method.get_submodule("frozen").parameters():
        weight.data.zero_()
    state = {"model": method.state_dict()}
    torch.save(torch.load(last, weights_only=True) | state, last)
    load = Mock(wraps=torch.load)
    monkeypatch.setattr(torch, "load", load)
    before = torch.get_rng_state()
    for path in (tmp_path / "run", last):
        pretrained = load_pretrained(path)
        assert (pretrained.layout, pretrained.model, pretrained.epoch, pretrained.images) == (
            "fastsiam",
            model,
            7.5,
            1234,
        )
        assert pretrained.run == tmp_path / "run" and pretrained.unused_keys == ()
        network, projected = pretrained.network(), pretrained.network("projector")
        with pytest.raises(ValueError, match="unknown layer 'heads'"):
            pretrained.network("heads")  # type: ignore[arg-type]
        assert torch.equal(network(X), method.backbone(X))
        assert torch.equal(projected(X), method.projector(method.backbone(X)))
        assert (network.features, projected.features, network.training) == (32, 16, False)
    assert [call.args[0] for call in load.call_args_list] == [last, last]
    assert torch.equal(torch.get_rng_state(), before)
    assert (
        str(pretrained) == f"ResNet-10 (cifar stem) of a run of fastsiam, 7.5 epochs, from {last}"
    )


def test_dimension_of_projections_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's projector, whose last weights have more dimensions than its output."""
    saved_run(tmp_path, TINY)
    pretrained = load_pretrained(tmp_path)
    module = pretrained.build()
    module.projector = nn.Sequential(nn.Linear(32, 48), nn.GLU())
    monkeypatch.setattr(Pretrained, "build", lambda self: module)
    projected = replace(pretrained, state=module.state_dict()).network("projector")
    assert projected.features == projected(X).shape[1] == 24


def test_corrupt_run_is_rejected_naming_previous_checkpoint(tmp_path: Path) -> None:
    saved_run(tmp_path, TINY)
    path, other = checkpoints.last(tmp_path), checkpoints.previous(tmp_path)
    other.write_bytes(path.read_bytes())
    original = torch.load(path, weights_only=True)
    zeros = {"backbone.conv1.weight": torch.zeros(3)}
    for change, message in (
        ({"model": zeros}, "do not match ResNet"),
        ({"model": "weights"}, "contains no state dict"),
    ):
        torch.save(original | change, path)
        with pytest.raises(CheckpointError, match=f"^[^\n]*{message}"):
            load_pretrained(tmp_path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=rf"it is corrupt.*; the previous .* {other}$"):
        load_pretrained(tmp_path)


def test_plain_file_is_evaluated_trained_and_exported(small: TrainConfig, tmp_path: Path) -> None:
    """It acts like the run's checkpoint: same image size, normalisation and weights."""
    saved_run(Path(small.run.out), small.model, config=small)
    plain = tmp_path / "w.safetensors"
    run = load_pretrained(Path(small.run.out))
    export_weights(run, format="plain", out=plain)
    here = Place(0, 1, torch.device("cpu"))
    subjects = [
        open_subject(path, EvalConfig(data=small.data.data, workers=0), here)
        for path in (Path(small.run.out), plain)
    ]
    hashes = (weights_hash(subject.network.state_dict()) for subject in subjects)
    assert len({(s.augment, s.resize, x) for s, x in zip(subjects, hashes, strict=True)}) == 1
    _, loaded_parts = initial_weights(with_settings(small, init=str(plain)))
    assert loaded_parts == ("backbone",)
    with pytest.raises(CheckpointError, match="not the network of the settings"):
        initial_weights(with_settings(small, init=str(plain), width=small.model.width + 1))
    with pytest.raises(CheckpointError, match="holds resnet10, not resnet18"):
        load_pretrained(plain, backbone="resnet18")
    pretrained = load_pretrained(plain)
    assert f"of a plain file, 7.5 epochs, from {plain}" in str(pretrained)
    export_weights(pretrained, format="plain", out=tmp_path / "v.pt")
    again = load_pretrained(tmp_path / "v.pt")
    first = run.part("backbone")
    assert all(torch.equal(value, again.state[key]) for key, value in first.items())


def test_exported_files_follow_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        for name in ("w.safetensors", "w.pth"):
            for path in export_weights(untrained(TINY), format="plain", out=tmp_path / name):
                assert path.stat().st_mode & 0o777 == 0o640, path
    finally:
        os.umask(before)
