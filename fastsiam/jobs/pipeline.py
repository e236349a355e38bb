"""Which pipeline a run has under ``--pipeline auto``: the same on all ranks, and for all of it."""

from __future__ import annotations

from dataclasses import replace

import torch

from fastsiam.checkpoint import Checkpoint
from fastsiam.config import TrainConfig
from fastsiam.distributed import Place, from_leader, minimum_across_ranks
from fastsiam.free_memory import free_bytes
from fastsiam.kernels.cores import local_ranks
from fastsiam.pipelines import Store
from fastsiam.pipelines.automatic import Choice, choose_pipeline, settled, works_on
from fastsiam.pipelines.backends import BACKENDS
from fastsiam.training.memory import training_bytes


def with_settled_pipeline(
    config: TrainConfig, place: Place, store: Store | None, start: Checkpoint | None
) -> tuple[TrainConfig, str]:
    """Write down what "auto" means here: as the run began, or the leader's choice.

    Args:
        config: of the run.
        place: this rank; every rank calls it.
        store: the training images; None if the pipeline reads none.
        start: what the run goes on from.

    Returns:
        The settings, and a line for people, which is empty if the pipeline was named.
    """
    if store is None or config.data.pipeline != "auto":
        return config, ""
    free = torch.tensor(float(free_bytes(place.device)), dtype=torch.float64, device=place.device)
    if place.device.type == "cpu":
        free /= local_ranks()
    free = minimum_across_ranks(free)
    name = line = ""
    if place.leads:
        choice = _as_it_began(store, start) or choose_pipeline(
            store,
            device=place.device,
            free=free.item(),
            model=training_bytes(config, place, images=len(store)),
        )
        name, line = choice.name, str(choice)
    return replace(config, data=settled(config.data, from_leader(name))), line


def _as_it_began(store: Store, start: Checkpoint | None) -> Choice | None:
    """Return the pipeline that a run goes on with; None where that cannot run any more."""
    if start is None or start.config.data.pipeline == "auto":
        return None
    backend = BACKENDS[start.config.data.pipeline]
    if not backend.real or not works_on(store, backend.name):
        return None
    return Choice(backend.name, "as the run began")
