"""The model card that is written next to exported weights."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from jinja2 import UndefinedError

from fastsiam.config import AugmentConfig
from fastsiam.config.methods.fastsiam import FastSiamConfig
from fastsiam.errors import DataError
from fastsiam.interchange import export_weights, load_pretrained
from fastsiam.interchange.card import render
from fastsiam.run.records import TrainingDataFacts, read_records
from tests.configs import TINY, with_model_settings, with_settings
from tests.conftest import ROOT
from tests.interchange.networks import R18, saved_run


def test_names_that_templates_lack_are_errors() -> None:
    with pytest.raises(UndefinedError, match="file"):
        render("snippet.py.jinja")


def test_card_of_partial_run_claims_only_known_facts(tmp_path: Path) -> None:
    """The run used synthetic data and ``--init`` and stopped before its last kNN monitor."""
    saved_run(tmp_path / "run", with_model_settings(R18, dim=16))
    monitor = {"kind": "knn", "k": 2, "bank": 9, "temperature": 0.1}
    (tmp_path / "run" / "metrics.jsonl").write_text(
        "".join(json.dumps({**monitor, "epoch": x, "top1": x}) + "\n" for x in (5.0, 7.5, 9.0))
    )
    pretrained = load_pretrained(tmp_path / "run")
    assert pretrained.config is not None
    config = with_settings(pretrained.config, init="/home/me/secret/r18.pth", pipeline="synthetic")
    pretrained = replace(pretrained, config=config)
    export_weights(pretrained, format="torchvision", out=tmp_path / "w.pth")
    card = (tmp_path / "w.pth.md").read_text()
    assert card.startswith("# ResNet-18, pre-trained with SimSiam") and "labels" not in card
    assert "kNN top-1 7.50% after 7.5 epochs" in card and "9 epochs" not in card
    assert "| init | r18.pth |" in card and "/home" not in card and str(tmp_path) not in card
    assert "| data | synthetic, 1,234 images |" in card
    odd = tmp_path / os.fsdecode(b'a"b\\c\xe9.pth')  # one byte is not UTF-8
    export_weights(pretrained, format="torchvision", out=odd)
    card = odd.with_name(f"{odd.name}.md").read_text("utf-8")
    assert r'torch.load("a\"b\\c\udce9.pth", map_location' in card
    odd = tmp_path / 'a"b.pkl'
    data = replace(config.data, data="/home/me/two\nlines|of\ncode", pipeline="native")
    pretrained = replace(pretrained, config=replace(config, data=data))
    export_weights(pretrained, format="detectron2", out=odd)
    card = odd.with_name(f"{odd.name}.md").read_text()
    assert r"| data | two lines\|of code, 1,234 images |" in card
    assert yaml.safe_load(card.split("```")[1].removeprefix("yaml"))["MODEL"]["WEIGHTS"] == odd.name
    for name in ("epoch", "top1"):
        (tmp_path / "run" / "metrics.jsonl").write_text(
            json.dumps({**monitor, "epoch": 5.0, "top1": 5.0} | {name: None}) + "\n"
        )
        with pytest.raises(DataError, match=f"invalid line, number 1: {name} must be a number"):
            export_weights(pretrained, format="plain", out=tmp_path / "u.pth")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"cannot read the settings of the run, .*config\.json"):
        export_weights(pretrained, format="torchvision", out=tmp_path / "v.pth")


def test_card_lists_schedule_and_variant(tmp_path: Path) -> None:
    model = with_model_settings(TINY, head_bn="hidden", predictor="none", target_average=0.8)
    saved_run(tmp_path / "run", model)
    pretrained, out = load_pretrained(tmp_path / "run"), tmp_path / "w.pt"
    assert pretrained.config is not None
    rates = {"lr": 0.05, "lr_end": 0.001, "warmup_epochs": 1.0, "warmup_from": 0.0625}
    other = with_settings(pretrained.config, **rates, sync_bn=False, bn_images=32)
    fastsiam = replace(TINY, method=FastSiamConfig())
    rate = "| learning rate | 0.05 x batch / 256, cosine"
    for config, rows in (
        (
            with_settings(pretrained.config, lr=0.05),
            (
                f"{rate}, 0 epochs of warm-up |", "| stop gradient | yes |",
                "| head bn | hidden |", "| predictor | none |", "| target average | 0.8 |",
            ),
        ),
        (
            replace(other, augment=AugmentConfig.alike(4), model=fastsiam),
            (
                f"{rate} to 0.001 of the peak, 1 epoch of warm-up from 0.0625 of the peak |",
                "| BN statistics | of 32 images each |", "| views | 4 of each image |",
            ),
        ),
    ):  # fmt: skip
        export_weights(replace(pretrained, config=config), format="plain", out=out, force=True)
        card = (tmp_path / "w.pt.md").read_text()
        assert all(row in card for row in rows)


def test_card_names_images_of_evaluations(tmp_path: Path) -> None:
    saved_run(tmp_path / "run", TINY)
    pretrained, out = load_pretrained(tmp_path / "run"), tmp_path / "w.pt"
    records = read_records(ROOT / "bench" / "results" / "cifar10-evaluation")
    linear = {x.data.train: x for x in records if x.kind == "linear"}
    usual = pretrained.input_or_default
    images = {name: getattr(usual, name) for name in ("crop", "resize", "mean", "std")}
    full_record, part = linear[10_000], linear[100].data
    full_record = replace(full_record, images=replace(full_record.images, **images))
    data, first = full_record.data, next(iter(full_record.protocol))
    assert isinstance(part, TrainingDataFacts)
    listed = replace(part, percent=100.0, subset="/home/me/mine.txt")
    share = "1% of each class, at least one"
    cases = (
        (data, "10,000 images for training, 10,000 for validation, from cifar10-10k, "),
        (part, f"100 images for training ({share}), 10,000 for validation, from cifar10-10k, "),
        (listed, "100 images for training (listed in mine.txt), 10,000 for validation, from "),
        (replace(data, holdout="10%"), "10,000 images for training (without 10% held out), "),
        (replace(part, root="/home/me/photos"), f"({share}), 10,000 for validation, from photos, "),
    )
    other = replace(full_record.images, crop=40, resize=48, mean=(0.5, 0.5, 0.25), exif="apply")
    results = [replace(full_record, data=facts) for facts, _ in cases]
    results.append(replace(full_record, images=other))
    export_weights(pretrained, format="plain", out=out, results=results)
    card = (tmp_path / "w.pt.md").read_text()
    *lines, last = re.findall(r"\*\*linear\*\* \((.*)\)", card)
    assert all(f", {first} " in line for line in lines) and "/home" not in card
    for line, (_, text) in zip(lines, cases, strict=True):
        assert text in line
    text = "cifar10-10k, shorter side 48, crop 40, mean 0.5, 0.5, 0.25, exif apply, "
    assert f"{text}{first} " in last
