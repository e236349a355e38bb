"""The scripts in docs/examples work with a user's data folder."""

from __future__ import annotations

import gzip
import pickle
import re
import runpy
import zipfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image

from fastsiam.config import AugmentConfig
from fastsiam.pipelines import ViewLoader, build_eval_loader
from fastsiam.pipelines.store import open_store
from fastsiam.views.batch import Batch
from tests.conftest import ROOT, write_images


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("examples") / "train", classes=3, each=16, side=40)


def example(name: str, data: Path, **settings: int) -> tuple[float, list[float]]:
    """Run an example; return its final loss and the numbers at the ends of its output lines."""
    main = runpy.run_path(str(ROOT / "docs" / "examples" / name))["main"]
    with redirect_stdout(StringIO()) as output:
        loss = main(str(data), crop=32, **settings)
    return loss, [float(x) for x in re.findall(r" (-?\d+\.\d+)$", output.getvalue(), re.M)]


def test_plain_loop_reduces_loss(tmp_path: Path) -> None:
    """It learns to tell 16 plain colours apart, which is one step per epoch."""
    for number, colour in enumerate(np.random.default_rng(0).integers(0, 256, (16, 3))):
        Image.new("RGB", (40, 40), tuple(colour.tolist())).save(tmp_path / f"{number}.png")
    _, losses = example("plain_loop.py", tmp_path, epochs=40)
    assert min(losses[-7:]) < losses[0] - 0.05


@pytest.mark.slow
def test_lightning_and_lightly_reduce_loss(data: Path) -> None:
    """The loss decreases from its initial value of about 0."""
    for name, epochs in (("lightning_module.py", 2), ("with_lightly.py", 16)):
        loss, _ = example(name, data, epochs=epochs)
        assert -1 <= loss < -0.05, name


def test_supervised_reduces_loss(data: Path) -> None:
    _, (first, *_, last) = example("supervised.py", data, epochs=6, batch=16)
    assert last < first


def test_lightning_resumes_mid_epoch(images: Path, tmp_path: Path) -> None:
    """Its checkpoints contain the loader's state, so a resumed run sees the remaining images."""
    names = runpy.run_path(str(ROOT / "docs" / "examples" / "lightning_module.py"))
    data, seen = str(images / "train"), []

    class RecordingSimSiam(names["SimSiam"]):  # type: ignore[misc, name-defined, valid-type]
        def training_step(self, batch: Batch, step: int) -> torch.Tensor:
            seen.append(batch.index.tolist())
            loss: torch.Tensor = super().training_step(batch, step)
            return loss

    def fit(folder: str, resumed: Path | None = None) -> list[list[int]]:
        seen.clear()
        saving = ModelCheckpoint(tmp_path / folder, "{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = lightning.Trainer(
            max_epochs=2, logger=False, callbacks=[saving], enable_progress_bar=False,
            enable_model_summary=False, accelerator="cpu",
        )  # fmt: skip
        trainer.fit(
            RecordingSimSiam(), names["Views"](data, "native", 32, batch=8), ckpt_path=resumed
        )
        return list(seen)

    reference = fit("first")
    assert len(reference) == 6 and reference[:3] != reference[3:]
    for steps in (2, 3):
        assert fit("resumed", tmp_path / "first" / f"step={steps}.ckpt") == reference[steps:]


def test_lightning_validates_with_both_kinds_of_loader(images: Path) -> None:
    names = runpy.run_path(str(ROOT / "docs" / "examples" / "lightning_module.py"))
    seen = []

    class Recording(names["SimSiam"]):  # type: ignore[misc, name-defined, valid-type]
        def validation_step(self, batch: Any, step: int) -> None:
            seen.append((type(batch).__name__, len(batch.index)))

    augment = AugmentConfig.alike(crop=16)
    trainer = lightning.Trainer(logger=False, enable_progress_bar=False, accelerator="cpu")
    with ViewLoader(images / "val", augment, batch=6) as views:
        trainer.validate(Recording(), views, verbose=False)
    trainer.validate(Recording(), build_eval_loader(images, "val", augment, resize=16, batch=6))
    assert seen == [("Batch", 6)] * 2 + [("EvalBatch", 6)] * 2


def test_other_sets_are_extracted_from_wheels(tmp_path: Path) -> None:
    """Small stand-ins for the wheels: ten images of two classes, two of them identical."""
    images = np.random.default_rng(0).integers(0, 256, (10, 28, 28), np.uint8)
    images[7] = images[3]
    labels = np.arange(10, dtype=np.int64) % 2
    rows = np.concatenate([np.arange(640).reshape(10, 64) % 17, labels[:, None]], 1)
    lines = "\n".join(",".join(f"{value:.1f}" for value in row) for row in rows)
    members = {
        "scikit_learn-1-py3.whl": {"sklearn/datasets/data/digits.csv.gz": lines.encode()},
        "animal_mnist-1-py3.whl": {
            f"animal_mnist/data/Animal_MNIST/animal_{name}_version_3.gz": pickle.dumps(array)
            for name, array in (("data", images), ("label", labels))
        },
    }
    for wheel, contents in members.items():
        with zipfile.ZipFile(tmp_path / wheel, "w") as file:
            for name, content in contents.items():
                file.writestr(name, gzip.compress(content))
    main = runpy.run_path(str(ROOT / "docs" / "examples" / "other_sets.py"))["main"]
    assert main(str(tmp_path), str(tmp_path / "sets")) == {"digits": (8, 2), "animals": (8, 1)}
    files = sorted((tmp_path / "sets/animals").rglob("*.png"))
    assert {path.parts[-2] for path in files} == {"bear", "bird"} and len(files) == 9
    for path in files:
        np.testing.assert_array_equal(np.asarray(Image.open(path)), images[int(path.stem)])
    digit = np.asarray(Image.open(next((tmp_path / "sets/digits").rglob("00000.png"))))
    assert digit.reshape(-1)[:17].tolist() == [round(i * 255 / 16) for i in range(17)]


def test_generated_images_open_as_data_sets(tmp_path: Path) -> None:
    examples = ROOT / "docs" / "examples"
    runpy.run_path(str(examples / "many_images.py"))["main"](12, str(tmp_path / "many"))
    store = open_store(tmp_path / "many", "train")
    assert store.labels.tolist() == list(range(12)) and store.decode(11).size == (64, 64)
    runpy.run_path(str(examples / "landscapes.py"))["main"](str(tmp_path / "landscapes"))
    store = open_store(tmp_path / "landscapes", "train")
    images = [store.decode(index) for index in range(len(store))]
    assert {image.size for image in images} == {(400, 300)}
    assert len({image.tobytes() for image in images}) == len(images) == 6


def test_landscapes_prints_its_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["landscapes.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(ROOT / "docs/examples/landscapes.py"), run_name="__main__")
    assert capsys.readouterr().out.startswith("usage: landscapes.py [-h] out")
    assert not list(tmp_path.iterdir())
