"""Runs of the paper's variants: weights in and out, whatever else a method keeps beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastsiam.config import AugmentConfig, FastSiamConfig, ModelConfig
from fastsiam.interchange import export_weights, load_pretrained
from tests.configs import changed_model
from tests.interchange.networks import R18, TINY, Authors, X, same, saved_run

VARIANTS = {
    "head without BN": changed_model(TINY, head_bn="none"),
    "BN on hidden layers": changed_model(TINY, head_bn="hidden"),
    "BN on all layers": changed_model(TINY, head_bn="all"),
    "affine": changed_model(TINY, output_affine=True),
    "no predictor": changed_model(TINY, predictor="none"),
    "fixed predictor": changed_model(TINY, predictor="fixed"),
    "frozen encoder": changed_model(TINY, alternate_every=10),
    "averages": changed_model(TINY, predictor="none", target_average=0.8),
    "fastsiam": replace(TINY, method=FastSiamConfig(projector_layers=2, dim=16, predictor_dim=4)),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_is_read_and_exported(variant: str, tmp_path: Path) -> None:
    """Its network up to both layers, and its backbone alone; a frozen copy is no part of it."""
    model = VARIANTS[variant]
    method = saved_run(tmp_path / "run", model)
    if variant == "frozen encoder":
        with torch.no_grad():
            for weight in method.get_submodule("frozen").parameters():
                weight.zero_()
        state = torch.load(tmp_path / "run/checkpoints/last.pt", weights_only=True)
        torch.save(state | {"model": method.state_dict()}, tmp_path / "run/checkpoints/last.pt")
    read = load_pretrained(tmp_path / "run")
    assert read.model == model
    with torch.no_grad():
        z = method.projector(method.backbone(X))
        same(read.network()(X), method.backbone(X))
        same(read.network("projector")(X), z)
    export_weights(read, format="plain", out=tmp_path / "w.safetensors")
    plain = load_pretrained(tmp_path / "w.safetensors")
    assert all(key.startswith("backbone.") for key in plain.state)
    assert torch.equal(plain.network()(X), read.network()(X))


def authors(model: ModelConfig, folder: Path) -> Authors:
    """Export a run to the authors' layout and load it as their program does, strictly."""
    saved_run(folder / "run", model)
    export_weights(load_pretrained(folder / "run"), format="simsiam", out=folder / "w.pth")
    state = torch.load(folder / "w.pth", weights_only=True)["state_dict"]
    theirs = Authors("resnet18", 512, 32)
    theirs.load_state_dict({key.removeprefix("module."): value for key, value in state.items()})
    return theirs.eval()


@pytest.mark.parametrize(
    "model",
    [
        changed_model(R18, predictor="fixed", alternate_every=3),
        replace(R18, method=FastSiamConfig(dim=512, predictor_dim=32)),
    ],
    ids=["fixed, frozen encoder", "fastsiam"],
)
def test_variants_with_the_authors_heads_fit_their_layout(
    model: ModelConfig, tmp_path: Path
) -> None:
    theirs = authors(model, tmp_path)
    read = load_pretrained(tmp_path / "run")
    with torch.no_grad():
        same(theirs.encoder(X), read.network("projector")(X))


def test_the_card_says_the_variant(tmp_path: Path) -> None:
    model = changed_model(TINY, head_bn="hidden", predictor="none", target_average=0.8)
    saved_run(tmp_path / "run", model)
    export_weights(load_pretrained(tmp_path / "run"), format="plain", out=tmp_path / "w.pt")
    card = (tmp_path / "w.pt.md").read_text()
    assert "| head bn | hidden |" in card and "| predictor | none |" in card
    assert "| average | of each image's targets, momentum 0.8 |" in card
    read = load_pretrained(tmp_path / "run")
    assert read.config is not None and "| views |" not in card
    four = replace(
        read.config,
        augment=AugmentConfig.alike(4),
        model=replace(TINY, method=FastSiamConfig()),
    )
    export_weights(replace(read, config=four), format="plain", out=tmp_path / "four.pt")
    assert "| views | 4 of each image |" in (tmp_path / "four.pt.md").read_text()
