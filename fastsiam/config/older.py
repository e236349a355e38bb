"""Settings as version 0.1 wrote them, for its runs go on, are evaluated and exported."""

from __future__ import annotations

import copy
from typing import Any

_OF_THE_METHOD = "projector_layers", "dim", "projector_dim", "predictor_dim", "stop_gradient"


def upgraded(sections: dict[str, Any]) -> dict[str, Any]:
    """Return a run's settings in today's layout; those that are in it already stay as they are.

    In 0.1 there was one method and two views made alike: the heads' settings stood in ``model``,
    the predictor's schedule in ``optim``, and a view's in ``augment``.

    Args:
        sections: nested dictionaries, out of a checkpoint or config.json.
    """
    sections = copy.deepcopy(sections)
    model, augment = sections.get("model", {}), sections.get("augment", {})
    if "method" not in model:
        method = {name: model.pop(name) for name in _OF_THE_METHOD if name in model}
        if "predictor_lr" in (optim := sections.get("optim", {})):
            method["predictor_lr"] = optim.pop("predictor_lr")
        sections["model"] = model | {"method": {"name": "simsiam"} | method}
    if "views" not in augment:
        common = {name: augment.pop(name) for name in ("mean", "std") if name in augment}
        sections["augment"] = common | {"views": [augment, augment]}
    return sections
