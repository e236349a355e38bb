"""What the compiler makes of the photometric kernels for an H200, counted without a GPU.

``python -m fastsiam.bench.kernels`` compiles them for sm_90, disassembles them with the tools that
Triton brings along, and prints a Markdown table. The instructions are those that the compiler
wrote, not those that a GPU ran: a loop's body counts once, and where a view's parameters choose
between paths all of them count.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastsiam.config import AugmentConfig
from fastsiam.report.markdown import markdown
from fastsiam.views.draws import draw_views

REGISTERS, WARPS, SHARED, PROGRAMS = 65536, 64, 228 * 1024, 32
"""What a multiprocessor of an H100 or H200 has for the programs that it runs at once."""

CONVERSIONS = ("MUFU", "F2I", "I2F", "F2F", "FRND", "I2I", "POPC", "FCHK")
"""Reciprocals, conversions and roundings, which take a scheduler eight cycles a warp."""
INTEGERS = (
    *("IADD3", "LOP3", "PLOP3", "SHF", "PRMT", "LEA", "SEL", "FSEL", "FMNMX", "VIMNMX", "IMNMX"),
    *("ISETP", "FSETP", "FSET", "IABS", "I2FP", "F2FP", "LOP", "BMSK", "SGXT", "VIADD", "IADD"),
)
"""Integers, logic, comparisons and selections, which take it two."""
PRODUCTS = ("IMAD", "IDP")
"""Integer products, which take two on another unit."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One of SASS, the machine's own code."""

    address: int
    name: str
    """With all its modifiers: ``LDG.E.U8``."""
    conditional: bool
    target: int | None
    """Where a branch goes."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a piece of code takes."""

    instructions: int
    cycles: int
    """A scheduler's, for one warp: those of its busiest unit, or one for each instruction."""
    conversions: int

    @classmethod
    def of(cls, code: Sequence[Instruction]) -> Cost:
        """Count a piece of code, all of it once."""
        kinds = Counter(one.name.split(".")[0] for one in code)
        total = sum(kinds.values())
        slow, half, products = (
            sum(kinds[name] for name in names) for names in (CONVERSIONS, INTEGERS, PRODUCTS)
        )
        return cls(total, max(total, 8 * slow, 2 * half, 2 * products), slow)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel."""

    name: str
    code: tuple[Instruction, ...]
    ptx: str
    warps: int
    """Of one program."""
    registers: int
    """Of one thread."""
    shared: int
    """Bytes of shared memory of one program."""
    spilled: int
    """Bytes a thread keeps in local memory because it has too few registers."""

    @property
    def occupancy(self) -> float:
        """Share of a multiprocessor's 64 warps that fit at once."""
        registers = -(-self.registers // 8) * 8 * 32  # of a warp, in the units they are given in
        programs = min(
            REGISTERS // registers // self.warps,
            WARPS // self.warps,
            SHARED // (self.shared + 1024),
            PROGRAMS,
        )
        return programs * self.warps / WARPS

    @property
    def main(self) -> tuple[Instruction, ...]:
        """The code without subroutines (slow paths of divisions) and padding."""
        reached = _reachable(self.code)
        return tuple(one for i, one in enumerate(self.code) if i in reached)

    @property
    def loops(self) -> list[tuple[Instruction, ...]]:
        """The loops by address, each without those that it contains."""
        return [tuple(self.code[i] for i in sorted(own)) for own in _loops(self.code)]

    def widths(self, what: str) -> str:
        """Say how many global loads (``LDG``) or stores (``STG``) of so many bits there are."""
        found = Counter(_width(one.name) for one in self.main if one.name.startswith(what))
        return ", ".join(f"{count} x {width}" for width, count in sorted(found.items()))


def compile_for_hopper() -> dict[str, Any]:
    """Make Triton's launches from now on compile for sm_90 and run nothing, in this process.

    Returns:
        The compiled kernels so far, by their hashes, as Triton has them. Needs no GPU.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Hopper:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    run, kernels = JITFunction.run, {}

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        kernels[kernel.hash] = kernel

    driver.set_active(Hopper())
    JITFunction.run = compile_only
    return kernels


def photometric_kernels(config: AugmentConfig, dtype: torch.dtype) -> list[Kernel]:
    """Compile what a batch launches for the views of a setting, and look at the code.

    In a process of its own; see ``compile_for_hopper``.
    """
    from fastsiam.views.photometric import cuda

    kernels, count = compile_for_hopper(), 64
    index, size = np.arange(count), [(config.crop, config.crop)] * count
    params = draw_views(config, seed=0, epoch=0, index=index, size=size)
    crops = tuple(
        torch.zeros(len(views), count, side, side, 3, dtype=torch.uint8)
        for side, views in config.by_side.items()
    )
    cuda.photometric(crops, params, config, dtype=dtype)
    return [inspect(kernel) for kernel in kernels.values()]


def inspect(kernel: Any) -> Kernel:
    """Disassemble what Triton compiled."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(kernel.asm["cubin"])
        code, usage = (_cuobjdump(option, file) for option in ("-sass", "-res-usage"))
    used = {name: int(size) for name, size in re.findall(r"([A-Z]+)(?:\[0\])?:(\d+)", usage)}
    return Kernel(
        name=kernel.metadata.name,
        code=tuple(_instructions(code)),
        ptx=kernel.asm["ptx"],
        warps=kernel.metadata.num_warps,
        registers=used["REG"],
        shared=kernel.metadata.shared,
        spilled=used["LOCAL"] + used["STACK"],
    )


def table(kernels: Sequence[Kernel]) -> str:
    """Return what the kernels are and cost, as a Markdown table."""
    heads = ["kernel", "registers", "spilled", "shared", "warps", "occupancy", "loads", "stores"]
    heads += ["part", "pixels a thread", "instructions a pixel", "cycles a pixel", "conversions"]
    rows = []
    for kernel in kernels:
        whole = [
            kernel.name,
            f"{kernel.registers}",
            f"{kernel.spilled}",
            f"{kernel.shared}",
            f"{kernel.warps}",
            f"{kernel.occupancy:.0%}",
            kernel.widths("LDG"),
            kernel.widths("STG"),
        ]
        for part, pixels, cost in parts(kernel):
            figures = (cost.instructions / pixels, cost.cycles / pixels, cost.conversions / pixels)
            rows.append([*whole, part, f"{pixels:.3g}", *(f"{figure:.1f}" for figure in figures)])
            whole = [""] * len(whole)
    return markdown(heads, rows)


def parts(kernel: Kernel) -> list[tuple[str, float, Cost]]:
    """Return the parts of a kernel that take time: a name, pixels a thread does in it, its cost.

    Raises:
        ValueError: views are so small that the compiler left loops out.
    """
    names, pixels = PARTS.get(kernel.name, (["all"], 8 / 3))
    code = sorted(kernel.loops, key=len) if kernel.name in PARTS else [kernel.main]
    if len(code) != len(names):  # a loop of one turn is none
        raise ValueError(
            f"{kernel.name} has {len(code)} loops, not {len(names)}: take a larger side"
        )
    return [(name, pixels, Cost.of(part)) for name, part in zip(names, code, strict=True) if name]


PARTS: dict[str, tuple[Sequence[str], float]] = {
    "change_colours": (("to sum the gray", "to write", "operations, each once", ""), 4),
    "blur_rows": (("radius 0", "radius 1"), 16),
    "blur_columns": (("radius 0", "radius 1"), 8 * 4 / 3),
}
"""Of kernels that are loops: what these do, from the shortest to the longest, each without those
inside it, and the pixels a thread does in a turn. The operations stand in both loops over pixels,
and a view needs each in one of them; without a name they are left out. Of the others, which are
boxes of the blur, a thread has eight values of one channel."""


def _cuobjdump(option: str, file: Path) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(tool), option, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)([^;]*);")


