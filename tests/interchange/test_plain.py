"""Plain files: every network has one, whose own lines rebuild it; they are read back."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fastsiam.config import TrainConfig
from fastsiam.config.evaluate import EvalConfig
from fastsiam.distributed import Place
from fastsiam.errors import CheckpointError
from fastsiam.evaluate.features import fingerprint
from fastsiam.evaluate.subject import open_subject
from fastsiam.interchange import FORMATS, export_weights, load_pretrained
from fastsiam.train.start import initial_weights
from tests.configs import with_settings
from tests.interchange.networks import R18, TINY, saved_run, untrained
from tests.processes import fastsiam


@pytest.mark.parametrize("ending", [".safetensors", ".pth"])
def test_it_is_evaluated_trained_on_and_exported(
    ending: str, small: TrainConfig, tmp_path: Path
) -> None:
    """As the run's own checkpoint: images of its size, its normalisation, its very weights."""
    saved_run(Path(small.run.out), small.model, config=small)
    plain = tmp_path / f"w{ending}"
    fastsiam("export", small.run.out, "--format", "plain", "--out", str(plain))
    here = Place(0, 1, torch.device("cpu"))
    subjects = [
        open_subject(path, EvalConfig(data=small.data.data, workers=0), here)
        for path in (Path(small.run.out), plain)
    ]
    assert len({(s.augment, s.resize, fingerprint(s.network)) for s in subjects}) == 1
    _, taken = initial_weights(with_settings(small, init=str(plain)))
    assert taken == ("backbone",)
    with pytest.raises(CheckpointError, match="not the network of the settings"):
        initial_weights(with_settings(small, init=str(plain), width=small.model.width + 1))
    done = fastsiam("export", str(plain), "--format", "plain", "--out", str(tmp_path / "v.pt"))
    assert f"of a plain file, 7.5 epochs, from {plain}" in done.stdout
    again = load_pretrained(tmp_path / "v.pt")
    first = load_pretrained(Path(small.run.out)).part("backbone")
    assert all(torch.equal(value, again.state[key]) for key, value in first.items())


def changed(content: dict[str, Any], *path: str, to: Any) -> dict[str, Any]:
    content = copy.deepcopy(content)
    entry = content
    for name in path[:-1]:
        entry = entry[name]
    entry[path[-1]] = to
    return content


@pytest.mark.parametrize(
    "path, to",
    [
        (("fastsiam", "backbone"), {"backbone": "resnet10"}),
        (("fastsiam", "backbone", "backbone"), "resnet18"),
        (("fastsiam", "backbone", "width"), 5),
        (("fastsiam", "backbone", "stem"), "none"),
        (("fastsiam", "epoch"), "many"),
        (("fastsiam", "input"), {"crop": 1, "resize": 1, "mean": (0, 0), "std": (1, 1, 1)}),
        (("fastsiam",), {}),
        (("state_dict",), {"conv1.weight": 3}),
        (("state_dict", "conv1.weight"), torch.zeros(1)),
    ],
    ids=str,
)
def test_a_damaged_file_is_refused_in_a_line(
    path: tuple[str, ...], to: Any, tmp_path: Path
) -> None:
    out = tmp_path / "w.pt"
    export_weights(untrained(TINY), format="plain", out=out)
    torch.save(changed(torch.load(out, weights_only=True), *path, to=to), out)
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(out)
    assert str(out) in str(caught.value) and "\n" not in str(caught.value)


def test_exported_files_have_the_rights_of_any_file(tmp_path: Path) -> None:
    read = untrained(R18)  # every format can hold it, but those of other methods
    endings = {"simsiam": "pth", "detectron2": "pkl"}
    before = os.umask(0o027)
    try:
        for format in (name for name in FORMATS if name not in ("moco", "swav")):
            out = tmp_path / f"{format}.{endings.get(format, 'safetensors')}"
            for path in export_weights(read, format=format, out=out):
                assert path.stat().st_mode & 0o777 == 0o640, path
    finally:
        os.umask(before)
