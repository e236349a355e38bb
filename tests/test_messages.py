"""Messages: readers reject corrupt files in one line, and commands can be pasted into a shell."""

from __future__ import annotations

import ast
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fastsiam import bad_image_list
from fastsiam.bench import measurements, soak
from fastsiam.errors import FastSiamError
from fastsiam.files import quote
from fastsiam.interchange import load_pretrained
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.records import read_records
from fastsiam.study.record import read_record
from fastsiam.train import image_list
from fastsiam.train.image_list import ImageList
from tests.conftest import ROOT
from tests.fuzz.targets import TARGETS
from tests.modules import MODULES, parse_module
from tests.sources import put

Contents = Iterable[str | bytes]


def evaluations(_: Path) -> Contents:
    (path,) = ROOT.glob("bench/results/cifar10-evaluation/eval/linear-cached-*.json")
    record = json.loads(path.read_text())
    wrong: dict[str, list[Any]] = {
        "kind": ["guess"],
        "results": [[], 7, [[1]], [{}], [{"top1": "high"}], [{"top1": 50.0, "epoch": None}]],
        "network": [None, {"epoch": "last"}],
        "protocol": [None, [], 7],
        "data": [{}],
    }
    for name, values in wrong.items():
        yield from (json.dumps(record | {name: value}) for value in values)
        yield json.dumps({key: value for key, value in record.items() if key != name})


def image_lists(_: Path) -> Contents:
    names, blocks = ("a", "b", "c"), np.array([0, 0, 1], np.int32)
    yield ImageList(names, blocks=blocks).to_bytes()[:60]
    for wrong in (blocks[:2], blocks.astype(float), blocks[:, None]):
        yield ImageList(names, blocks=wrong).to_bytes()


def valid_file(name: str, folder: Path) -> bytes:
    """Return the file of a fuzzing target."""
    TARGETS[name].write(folder)
    return (folder / TARGETS[name].place).read_bytes()