def _instructions(code: str) -> Iterator[Instruction]:
    for address, guard, name, operands in _LINE.findall(code):
        target = re.search(r"(?:^|[\s,(`])(0x[0-9a-f]+)", operands) if name[:3] == "BRA" else None
        # A branch may ask for another predicate as an operand: `BRA P0, 0x10`, `BRA.DIV ~URZ, ...`.
        asks = bool(guard) or (target is not None and bool(operands[: target.start()].strip()))
        yield Instruction(int(address, 16), name, asks, target and int(target[1], 16))


def _width(name: str) -> int:
    """Return the bits that a load or store moves for a thread."""
    sizes = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}
    return next((sizes[part] for part in name.split(".") if part in sizes), 32)


_ENDS = ("EXIT", "RET", "BRA", "BRX", "BRXU")


def _successors(code: Sequence[Instruction]) -> list[list[int]]:
    """Return for each instruction where it can go on; calls return."""
    place = {one.address: i for i, one in enumerate(code)}
    ends = [one.name.split(".")[0] in _ENDS and not one.conditional for one in code]
    following = []
    for i, one in enumerate(code):
        own = [] if ends[i] or i + 1 == len(code) else [i + 1]
        following.append(own if one.target is None else [*own, place[one.target]])
    # A jump by a table, which the code does not show: to what nothing else leads, up to the next.
    jumps = [i for i, one in enumerate(code) if one.name.startswith("BRX")]
    targets = {to for ways in following for to in ways}
    for jump, end in pairwise([*jumps, len(code)]):
        later = (i for i in range(jump + 1, end) if ends[i - 1] and i not in targets)
        following[jump] = [i for i in later if code[i].name not in ("BRA", "NOP")]
    return following


def _reachable(code: Sequence[Instruction]) -> set[int]:
    following, found, ahead = _successors(code), set[int](), [0]
    while ahead:
        at = ahead.pop()
        if at not in found:
            found.add(at)
            ahead += following[at]
    return found


def _loops(code: Sequence[Instruction]) -> list[set[int]]:
    """Find the loops by their ways back to where all ways into them pass."""
    following, reached = _successors(code), sorted(_reachable(code))
    before: dict[int, list[int]] = {at: [] for at in reached}
    for at in reached:
        for to in following[at]:
            before[to].append(at)
    # Bits of an integer are the instructions that lie on all ways to one.
    everything = sum(1 << at for at in reached)
    passed = {at: 1 if at == 0 else everything for at in reached}
    changed = True
    while changed:
        changed = False
        for at in reached[1:]:
            common = everything
            for one in before[at]:
                common &= passed[one]
            common |= 1 << at
            changed, passed[at] = changed or common != passed[at], common
    loops: dict[int, set[int]] = {}
    for at in reached:
        for head in (to for to in following[at] if passed[at] >> to & 1):
            body, ahead = loops.setdefault(head, {head}), [at]
            while ahead:
                one = ahead.pop()
                if one not in body:
                    body.add(one)
                    ahead += before[one]
    return [
        loops[head].difference(*(loops[one] for one in loops if one in loops[head] - {head}))
        for head in sorted(loops)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table for views of one side and type."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", type=int, default=224, help="pixels of a view's side")
    parser.add_argument("--dtype", default="bfloat16", help="type of the result")
    given = parser.parse_args(arguments)
    config = AugmentConfig.alike(crop=given.side)
    print(table(photometric_kernels(config, getattr(torch, given.dtype))))


if __name__ == "__main__":
    main()
