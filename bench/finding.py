"""The conclusion of ``fastsiam bench``: what limits training, and what would be faster."""

from __future__ import annotations

from collections.abc import Sequence

from fastsiam.bench.measurements import Record
from fastsiam.bench.tables import number
from fastsiam.pipelines.backends import BACKENDS, BASELINE, CEILING
from fastsiam.pipelines.tuning import thread_counts

_KEEPS_UP = 0.95
"""Share of the ceiling from which the model counts as the bottleneck."""
_LIGHTER = {
    False: ("a GPU", "a smaller --backbone or --crop"),
    True: ("the fastest setting of fastsiam bench step", "a smaller --backbone"),
}
"""What helps most, and next, when the model is the bottleneck, by whether it runs on a GPU."""
_MORE_LOADING = "more CPU cores", "smaller images (fastsiam convert folder --short-side 256)"
"""What helps most, and next, when loading is the bottleneck with every pipeline that runs here."""


def finding(records: Sequence[Record]) -> str:
    """Describe in words what limits training, from records of ``loader`` and ``train``.

    The last sentence names the limit, and the change that would help most.
    """
    trainings = {one.name: one for one in records if one.case == "train"}
    loaders = {one.name: one for one in records if one.case in ("loader", "decode")}
    loader = loaders.get(f"{BASELINE} views")
    ceiling, baseline = trainings.pop(CEILING, None), trainings.get(BASELINE)
    if not (ceiling and baseline and loader):
        return f"No finding: {BASELINE}'s pipeline or training on ready tensors was not measured."
    text = (
        f"{_workers(loaders.get('native views'), ceiling)}"
        f"{BASELINE}'s loader delivers {number(loader.images_per_second)} images/s, "
        f"the model can take {number(ceiling.images_per_second)}: "
    )
    share = min(1.0, baseline.share_of_ceiling or 0.0)  # above 1 is noise
    share_text = f"training reaches {share:.0%} of what it could"
    keeps_up = share >= _KEEPS_UP
    is_data_bound = not keeps_up and loader.images_per_second <= 2 * ceiling.images_per_second
    lighter = _LIGHTER[ceiling.config.get("device") == "cuda"]
    first, then = _MORE_LOADING if is_data_bound else lighter
    advice = f"{first} would help most, then {then}"
    if keeps_up:
        return f"{text}the model is the bottleneck, and {share_text}; {advice}."
    if is_data_bound:
        text += f"data-bound, {share_text}"
    else:
        text += f"the model is the bottleneck, but loading takes CPU time from it, and {share_text}"
    decoder = loaders.get(BACKENDS[BASELINE].decoder or "")
    if decoder and loader.cpu_seconds_per_image:  # 0 if a repeat is shorter than a clock tick
        decoding = decoder.cpu_seconds_per_image / loader.cpu_seconds_per_image
        text += f"; decoding is {decoding:.0%} of the loader's work"
    fitting = [one for one in trainings.values() if would_fit(one)]
    best = max(fitting, key=lambda one: one.images_per_second)
    share = min(1.0, best.share_of_ceiling or 0.0)
    if best is baseline:
        return f"{text}; {advice}."
    pipeline, _, stored = best.name.partition(", ")
    option = f"--pipeline {pipeline}" + (f" ({stored})" if stored else "")
    if not is_data_bound:
        return f"{text}; {advice}; {option} would reach {share:.0%}."
    text += f"; {option} would help most and reaches {share:.0%}"
    return f"{text}." if share >= _KEEPS_UP else f"{text}, then {first}, then {then}."


def _workers(native: Record | None, ceiling: Record) -> str:
    """Return a sentence on how many threads ``--workers auto`` would choose; empty if unknown."""
    if native is None:
        return ""
    max_workers = int(native.config["workers"])
    needed = native.cpu_seconds_per_image * ceiling.images_per_second
    workers = min((n for n in thread_counts(max_workers) if n >= needed), default=max_workers)
    return (
        f"With --pipeline native, --workers auto would choose about {workers} of {max_workers} "
        f"loader threads: the model's images/s keep {number(needed)} cores busy loading. "
    )


def would_fit(one: Record) -> bool:
    """Return whether a pipeline could handle the recipe's data set: memory cannot hold ImageNet."""
    backend = BACKENDS.get(one.pipeline)  # type: ignore[call-overload]
    return not (backend and backend.resident and one.config.get("recipe") == "imagenet")
