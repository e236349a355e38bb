"""Train the Lightning example on two ranks; note each rank's images.

torchrun --nproc-per-node 2 tests/lightning_ranks.py DATA OUT [CHECKPOINT]
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from fastsiam.views.batch import Batch

EXAMPLE = Path(__file__).resolve().parents[1] / "docs" / "examples" / "lightning_module.py"


def noted(names: dict[str, Any], seen: list[list[int]]) -> lightning.LightningModule:
    """Return the example's module, which also adds the images of each step to a list."""

    class Noted(names["SimSiam"]):  # type: ignore[misc, name-defined, valid-type]
        def training_step(self, batch: Batch, step: int) -> torch.Tensor:
            seen.append(batch.index.tolist())
            loss: torch.Tensor = super().training_step(batch, step)
            return loss

    module: lightning.LightningModule = Noted()
    return module


def main(data: str, out: str, checkpoint: str | None = None) -> None:
    """Write ``OUT/RANK.json``: the images of each step."""
    names = runpy.run_path(str(EXAMPLE))
    seen: list[list[int]] = []
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", logger=False,
        callbacks=[ModelCheckpoint(out, "{step}", every_n_train_steps=4, save_top_k=-1)],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(
        noted(names, seen), names["Views"](data, "native", 32, batch=8), ckpt_path=checkpoint
    )
    Path(out, f"{os.environ['RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
