"""How fast each method's training step is, beside a loop of lightly's parts, on ready tensors.

Network, heads, tensors and settings are the same. Ours is taken in some of the ways of
``fastsiam bench step``; "plain" is, as lightly's, in float32, NCHW and not compiled.
"""

from __future__ import annotations

from dataclasses import replace

from fastsiam.bench.contest import Contest
from fastsiam.bench.contestants.methods import build_lightly
from fastsiam.bench.contestants.step import build_step
from fastsiam.bench.lightly import NAMES
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session
from fastsiam.bench.variants import AUTHORS, VARIANTS
from fastsiam.config import METHOD_CONFIGS, TrainConfig

_WAYS = ("default", "eager", "plain")
"""Ways in which ours is taken, if nobody says."""


def measure(session: Session) -> list[Record]:
    """Measure each method, ours and lightly's in turns; one method after the other."""
    chosen = session.config.methods.split(",") if session.config.methods else NAMES
    return [one for name in chosen for one in _measured(session, name)]


def _measured(session: Session, name: str) -> list[Record]:
    """Measure a method; lightly's is what others are compared with."""
    theirs = f"{name}, lightly"
    with session.contest(apart=session.gpu) as contest:
        configs = _entered(contest, session, name)
        timings = contest.run(session.config.repeats)
        contenders = contest.contenders
        facts = {who: contest.facts(who, work) for who, work in timings}
    lightly = timings.get((theirs, "step"))
    used = {who: one.pop("settings", {}) for who, one in facts.items()}
    return [
        record(
            "methods",
            who,
            timing,
            baseline=(theirs, lightly) if lightly else None,
            gpu_bytes=contenders[who].gpu,
            facts=facts[who],
            in_the_clock="forward, backward, optimizer, momentum encoder and queue, on tensors "
            "that are ready",
            config=session.settings(
                batch=session.trained_batch, model=configs[who].to_dict()["model"], **used[who]
            ),
        )
        for (who, _), timing in timings.items()
    ]


def _entered(contest: Contest, session: Session, name: str) -> dict[str, TrainConfig]:
    """Have a method take part, lightly's and ours; return the settings of each."""
    ways = session.config.variants.split(",") if session.config.variants else _WAYS
    configs = {f"{name}, lightly": _config(session, name, "plain")}
    contest.enter(f"{name}, lightly", build_lightly, config=configs[f"{name}, lightly"])
    for way in ways:
        variant, who = VARIANTS[way], f"{name}, {way}"
        if variant.several_ranks or way == AUTHORS:
            session.console.say(f"{who}: not measured: it is of fastsiam bench step")
        elif variant.only_on in ("", session.device):
            configs[who] = _config(session, name, way)
            contest.enter(who, build_step, config=configs[who])
    return configs


def _config(session: Session, name: str, way: str) -> TrainConfig:
    """Return the recipe with a method in its place, as by default if it is another one."""
    settings = {"compile": "on"} | VARIANTS[way].settings
    config = session.train_config(session.trained_batch, **settings)
    if config.model.method.name == name:
        return config
    return replace(config, model=replace(config.model, method=METHOD_CONFIGS[name]()))
