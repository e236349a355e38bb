"""Plain files: every network has one, whose own lines rebuild it; they are read back."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fastsiam.config import TrainConfig
from fastsiam.config.evaluate import EvalConfig
from fastsiam.distributed import Place
from fastsiam.errors import CheckpointError
from fastsiam.evaluate.subject import open_subject
from fastsiam.interchange import FORMATS, export_weights, load_pretrained
from fastsiam.train.start import initial_weights
from tests.configs import changed_model, with_settings
from tests.interchange.networks import R18, TINY, X, saved_run, untrained
from tests.interchange.test_export import by_snippet
from tests.processes import fastsiam

SMALL = changed_model(R18, dim=16)
KINDS = {
    "ours, narrow": (TINY, ".safetensors", "fastsiam"),
    "ours, narrow, other stem": (
        changed_model(TINY, stem="cifar-pad2", width=6),
        ".pth",
        "fastsiam",
    ),
    "ours, bottlenecks": (changed_model(SMALL, backbone="resnet50", width=8), ".bin", "fastsiam"),
    "ours, 64 wide": (SMALL, ".pt", "torchvision"),
    "ours, 64 wide, small stem": (changed_model(SMALL, stem="cifar"), ".pth.tar", "torchvision"),
    "ours, without a ReLU": (
        changed_model(SMALL, backbone="resnet10", stem="cifar-no-relu"),
        ".safetensors",
        "torchvision",
    ),
    "torchvision's": (
        changed_model(SMALL, backbone="mobilenet_v3_small"),
        ".safetensors",
        "torchvision",
    ),
    "timm's ResNet": (changed_model(SMALL, backbone="timm/resnet18"), ".safetensors", "timm"),
    "timm's network": (changed_model(SMALL, backbone="timm/test_efficientnet"), ".pth", "timm"),
    "timm's transformer": (changed_model(SMALL, backbone="timm/test_vit"), ".safetensors", "timm"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_its_own_lines_rebuild_the_network(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same features to the last bit, by the library that has the network; and read back."""
    model, ending, library = KINDS[kind]
    if library == "timm":
        pytest.importorskip("timm")
    side = 160 if kind == "timm's transformer" else 32
    method = saved_run(tmp_path / "run", model, side=side)
    x = torch.nn.functional.interpolate(X, side)
    read = load_pretrained(tmp_path / "run")
    out = tmp_path / f"w{ending}"
    export_weights(read, format="plain", out=out)
    monkeypatch.chdir(tmp_path)
    rebuilt = by_snippet(tmp_path / f"w{ending}.md")
    assert type(rebuilt).__module__.split(".")[0] == library
    with torch.no_grad():
        expected = method.backbone(x)
        assert torch.equal(rebuilt(x), expected) and expected.abs().max() > 0.01
    assert snippet_in(out) in (tmp_path / f"w{ending}.md").read_text()
    back = load_pretrained(out)
    assert torch.equal(back.network()(x), expected)
    assert (back.layout, back.epoch, back.input) == ("plain", read.epoch, read.input)
    for name in ("backbone", "stem", "width"):
        assert getattr(back.model, name) == getattr(model, name)


def snippet_in(path: Path) -> str:
    """Return the lines that lie in a plain file, as other programs find them."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return str(file.metadata()["snippet"])
    return str(torch.load(path, weights_only=True)["snippet"])


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
    assert len({(s.augment, s.resize, s.facts().fingerprint) for s in subjects}) == 1
    _, taken = initial_weights(with_settings(small, init=str(plain)))
    assert taken == ("backbone",)
    with pytest.raises(CheckpointError, match="not the network that the settings name"):
        initial_weights(with_settings(small, init=str(plain), width=small.model.width + 1))
    done = fastsiam("export", str(plain), "--format", "plain", "--out", str(tmp_path / "v.pt"))
    assert f"of a plain file, 7.5 epochs, from {plain}" in done.stdout
    again = load_pretrained(tmp_path / "v.pt")
    first = load_pretrained(Path(small.run.out)).part("backbone")
    assert all(torch.equal(value, again.state[key]) for key, value in first.items())


def test_another_network_than_the_user_names_is_refused(tmp_path: Path) -> None:
    export_weights(untrained(TINY), format="plain", out=tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="holds resnet10, not resnet18"):
        load_pretrained(tmp_path / "w.pt", backbone="resnet18")


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
        (("fastsiam", "backbone", "backbone"), 5),
        (("fastsiam", "backbone", "backbone"), "resnet18"),
        (("fastsiam", "backbone", "width"), 5),
        (("fastsiam", "backbone", "stem"), "none"),
        (("fastsiam", "epoch"), "many"),
        (("fastsiam", "input"), {"crop": 0, "resize": 1, "mean": (0, 0, 0), "std": (1, 1, 1)}),
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


def test_damaged_metadata_are_refused_in_a_line(tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    export_weights(untrained(TINY), format="plain", out=out)
    for text in ("{", "{}"):
        save_file(load_file(out), out, metadata={"format": "pt", "fastsiam": text})
        with pytest.raises(CheckpointError, match="damaged") as caught:
            load_pretrained(out)
        assert "\n" not in str(caught.value)


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
