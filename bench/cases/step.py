"""How fast the training step is on ready tensors, in several ways and in the authors' setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastsiam.bench import roofline
from fastsiam.bench.cases.machine import MACHINE, rates
from fastsiam.bench.contest import Contest
from fastsiam.bench.contestants.machine import build_machine
from fastsiam.bench.contestants.step import build_step
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session
from fastsiam.bench.timing import Sample, Timing
from fastsiam.bench.variants import AUTHORS, VARIANTS


def measure(session: Session) -> list[Record]:
    """Measure each variant, beside what the machine's own limits allow.

    On a GPU each ends before the next one starts: the memory of their activations would not fit
    side by side, nor can that of a CUDA graph be given back for a while.
    """
    batch = session.trained_batch
    with session.contest(apart=session.gpu) as contest:
        contest.enter(MACHINE, build_machine, device=session.device)
        for name in session.config.variant_names:
            _enter(contest, session, name)
        timings = contest.run(session.config.repeats)
        session.not_measured += [f"{name} ({why})" for name, why in contest.failed.items()]
        contenders = contest.contenders
        facts = {name: contest.facts(name, work) for name, work in timings if name != MACHINE}
        least, limits = None, rates(contest, timings)
        if limits:
            floor = roofline.floor(session.train_config(batch), roofline.measured(limits))
            least = Timing([Sample(floor, 0.0)], 1)
            limits["roofline, images/s"] = 1 / floor
    authors = timings.get((AUTHORS, "step"))
    used = {name: one.pop("settings", {}) for name, one in facts.items()}
    return [
        record(
            "step",
            name,
            timing,
            baseline=(AUTHORS, authors) if authors else None,
            ceiling=("the roofline", _by(least, facts[name])) if least else None,
            gpu_bytes=contenders[name].gpu,
            facts=facts[name] | limits,
            in_the_clock="forward, backward and optimizer steps on tensors that are ready",
            config=session.settings(
                batch=batch, backbone=session.config.train.model.backbone, **used[name]
            ),
        )
        for (name, _), timing in timings.items()
        if name != MACHINE
    ]


def _enter(contest: Contest, session: Session, name: str) -> None:
    """Have a variant take part, if it can here; one of several ranks in two ways."""
    variant, batch = VARIANTS[name], session.trained_batch
    if variant.only_on not in ("", session.device):
        return
    settings = {"compile": "on"} | variant.settings
    if not variant.several_ranks:
        config = session.train_config(batch, **settings)
        contest.enter(name, build_step, config=config, authors=name == AUTHORS)
        return
    if (ranks := session.most_ranks) == 1:
        session.console.say(f"{name}: not measured: needs several GPUs")
        return
    for what, more in ((name, {}), ("BN of each", {"sync_bn": False})):
        config = session.train_config(batch, ranks=ranks, **settings | more)
        contest.enter(f"{ranks} ranks, {what}", build_step, ranks=ranks, config=config)


def _by(least: Timing, facts: Mapping[str, Any]) -> Timing:
    """Return the least time of one device for as many as there are."""
    return replace(least, images=least.images * facts.get("devices", 1))
