"""Only rank 0 writes to the run's folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastsiam.config import TrainConfig
from tests.configs import flags, with_settings
from tests.processes import Forked
from tests.ranks import fastsiam_on_ranks

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.link"}


def train_and_log(run: Path, log: Path, arguments: tuple[str, ...]) -> None:
    """Run as a rank and log each write or change in the run's folder."""
    import torch

    from fastsiam.cli import main

    file = os.open(log, os.O_WRONLY | os.O_CREAT)

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event in _CHANGES or (event == "open" and arguments[2] & _WRITING)
        if writes and str(arguments[0]).startswith(str(run)):
            os.write(file, f"{arguments[0]}\n".encode())

    def save(
        content: object, path: Any
    ) -> None:  # C++ opens this file, so Python does not audit it
        sys.audit("open", str(path), "wb", os.O_WRONLY)
        torch_save(content, path)

    torch_save = torch.save
    vars(torch)["save"] = save
    sys.addaudithook(note)
    sys.argv = ["fastsiam", *arguments]
    main()


def test_only_rank_0_writes(small: TrainConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def begin(*arguments: str, environment: Mapping[str, str]) -> Forked:
        log = tmp_path / f"rank{environment['RANK']}"
        return Forked(train_and_log, run, log, arguments, environment=environment)

    config = with_settings(small, epochs=2, save_every=2, knn_every=1)
    fastsiam_on_ranks(2, "train", *flags(config), begin=begin)
    first, second = (
        {name.removeprefix(f"{run}/") for name in (tmp_path / log).read_text().split()}
        for log in ("rank0", "rank1")
    )
    assert not second
    expected = {"lock", "config.json", "metrics.jsonl", "checkpoints/last.pt.tmp"}
    assert {name for name in expected if any(x.startswith(name) for x in first)} == expected
