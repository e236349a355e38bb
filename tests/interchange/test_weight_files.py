"""Weight files: no code is executed, corruption is reported."""

from __future__ import annotations

import argparse
import collections
import os
import pickle
import sys
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fastsiam.errors import CheckpointError
from fastsiam.interchange import export_weights, load_pretrained
from tests.configs import TINY
from tests.interchange.networks import resnets, untrained


class Hostile:
    """An object whose unpickling calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("zipped", [True, False])  # files from before torch 1.6 are not zips
def test_malicious_pickles_are_not_executed(zipped: bool, tmp_path: Path) -> None:
    mark, path = tmp_path / "executed", tmp_path / "w.pth"
    harmless = {"state_dict": resnets(), "n": [np.float64(1), argparse.Namespace(x=[1])]}
    for hostile, name in (
        (Hostile(os.system, f"touch {mark}"), "posix.system"),
        (Hostile(eval, f"open({str(mark)!r}, 'w')"), "builtins.eval"),
    ):
        content = {**harmless, "deep": {"list": [hostile]}}
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(CheckpointError, match=f"is refused: it refers to {name}") as caught:
            load_pretrained(path)
        assert "\n" not in str(caught.value) and not mark.exists()
        path.write_bytes(pickle.dumps(hostile))
        with pytest.raises(CheckpointError, match="cannot read"):
            load_pretrained(path)
        assert not mark.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_logs_and_settings_in_checkpoints_are_skipped(zipped: bool, tmp_path: Path) -> None:
    """mmselfsup publishes files in the old format; mmengine's logs pickle methods by getattr."""
    content: dict[str, Any] = {
        "state_dict": resnets(),
        "message_hub": {
            "log_scalars": {"loss": np.arange(3.0), "lr": [np.float64(1)]},
            "statistics_methods": {"mean": Hostile(getattr, collections.Counter, "update")},
        },
        "meta": {"torch": torch.torch_version.TorchVersion("2.1.0"), "id": uuid.UUID(int=3)},
        "hyper_parameters": argparse.Namespace(method="simsiam", kwargs={"a": np.float64(3)}),
        "loops": collections.defaultdict(list, {"x": [np.arange(3)]}),
        "paths": [Path("/tmp/x"), collections.deque([1, 2])],
    }
    path = tmp_path / "w.pth"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    assert zipfile.is_zipfile(path) == zipped
    pretrained = load_pretrained(path)
    expected = content["state_dict"]["layer1.0.conv1.weight"]
    assert torch.equal(pretrained.state["backbone.layer1.0.conv1.weight"], expected)


def test_third_party_objects_are_not_imported_or_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object whose state is a list, and a dict; their modules exist only while saving."""
    methods = {"__module__": "omegaconf.made_up", "__getstate__": lambda self: [1]}
    config = type("DictConfig", (), methods)()
    other = type("ConfigDict", (dict,), {"__module__": "mmengine.made_up"})(b=2)
    with monkeypatch.context() as patch:
        for kind in (type(config), type(other)):
            for module in (kind.__module__, kind.__module__.split(".")[0]):
                patch.setitem(sys.modules, module, SimpleNamespace(**{kind.__name__: kind}))
        content = {"state_dict": resnets(), "hyper_parameters": (config, other)}
        torch.save(content, tmp_path / "w.pth")
    assert load_pretrained(tmp_path / "w.pth").model.backbone == "resnet10"


def test_equal_exports_are_equal_files(tmp_path: Path) -> None:
    """safetensors writes its metadata in a random order."""
    network, path, files = untrained(TINY), tmp_path / "w.safetensors", set()
    for _ in range(8):
        export_weights(network, format="plain", out=path, force=True)
        files.add(path.read_bytes())
    assert len(files) == 1
