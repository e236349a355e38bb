"""What 32-bit integers of a kernel can reach, read in what Triton made of it (TTIR).

Each value gets the range that it has over all programs of a launch; what is loaded from memory, or
goes round a loop, has none and is left out, and so is what is computed from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Range = tuple[int, int]

_LINE = re.compile(r"^\s*%(?P<to>[\w#]+) = (?P<op>[\w.]+) ?(?P<rest>.*?)(?: loc\(.*\))?$")
_INT32_MAX = 2**31 - 1


def _corners(combine: Callable[[int, int], int]) -> Callable[[Range, Range], Range]:
    def over(a: Range, b: Range) -> Range:
        found = [combine(x, y) for x in a for y in b]
        return min(found), max(found)

    return over


def _quotient(a: Range, b: Range) -> Range | None:
    return (a[0] // b[0], a[1] // b[0]) if b[0] == b[1] > 0 and a[0] >= 0 else None


def _remainder(a: Range, b: Range) -> Range | None:
    return (0, min(a[1], b[0] - 1)) if b[0] == b[1] > 0 and a[0] >= 0 else None


_COMBINE: dict[str, Callable[[Range, Range], Range | None]] = {
    "addi": _corners(lambda x, y: x + y),
    "subi": _corners(lambda x, y: x - y),
    "muli": _corners(lambda x, y: x * y),
    "minsi": _corners(min),
    "maxsi": _corners(max),
    "divsi": _quotient,
    "remsi": _remainder,
}
_AS_IT_WAS = ("tt.splat", "tt.expand_dims", "tt.broadcast", "arith.extsi", "arith.trunci")


def overflows(ttir: str, grid: Sequence[int]) -> list[str]:
    """Return the lines whose 32-bit result can leave the range of 32 bits.

    Args:
        ttir: the kernel.
        grid: programs of a launch, along each axis.
    """
    known: dict[str, Range] = {}
    found: list[str] = []
    for line in ttir.splitlines():
        if (parts := _LINE.match(line)) is None:
            continue
        name, op, rest = parts["to"], parts["op"], parts["rest"]
        result = _range_of(op, rest, known, grid)
        known.pop(name, None)
        if result is None:
            continue
        known[name] = result
        if (
            rest.endswith(("i32", "i32>"))
            and not -_INT32_MAX <= result[0] <= result[1] <= _INT32_MAX
        ):
            found.append(f"{line.split(' loc(')[0].strip()}: {result}")
    return found


def _range_of(op: str, rest: str, known: dict[str, Range], grid: Sequence[int]) -> Range | None:
    if op == "arith.constant":
        value = re.match(r"(?:dense<)?(-?\d+)>? : \S*i(?:32|64)>?$", rest)
        return (int(value[1]),) * 2 if value else None
    if op == "tt.get_program_id":
        return 0, grid["xyz".index(rest[0])] - 1
    if op == "tt.make_range":
        end, start = re.search(r"end = (\d+)", rest), re.search(r"start = (\d+)", rest)
        assert end and start, rest
        return int(start[1]), int(end[1]) - 1
    given = [known.get(own) for own in re.findall(r"%([\w#]+)", rest)]
    if op in _AS_IT_WAS:
        return given[0]
    combine = _COMBINE.get(op.removeprefix("arith."))
    if combine is None or len(given) != 2 or given[0] is None or given[1] is None:
        return None
    return combine(given[0], given[1])