def corrupt_checkpoints(folder: Path) -> Contents:
    """If the file's structure is intact, the digest of its content detects the corruption."""
    original = valid_file("checkpoint", folder)
    yield from (b"", b"text", original[: len(original) // 2])
    at = original.index(torch.ones(3).numpy().tobytes())
    for place in (at, at + 5, at + 11):  # single bits of a tensor
        yield original[:place] + bytes([original[place] ^ 1]) + original[place + 1 :]


def truncated(name: str, folder: Path) -> Contents:
    original = valid_file(name, folder)
    yield from (original[:keep] for keep in (0, 100, len(original) // 2, len(original) - 100))


def torch_script(_: Path) -> Contents:
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), buffer := io.BytesIO())
    yield buffer.getvalue()


def torch_files(*contents: object) -> Iterator[bytes]:
    for content in contents:
        torch.save(content, buffer := io.BytesIO())
        yield buffer.getvalue()


def plain_weights(folder: Path) -> Contents:
    original = torch.load(io.BytesIO(valid_file("weights", folder)), weights_only=True)
    state, facts = original["state_dict"], original["fastsiam"]
    changes: tuple[dict[str, Any], ...] = (
        {"state_dict": {"conv1.weight": 3}},
        {"state_dict": state | {"conv1.weight": torch.zeros(1)}},
        {"fastsiam": {}},
        {"fastsiam": facts | {"backbone": {"backbone": "resnet10"}}},
        {"fastsiam": facts | {"backbone": facts["backbone"] | {"backbone": "resnet18"}}},
        {"fastsiam": facts | {"epoch": "many"}},
        {"fastsiam": facts | {"input": {"crop": 1, "resize": 1, "mean": (0, 0), "std": (1, 1)}}},
    )
    yield from torch_files(*(original | change for change in changes))


NO_WEIGHTS = r"^cannot read .*: (it is corrupt, .* TensorFlow and JAX must|Invalid argument)"


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize(
    ("file", "read", "message", "contents"),
    [
        (
            "predictor.json", read_record, "is not a record of `fastsiam study`",
            lambda _: ("", "[]", "{}", '{"environments": []}', '{"environments": 1}'),
        ),
        (
            "bench.json", measurements.read, "holds no records of fastsiam bench$",
            lambda _: ("", "[]", "[1]", '[{"case": "loader"}]'),
        ),
        (
            "soak.json", soak.read_record, "holds no record of fastsiam bench soak$",
            lambda _: ['{"runs": [1], "findings": []}'],
        ),
        (
            "eval/x.json", lambda path: read_records(path.parents[1]),
            "is not an evaluation record", evaluations,
        ),
        (
            image_list.FILE, lambda path: ImageList.load(path.parent),
            "the list of the run's images is corrupt", image_lists,
        ),
        (
            bad_image_list.FILE, lambda path: bad_image_list.read_bad_images(path.parent),
            "cannot read the bad-image list", lambda _: "{",
        ),
        ("last.pt", checkpoints.load, "cannot read .*: it is corrupt", corrupt_checkpoints),
        ("w.pth", load_pretrained, NO_WEIGHTS, partial(truncated, "weights")),
        ("w.safetensors", load_pretrained, NO_WEIGHTS, partial(truncated, "safetensors")),
        ("script.pt", load_pretrained, r"save its state_dict\(\) instead", torch_script),
        (
            "list.pt", load_pretrained, "contains no state dict",
            lambda _: torch_files({"a": 1}, [torch.zeros(3)], torch.zeros(3), {}),
        ),
        ("plain.pt", load_pretrained, r"plain\.pt", plain_weights),
    ],
)  # fmt: skip
def test_corrupt_file_is_named_in_one_line(
    file: str,
    read: Callable[[Path], object],
    message: str,
    contents: Callable[[Path], Contents],
    tmp_path: Path,
) -> None:
    path = put(tmp_path / "run" / file)
    for content in contents(tmp_path):
        put(path, content)
        with pytest.raises(FastSiamError, match=message) as caught:
            read(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    path.unlink()
    path.symlink_to("/proc/self/mem")  # reading it fails
    with pytest.raises(FastSiamError, match=r"^cannot read .*(Input/output|No such device)"):
        read(path)


_BEFORE_PATH = re.compile(
    r"(--(cache|config|data|images|init|json|list|out|pretrained|resume|run|source)[ =]"
    r"|\bfastsiam (convert verify|eval [a-z]+|export|features|neighbours|report) |\brm )$"
)
"""The end of a string in front of a path in a command."""
_NOT_PATHS = {"error"}
"""Other values that may follow such a string: an error message about the option."""


def find_unquoted_paths(tree: ast.Module) -> Iterator[str]:
    """Yield the unquoted paths in a module's commands."""
    known = set(_NOT_PATHS)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and "quote(" in ast.unparse(node.value):
            names = [name for target in node.targets for name in ast.walk(target)]
            known |= {name.id for name in names if isinstance(name, ast.Name)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr):
            continue
        for before, value in zip(node.values, node.values[1:], strict=False):
            if isinstance(before, ast.Constant) and isinstance(value, ast.FormattedValue):
                text = ast.unparse(value.value)
                safe = text in known or text.startswith("quote(")
                if _BEFORE_PATH.search(str(before.value)) and not safe:
                    yield f"line {node.lineno}: {str(before.value)[-30:]}{{{text}}}"


def test_paths_in_commands_are_quoted() -> None:
    errors = [
        f"{path}, {one}"
        for path in MODULES.values()
        for one in find_unquoted_paths(parse_module(path))
    ]
    assert not errors, "\n".join(["not quoted (fastsiam.files.quote):", *errors])


def test_quoting_and_detection_of_unquoted_paths() -> None:
    assert quote("/data/a") == "/data/a" and quote("/my data/it's") == "'/my data/it'\"'\"'s'"
    source = 'x = f"convert it: fastsiam convert folder " f"--source {root}"'
    assert len(list(find_unquoted_paths(ast.parse(source)))) == 1
