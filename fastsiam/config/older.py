"""Settings as older versions wrote them, so that their runs can be resumed, evaluated, exported."""

from __future__ import annotations

from typing import Any

_OF_THE_METHOD = "projector_layers", "dim", "projector_dim", "predictor_dim", "stop_gradient"
_OF_ALL_VIEWS = "mean", "std"
_REMOVED = {
    "run": ("node_rank", "node_timeout", "grace"),
    "step": ("batch_views", "keep_memory", "bucket_mb"),
}
"""Settings of 0.2 that are decided by torch's rendezvous now, or always as they were by default."""


def upgraded(sections: dict[str, Any]) -> dict[str, Any]:
    """Return a run's settings in today's layout; those that are in it already stay as they are.

    In 0.1 there was one method and two views made alike: the heads' settings stood in ``model``,
    the predictor's schedule in ``optim``, and a view's in ``augment``.

    Args:
        sections: nested dictionaries, out of a checkpoint or config.json.
    """
    sections = {k: dict(v) if isinstance(v, dict) else v for k, v in sections.items()}
    model, augment, optim = (sections.get(name, {}) for name in ("model", "augment", "optim"))
    if not all(isinstance(section, dict) for section in (model, augment, optim)):
        return sections  # building the settings refuses it by name
    for name, removed in _REMOVED.items():
        if isinstance(section := sections.get(name), dict):
            _taken(section, removed)
    if "method" not in model:
        method = _taken(model, _OF_THE_METHOD) | _taken(optim, ("predictor_lr",))
        sections["model"] = model | {"method": {"name": "simsiam"} | method}
    if "views" not in augment:
        common = _taken(augment, _OF_ALL_VIEWS)
        sections["augment"] = common | {"views": [augment, augment]}
    return sections


def _taken(values: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Take some settings out of a section."""
    return {name: values.pop(name) for name in names if name in values}
