"""The model card beside exported weights: what they are, how to load them, how good they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision

import fastsiam
from fastsiam.config import OptimConfig, TrainConfig
from fastsiam.config.run_settings import RunSettings
from fastsiam.console import rounded
from fastsiam.environment import commit
from fastsiam.files import quoted
from fastsiam.run.log import read_metrics
from fastsiam.run.records import Record

from .loading import AUTHORS, detectron2_settings, normalisation, snippet
from .pretrained import Input, Pretrained, title


def model_card(pretrained: Pretrained, *, format: str, file: str, results: Sequence[Record]) -> str:
    """Return the card, in Markdown.

    Args:
        pretrained: the weights.
        format: the layout that they are written in.
        file: name of their file, beside the card.
        results: evaluations of these very weights.
    """
    config, settings = pretrained.config, _run_settings(pretrained)
    parts = [
        *_head(pretrained, format, file),
        f"## Loading\n\n{_loading(pretrained, format, file)}",
        f"## Input\n\n{_input(pretrained.input, *normalisation(pretrained))}",
    ]
    if config is not None:
        recipe = settings.recipe if settings else None
        parts.append("## Training\n\n" + _training(config, pretrained, recipe))
    if accuracy := [*_knn_of(pretrained), *(_result(record) for record in results)]:
        parts.append(
            "## Accuracy\n\nOf the frozen features, but for finetune and detect.\n\n"
            + "\n\n".join(accuracy)
        )
    parts.append("## Versions\n\n" + _versions(settings.environment if settings else None))
    return "\n\n".join(parts) + "\n"


def _head(pretrained: Pretrained, format: str, file: str) -> list[str]:
    """Return title and introduction: they claim no more of the weights than is known."""
    name, config = title(pretrained.model.backbone), pretrained.config
    layout = "a plain state dict" if format == "plain" else f"the layout of {format}"
    holds = f"`{file}` holds the weights of {pretrained.described(pretrained.path.name)}, "
    method = pretrained.model.method
    headed = any(pretrained.has(part) for part in ("projector", "predictor"))
    if config is None and not (headed and pretrained.method_told):
        taken = f"; its heads are such as {method.title}'s, but it does not tell the method"
        return [
            f"# {name}, converted by fastsiam",
            f"{holds}converted by fastsiam to {layout}{taken if headed else ''}.",
        ]
    labels = "; no labels were used" if config is not None and not config.run.init else ""
    return [
        f"# {name}, pre-trained with {method.title}",
        f"{holds}in {layout}. {method.title}: {method.paper}{labels}.",
    ]


def _run_settings(pretrained: Pretrained) -> RunSettings | None:
    """Return what the run's folder says of its recipe and machine; None where there is none."""
    run = pretrained.run
    return RunSettings.read(run) if run and (run / "config.json").is_file() else None


def _versions(trained_by: Mapping[str, Any] | None) -> str:
    own = _version(fastsiam.__version__, commit(), torch.__version__)
    written = f"Written by {own}, torchvision {torchvision.__version__}."
    if trained_by is None:
        return written
    packages = trained_by["packages"]
    theirs = _version(trained_by["fastsiam"], trained_by.get("commit", ""), packages["torch"])
    return f"Trained by {theirs}. {written}"


def _version(fastsiam: str, commit: str, torch: str) -> str:
    return f"fastsiam {fastsiam}{f', commit {commit}' if commit else ''}, torch {torch}"


def _loading(pretrained: Pretrained, format: str, file: str) -> str:
    """Return how the file is loaded, to be run in its folder."""
    if format == "detectron2":
        return _fenced("yaml", detectron2_settings(pretrained, file))
    text = _fenced("python", snippet(pretrained, format, file))
    if format in AUTHORS:
        arch = pretrained.model.backbone
        program = "eval_linear.py" if format == "swav" else f"main_lincls.py -a {arch}"
        text += (
            "\n\nThat is the encoder alone. The authors' programs take the whole file: "
            f"`python {program} --pretrained {quoted(file)} ...`"
        )
    return text


def _input(seen: Input | None, mean: Sequence[float], std: Sequence[float]) -> str:
    text = f"RGB images scaled to 0-1, minus {mean}, divided by {std} for each channel"
    if seen is None:
        return text + ": ImageNet's statistics, as is usual; the file does not say."
    side, resize = seen.crop, seen.resize
    return (
        f"{text}. It was trained on views of {side} x {side} pixels, and evaluated on the central "
        f"{side} x {side} of images whose shorter side is {resize}."
    )


def _training(config: TrainConfig, pretrained: Pretrained, recipe: str | None) -> str:
    optim, model, data, numerics = config.optim, config.model, config.data, config.numerics
    seen = "" if pretrained.images is None else f", {pretrained.images:,} images"
    rows = {
        **({"recipe": recipe} if recipe else {}),
        **({"init": Path(config.run.init).name} if config.run.init else {}),
        "data": (data.root.resolve().name if data.loads_images else "synthetic") + seen,
        "epochs": f"{rounded(pretrained.epoch or 0)} of {optim.epochs}",
        "global batch": optim.batch,
        "optimizer": f"{optim.optimizer}{' of all parameters' if optim.lars_all else ''}, "
        f"momentum {optim.momentum:g}, "
        f"weight decay {optim.weight_decay:g}",
        "learning rate": _rate(optim),
        "backbone": f"{model.backbone}, {model.stem} stem, width {model.width}",
        **model.method.described(),
        **({"views": f"{views} of each image"} if (views := len(config.augment.views)) > 2 else {}),
        **({"BN statistics": f"of {images} images each"} if (images := numerics.bn_images) else {}),
        "precision": numerics.precision,
        "seed": numerics.seed,
    }
    return _table(("setting", "value"), rows.items())


def _rate(optim: OptimConfig) -> str:
    """Say how the learning rate goes."""
    end = f" to {optim.lr_end:g} of the peak" if optim.lr_end else ""
    start = f" from {optim.warmup_from:g} of the peak" if optim.warmup_from else ""
    warmup = f"{optim.warmup_epochs:g} epochs of warm-up"
    return f"{optim.lr:g} x batch / 256, cosine{end}, {warmup}{start}"


def _knn_of(pretrained: Pretrained) -> list[str]:
    """Return the run's last kNN monitor before these weights, if it has one."""
    run, epoch = pretrained.run, pretrained.epoch
    if run is None or epoch is None:
        return []
    lines = [x for x in read_metrics(run) if x["kind"] == "knn" and x["epoch"] <= epoch]
    return [
        f"kNN top-1 {line['top1']:.2f}% after {rounded(line['epoch'])} epochs (k {line['k']}, "
        f"T {line['temperature']:g}, bank {line['bank']:,})"
        for line in lines[-1:]
    ]


def _result(record: Record) -> str:
    """Return one evaluation as a table, with its protocol."""
    settings = record.protocol.items()
    protocol = ", ".join(f"{key} {_cell(x)}" for key, x in settings if x is not None)
    rows = record.results
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = _table(columns, ([_figure(key, row.get(key, "")) for key in columns] for row in rows))
    return f"**{record.kind}** ({protocol})\n\n{table}"


def _figure(name: str, value: Any) -> Any:
    """Round accuracies and epochs; rates and temperatures stay as they were given."""
    return rounded(value) if name in ("top1", "top5", "epoch") and value != "" else value


def _table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *([_cell(x) for x in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return (f"{value:g}" if isinstance(value, float) else str(value)).replace("|", "\\|")


def _fenced(language: str, code: str) -> str:
    return f"```{language}\n{code}\n```"
