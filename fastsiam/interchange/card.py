"""Model cards of exported weights: origin, loading code, preprocessing, training and accuracy.

Plain files also contain the loading code. The tests run it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torchvision

import fastsiam
from fastsiam.config import TrainConfig
from fastsiam.config.settings_files import RunSettings
from fastsiam.console import format_count, format_number, text_of
from fastsiam.environment import commit
from fastsiam.files import as_utf8, quote, value_errors_as_data_error
from fastsiam.markdown import cell
from fastsiam.model.backbones import skeleton
from fastsiam.run.log import read_metrics
from fastsiam.run.records import DataFacts, Record, TrainingDataFacts

from .layouts import AUTHORS
from .pretrained import Input, Pretrained, title

_PREPROCESSING = {
    "resize": "shorter side",
    **{name: name for name in ("crop", "mean", "std", "exif", "alpha")},
}
"""Names of preprocessing settings, by field of ``ImageFacts``."""
_NUMBERS = {"knn": ("epoch", "top1", "k", "temperature", "bank")}
"""Numeric fields of metrics.jsonl that the card shows, by kind of line."""


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
    return render(
        "snippet.py.jinja",
        model=model,
        name=model.backbone.removeprefix("timm/"),
        skeleton=skeleton(model),
        library=library,
        encoder=encoder,
        heads=list(dict.fromkeys(heads)),
        format=format,
        file=file,
    )


def render(template: str, **values: Any) -> str:
    """Render a template of this package; names that it lacks are errors."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    is_code = template.endswith(".py.jinja")
    environment = Environment(  # nosec B701
        loader=PackageLoader("fastsiam.interchange", ""),
        undefined=StrictUndefined,
        trim_blocks=is_code,
        lstrip_blocks=is_code,
        keep_trailing_newline=not is_code,
    )
    environment.filters |= {"cell": _cell, "literal": _literal}
    environment.filters |= {"rounded": format_number, "counted": format_count}
    return environment.get_template(template).render(values)


def model_card(pretrained: Pretrained, *, format: str, file: str, results: Sequence[Record]) -> str:
    """Return a weight file's model card in Markdown; ``results`` are evaluations of the weights."""
    config, arch, run = pretrained.config, pretrained.model.backbone, pretrained.run
    settings, history, monitored = None, list[str](), list[dict[str, Any]]()
    if run:
        epoch = pretrained.epoch or 0
        metrics = read_metrics(run, numbers=_NUMBERS)
        monitored = [x for x in metrics if x["kind"] == "knn" and x["epoch"] <= epoch]
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
    text = render(
        "card.md.jinja",
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
        monitored=monitored[-1] if monitored else None,
        results=[
            (
                record,
                [describe_images(record.data, full_paths=False), *preprocessing(record, config)],
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


def describe_images(data: DataFacts, *, full_paths: bool) -> str:
    """Describe the images of an evaluation; full paths may reveal private information."""

    def name(path: str) -> str:
        return path if full_paths else Path(path).name or path

    parts = []
    if isinstance(data, TrainingDataFacts) and data.subset:
        parts.append(f"listed in {name(data.subset)}")
    elif isinstance(data, TrainingDataFacts) and data.percent != 100:
        parts.append(f"{data.percent:g}% of each class, at least one")
    if data.holdout:
        parts.append(f"without {data.holdout} held out")
    part = f" ({', '.join(parts)})" if parts else ""
    return (
        f"{data.train:,} images for training{part}, {data.val:,} for validation, from "
        f"{name(data.root)}"
    )


def preprocessing(record: Record, config: TrainConfig | None) -> list[str]:
    """Describe the preprocessing of an evaluation where it differs from that of the run's own.

    Empty for detection, whose protocol says how images are resized.

    Args:
        record: the evaluation.
        config: settings of the run; None to describe the entire preprocessing.
    """
    if record.kind == "detect":
        return []
    images, usual = asdict(record.images), dict[str, Any]()
    if config:
        usual = asdict(Input.of(config)) | {"exif": config.data.exif, "alpha": config.data.alpha}
    return [
        f"{name} {', '.join(f'{x:g}' for x in value) if isinstance(value, tuple) else value}"
        for field, name in _PREPROCESSING.items()
        if (value := images[field]) != usual.get(field)
    ]


def _literal(text: str) -> str:
    """Format a string as a Python literal in double quotes."""
    return as_utf8(json.dumps(text, ensure_ascii=False))


def _cell(value: Any) -> str:
    return cell(text_of(value) if isinstance(value, bool | float) else str(value))
