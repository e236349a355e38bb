"""Model cards of exported weights: origin, loading code, preprocessing, training and accuracy.

Plain files also contain the loading code. The tests run it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torchvision

import fastsiam
from fastsiam.config import DataConfig
from fastsiam.config.settings_files import RunSettings
from fastsiam.console import format_number
from fastsiam.environment import commit
from fastsiam.files import as_utf8, quote, value_errors_as_data_error
from fastsiam.model.backbones import skeleton
from fastsiam.run.log import read_metrics
from fastsiam.run.records import Record, TrainingDataFacts

from .layouts import AUTHORS
from .pretrained import Input, Pretrained, title

if TYPE_CHECKING:
    from jinja2 import Template


def snippet(pretrained: Pretrained, format: str, file: str) -> str:
    """Return Python code that builds the encoder and loads its weights from ``file``.

    ``format`` is any export format except detectron2.
    """
    model, encoder, heads = pretrained.model, "", []
    library = "torchvision" if model.width == 64 else "fastsiam"
    if format == "timm" or model.backbone.startswith("timm/"):
        library = "timm"
    if format in AUTHORS:
        *prefixes, encoder = (f"module.{start}" for start in AUTHORS[format].parts.values())
        # Prefixes of the heads' keys after the encoder's prefix has been removed.
        heads = [x.removeprefix(encoder) if x.startswith(encoder) else "module." for x in prefixes]
    return _template("snippet.py.jinja", trim_blocks=True, lstrip_blocks=True).render(
        model=model,
        name=model.backbone.removeprefix("timm/"),
        skeleton=skeleton(model),
        library=library,
        encoder=encoder,
        heads=list(dict.fromkeys(heads)),
        format=format,
        file=file,
    )


def _template(name: str, **settings: bool) -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # PyTorch depends on it

    loader = PackageLoader("fastsiam.interchange", "")
    environment = Environment(  # nosec B701
        loader=loader,
        undefined=StrictUndefined,
        **settings,  # type: ignore[arg-type]
    )
    environment.filters |= {"cell": _cell, "literal": _literal, "rounded": format_number}
    return environment.get_template(name)


def model_card(pretrained: Pretrained, *, format: str, file: str, results: Sequence[Record]) -> str:
    """Return a weight file's model card in Markdown; ``results`` are evaluations of the weights."""
    config, arch, run = pretrained.config, pretrained.model.backbone, pretrained.run
    settings, history = None, list[str]()
    if run and (run / "config.json").is_file():
        settings = RunSettings.read(run)
        with value_errors_as_data_error(run / "config.json"):
            history = settings.history(full_paths=False)
    data = init = None
    if config is not None:  # full paths may reveal private information
        data = "synthetic"
        if config.data.loads_images:
            data = " and ".join(place.resolve().name for place in config.data.places)
        init = Path(config.run.init).name if config.run.init else None
    text = _template("card.md.jinja", keep_trailing_newline=True).render(
        pretrained=pretrained,
        network=title(arch),
        network_as_read=replace(pretrained, path=Path(pretrained.path.name)),
        depth=arch.removeprefix("resnet"),
        format=format,
        file=file,
        quoted=quote(file),
        code="" if format == "detectron2" else snippet(pretrained, format, file),
        program=AUTHORS[format].program.format(arch=arch) if format in AUTHORS else "",
        data=data,
        init=init,
        settings=settings,
        history="; ".join(history) or None,
        monitored=_last_monitored(pretrained),
        results=[
            (
                record,
                [
                    *_images(record),
                    *preprocessing(
                        record, pretrained.input_or_default, config.data if config else None
                    ),
                ],
                dict.fromkeys(key for row in record.results for key in row),
            )
            for record in results
        ],
        fastsiam=fastsiam.__version__,
        commit=commit(),
        torch=torch.__version__,
        torchvision=torchvision.__version__,
    )
    return as_utf8(text)


def _last_monitored(pretrained: Pretrained) -> dict[str, Any] | None:
    """Return the run's last kNN result up to the epoch of these weights; None without one."""
    run, epoch = pretrained.run, pretrained.epoch
    if run is None or epoch is None:
        return None
    lines = [x for x in read_metrics(run) if x["kind"] == "knn" and x["epoch"] <= epoch]
    return lines[-1] if lines else None


def _images(record: Record) -> list[str]:
    """Describe the images of an evaluation; empty if it used all of the run's own images.

    Only the last component of paths is named, because full paths may reveal private information.
    """
    data = record.data
    details = [f"data {Path(data.other_data).name}"] if data.other_data else []
    details += [f"{data.holdout} of each class held out"] if data.holdout else []
    if isinstance(data, TrainingDataFacts) and data.chosen_crc32 is not None:
        part = f"{data.percent:g}% of the training images"
        if data.subset:
            part = f"training images in {Path(data.subset).name}"
        return [*details, f"{part}: {data.train:,}"]
    return [*details, f"{data.train:,} training images"] if details else []


def preprocessing(record: Record, usual: Input, trained_on: DataConfig | None) -> list[str]:
    """Describe the preprocessing of an evaluation where it differs from the network's own.

    Empty for detection, whose protocol says how images are resized.

    Args:
        record: the evaluation.
        usual: the network's own preprocessing.
        trained_on: settings of the training images; None if unknown.
    """
    images = record.images
    if record.kind == "detect":
        return []
    details = []
    if (images.resize, images.crop) != (usual.resize, usual.crop):
        details.append(f"shorter side {images.resize}, crop {images.crop}")
    for name in ("mean", "std"):
        if tuple(getattr(images, name)) != tuple(getattr(usual, name)):
            details.append(f"{name} {', '.join(f'{x:g}' for x in getattr(images, name))}")
    for name in ("exif", "alpha"):
        if trained_on and getattr(images, name) != getattr(trained_on, name):
            details.append(f"{name} {getattr(images, name)}")
    return details


def _literal(text: str) -> str:
    """Format a string as a Python literal in double quotes."""
    return as_utf8(json.dumps(text, ensure_ascii=False))


def _cell(value: Any) -> str:
    return (f"{value:g}" if isinstance(value, float) else str(value)).replace("|", "\\|")
