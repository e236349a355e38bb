"""Linear evaluation and fine-tuning of a run: records, resuming, subsets of data, bad input."""

from __future__ import annotations

import json
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from fastsiam.config import BackboneConfig
from fastsiam.config.evaluate import EvalConfig, FinetuneConfig, KnnConfig, LinearConfig
from fastsiam.errors import DataError, FastSiamError
from fastsiam.evaluate import record_files
from fastsiam.evaluate.command import evaluate_finetuned, evaluate_linear
from fastsiam.evaluate.features import frozen_output
from fastsiam.evaluate.labelled import LabelledImages
from fastsiam.evaluate.subject import open_subject
from fastsiam.evaluate.supervised import SupervisedTraining
from fastsiam.model.backbones import build_backbone
from fastsiam.pipelines import automatic, build_eval_loader
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.checkpoint import weights_hash
from fastsiam.run.records import read_records
from tests.conftest import write_images
from tests.processes import fastsiam
from tests.ranks import fastsiam_on_ranks
from tests.train.runs import CPU as HERE

QUICK = LinearConfig(
    optimizer="lars",
    epochs=4,
    batch=8,
    eval_every=2,
    workers=0,
    device="cpu",
    pipeline="memory",
)


def test_small_data_set_defaults_to_sgd(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The paper's LARS does not learn 24 images by heart; the default is SGD, which is logged."""
    data = write_images(tmp_path / "data" / "train").parent
    write_images(data / "val")  # the same images
    config = LinearConfig(data=str(data), workers=0, device="cpu", cached=True, eval_every=0)
    record = evaluate_linear(run, config, HERE)
    stderr = capsys.readouterr().err
    assert "SGD: 24 images x 90 epochs" in stderr
    assert "warning" not in stderr
    assert record.protocol["optimizer"] == "sgd" and record.protocol["batch"] == 16
    assert [line["lr"] for line in record.results] == [0.1, 0.3, 1, 3, 10, 30]
    papers = evaluate_linear(run, replace(config, optimizer="lars"), HERE)
    assert record.best["top1"] >= papers.best["top1"] + 10


def test_interrupted_fine_tuning_resumes(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tested with fine-tuning, whose state is that of linear evaluation plus BN.

    It does not repeat an epoch if the validation after it was interrupted.
    """
    config = FinetuneConfig(epochs=4, batch=8, workers=0, device="cpu", eval_every=2)
    reference = evaluate_finetuned(run, config, HERE)
    monkeypatch.setattr(record_files, "_SECONDS_BETWEEN_SAVES", 0.0)
    step = SupervisedTraining.step
    steps: list[int] = []

    def interrupted(self: Any, number: int, batch: Any) -> Tensor:
        steps.append(number)
        if len(steps) == 11:  # in the last of four epochs, of three steps each
            raise KeyboardInterrupt
        return step(self, number, batch)

    monkeypatch.setattr(SupervisedTraining, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate_finetuned(run, config, HERE)
    assert len(list((run / "eval").glob("*.partial"))) == 1
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SupervisedTraining, "evaluate", Mock(side_effect=KeyboardInterrupt))
        evaluate_finetuned(run, config, HERE)
    again = evaluate_finetuned(run, config, HERE)
    assert again.results == reference.results and steps[11:] == [9, 10, 11]
    trained = re.findall(r"^trained (\d .+) in ", capsys.readouterr().err, re.M)
    assert trained == ["4 epochs", "0 epochs"]
    assert not list((run / "eval").glob("*.partial"))


def test_other_protocol_or_corrupt_state_restarts(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = replace(QUICK, epochs=2)
    reference = evaluate_linear(run, two, HERE)
    with monkeypatch.context() as patch:
        patch.setattr(record_files.RecordFiles, "keep", lambda *_, **__: None)
        evaluate_linear(run, QUICK, HERE)  # leaves its state behind
        (path,) = (run / "eval").glob("linear-epoch1-*.partial")
        other = next((run / "eval").glob("*.json")).with_suffix(".partial")
        evaluate_linear(run, two, HERE)
    assert torch.load(path, weights_only=True)["step"] == 12
    flipped = bytearray(other.read_bytes())
    weight = next(iter(torch.load(other, weights_only=True)["training"]["network"].values()))
    flipped[flipped.index(weight.numpy().tobytes()[:16]) + 3] ^= 1 << 6  # a bit of an exponent
    for content in (path.read_bytes(), path.read_bytes()[:1000], flipped):
        other.write_bytes(content)
        assert evaluate_linear(run, two, HERE).results == reference.results


def test_fine_tuning_learns_and_keeps_run_unchanged(run: Path) -> None:
    before = (run / "checkpoints" / "last.pt").read_bytes()
    config = FinetuneConfig(epochs=30, batch=8, lr=3.0, scale_min=0.5, workers=0, device="cpu")
    record = evaluate_finetuned(run, config, HERE)
    assert record.best["top1"] > 60  # chance is 33%
    assert record.images_validated == 12 and record.protocol["epochs"] == 30
    assert (run / "checkpoints" / "last.pt").read_bytes() == before
    backbone = open_subject(run, config, HERE).network
    assert weights_hash(backbone.state_dict()) == record.network.fingerprint
    assert read_records(run)[0].kind == "finetune"


def test_percent_selects_fixed_share_of_every_class(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = replace(QUICK, percent=25, batch=4096, cached=True)
    record: Any = evaluate_linear(run, config, HERE)
    assert record.data.train == 6 and record.data.percent == 25  # 2 of each 8
    assert record.protocol["batch"] == 6
    assert len(list((run / "eval").glob("linear-cached-25percent-epoch1-*.json"))) == 1
    assert " on 6 training images (25% of all, --percent 25, seed 0): " in capfd.readouterr().err
    assert record.summary[0].endswith(" epochs, --percent 25, seed 0)")
    evaluate_linear(run, replace(config, seed=1), HERE)  # another subset has another record
    assert len(list((run / "eval").glob("linear-cached-25percent-epoch1-*.json"))) == 2
    names = tmp_path / "mine.txt"
    # Four images rather than three: with 4 channels, two threads and an odd batch size, oneDNN's
    # 1x1 convolutions of stride 2 write out of bounds (torch 2.11 and 2.15).
    names.write_text("class0/000.jpg\nclass1/001.jpg\n\nclass2/003.jpg\nclass2/004.jpg\n")
    listed = evaluate_linear(run, replace(config, percent=100, subset=str(names)), HERE)
    assert listed.data.train == 4
    assert " on 4 training images (16.7% of all, --subset mine.txt, " in capfd.readouterr().err
    assert len(list((run / "eval").glob("linear-cached-mine-epoch1-*.json"))) == 1


def test_images_that_do_not_fit_into_memory_use_native_pipeline(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run in memory may be evaluated on larger data, or on a machine with less memory."""

    def pipeline(**settings: Any) -> str:
        return open_subject(run, EvalConfig(workers=0, **settings), HERE).data.pipeline

    assert pipeline() == "memory"
    monkeypatch.setattr(automatic, "free_bytes", lambda device: 50_000)  # the images take 41 kB
    assert pipeline() == "native"
    assert pipeline(pipeline="memory") == "memory"  # users are told that the images do not fit


def test_resize_default_follows_crop(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The run's resize applies only to its own crop; a crop of 80 is taken from 91 pixels."""
    for crop, resize, cut in (
        (0, 0, "shorter side to 16 pixels, central 16 x 16;"),
        (20, 0, "shorter side to 20 pixels, central 20 x 20;"),
        (80, 0, "shorter side to 91 pixels, central 80 x 80;"),
        (20, 24, "shorter side to 24 pixels, central 20 x 20;"),
    ):
        open_subject(run, replace(QUICK, crop=crop, resize=resize), HERE).print_summary()
        assert cut in capfd.readouterr().err


@pytest.mark.parametrize("cached", [False, True])
def test_linear_evaluation_on_two_ranks_equals_one(run: Path, cached: bool, tmp_path: Path) -> None:
    """The run is not modified; a checkpoint can be passed instead of the run's folder."""
    before = (run / "checkpoints" / "last.pt").read_bytes()
    out = tmp_path / "linear.json"
    storage = "fp16" if cached else "fp32"
    flags = [
        "--lrs", "0.1,30", "--optimizer", "sgd", "--epochs", "3", "--batch", "8", "--device", "cpu",
        "--workers", "0", "--storage", storage, *(["--cached"] if cached else []), "--gpus",
    ]  # fmt: skip
    results = fastsiam_on_ranks(2, "eval", "linear", str(run), "--json", str(out), *flags, "2")
    (both,) = read_records(run)
    assert results[0].stdout.splitlines() == json.loads(out.read_text())["summary"] == both.summary
    assert not results[1].stdout
    assert "base rate 30" in both.summary[1] and "best of 2 rates" in both.summary[2]
    for convention in (
        "SGD, batch 8, 3 epochs, cosine per step, momentum 0.9, weight decay 0",
        "base rates (and scaled by 8 / 256): 0.1 (0.003125), 30 (0.9375)",
        "CACHED features of one central crop" if cached else "random crops (0.08 to 1 of the area)",
        "shorter side to 16 pixels, central 16 x 16; mean 0.485 0.456 0.406, std 0.229 0.224 0.225",
        "12 validation images, each counted once",
    ):
        assert convention in results[0].stderr
    assert [line["lr"] for line in both.results] == [0.1, 30]
    assert both.best["top1"] == max(line["top1"] for line in both.results)
    assert both.images_validated == 12 and both.data.train == 24
    assert both.protocol == {
        "optimizer": "sgd", "lars_trust": None, "rates": [0.1, 30], "batch": 8, "epochs": 3,
        "momentum": 0.9, "weight_decay": 0.0, "schedule": "cosine per step", "seed": 0,
        "cached": cached, "storage": "fp16" if cached else None,
        "scale_min": None if cached else 0.08,
    }  # fmt: skip
    (record_file,) = (run / "eval").iterdir()
    name = "linear-sgd-cached-epoch1-" if cached else "linear-sgd-epoch1-"
    assert record_file.name.startswith(name) and record_file.suffix == ".json"
    alone_flags = ["--feature-batch", "2", *flags, "1"]
    fastsiam("eval", "linear", str(checkpoints.last(run)), *alone_flags)
    (alone,) = read_records(run)
    assert alone.results == both.results  # feature_batch does not matter
    assert (alone.images.ranks, both.images.ranks) == (1, 2)
    assert (run / "checkpoints" / "last.pt").read_bytes() == before
    network = open_subject(run, QUICK, HERE).network
    assert weights_hash(network.state_dict()) == both.network.fingerprint


def test_evaluation_uses_first_data_set_of_mixture(run: Path, tmp_path: Path) -> None:
    subject = open_subject(run, QUICK, HERE)
    other = write_images(tmp_path / "other", classes=4, each=6)
    mixture = replace(subject.data, mixed_with=(str(other),))
    images = LabelledImages(replace(subject, data=mixture), QUICK)
    with closing(images.open_augmented(QUICK.batch)) as loader:
        names = [name for batch in loader.epoch(0) for name in batch.names]
    assert sorted(names) == sorted(images.train.names()) and len(names) == 24


def test_fine_tuning_default_epochs_depend_on_percent(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1% of eight images per class is rounded up to one image per class."""
    noted = Mock()
    monkeypatch.setattr("fastsiam.evaluate.command._trained", noted)
    for percent, epochs, images in ((1, 60, 3), (50, 30, 12)):
        evaluate_finetuned(run, FinetuneConfig(percent=percent, workers=0, device="cpu"), HERE)
        evaluation = noted.call_args.args[0].evaluation
        assert (evaluation.protocol["epochs"], evaluation.data.train) == (epochs, images)


def test_prime_number_of_images_is_loaded_in_large_batches(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A prime number has no equal parts, but images must not be passed one by one."""
    count = 23
    names = [f"class{i // 8}/{i % 8:03d}.jpg" for i in range(count)]
    (tmp_path / "some.txt").write_text("\n".join(names))
    noted = Mock(wraps=frozen_output)
    monkeypatch.setattr("fastsiam.evaluate.labelled.frozen_output", noted)
    config = replace(QUICK, subset=str(tmp_path / "some.txt"), batch=4096, epochs=1)
    record = evaluate_linear(run, replace(config, feature_batch=4), HERE)
    text = f"{capsys.readouterr()} {record.summary}"
    assert text.count(", 1 epoch") == 3 and "1 epochs" not in text, text
    sizes = [len(call.args[1]) for call in noted.call_args_list]
    assert sum(sizes) == count and max(sizes) <= 4 and len(sizes) <= -(-count // 3)


def test_network_with_other_training_output_is_rejected(tmp_path: Path, images: Path) -> None:
    """Some networks of other libraries have different outputs in training mode."""
    path = tmp_path / "w.pth"
    named: dict[str, Any] = {"backbone": "googlenet", "data": str(images)}
    torch.save(build_backbone(BackboneConfig(backbone="googlenet")).state_dict(), path)
    with pytest.raises(FastSiamError, match=r"not return one feature vector .* training"):
        open_subject(path, replace(FinetuneConfig(), **named), HERE)
    open_subject(path, replace(KnnConfig(), **named), HERE)


def test_invalid_input_is_rejected_before_any_work(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors come before any work, and only once from several ranks."""
    (tmp_path / "list.txt").write_text("class0/000.jpg\nnothing.jpg\n")
    (tmp_path / "file").write_text("")
    only = write_images(tmp_path / "only", classes=2, each=2)
    for bad, message in (
        ({"subset": str(tmp_path / "list.txt")}, r"nothing\.jpg"),
        ({"resize": 8}, "resize 8 is smaller than the crop of 16"),
        ({"data": str(only)}, "no val/ or test/"),
        ({"json": str(tmp_path / "file" / "x.json")}, r"cannot write .*file/x\.json"),
        (
            {"json": "x.partial"},
            r"x\.partial: the ending \.partial is for saved states",
        ),
    ):
        with pytest.raises(FastSiamError, match=message):
            evaluate_linear(run, replace(QUICK, **bad), HERE)
    assert not (run / "eval").exists() or not list((run / "eval").iterdir())
    two = ("--gpus", "2", "--device", "cpu", "--batch", "7")
    result = fastsiam("eval", "linear", str(run), *two, code=1)
    assert result.stderr == "error: --batch 7 is not divisible by 2 ranks; pass --batch 6\n"

    def with_gaps(*arguments: Any, **settings: Any) -> Any:
        loader: Any = build_eval_loader(*arguments, **settings)
        loader.labels[3:5] = -1
        return loader

    monkeypatch.setattr("fastsiam.evaluate.subject.build_eval_loader", with_gaps)
    with pytest.raises(DataError, match=r"4 of the images under .* have no label"):
        evaluate_linear(run, QUICK, HERE)
