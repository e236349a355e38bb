"""What is said of compiled kernels is what stands in their code."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

pytest.importorskip("triton")

from fastsiam.bench import kernels
from fastsiam.bench.kernels import Cost, Instruction, Kernel
from fastsiam.config import AugmentConfig

CODE = """
    /*0000*/                   S2R R0, SR_TID.X ;
    /*0010*/                   LDG.E.U8 R1, desc[UR4][R2.64+0x10] ;
    /*0020*/               @P0 BRA 0x60 ;
    /*0030*/                   I2F.U8 R3, R1 ;
    /*0040*/              @!P1 BRA 0x30 ;
    /*0050*/                   BRX R4 -0x60 ;
    /*0060*/                   STG.E.128 desc[UR4][R2.64], R4 ;
    /*0070*/               @P2 BRA 0x10 ;
    /*0080*/                   EXIT ;
    /*0090*/                   FADD R1, R1, R1 ;
    /*00a0*/                   BRA 0x60 ;
    /*00b0*/                   FMUL R1, R1, R1 ;
    /*00c0*/                   RET.REL.NODEC R2 0x0 ;
    /*00d0*/                   BRA 0xd0;
"""


def kernel(registers: int = 32, warps: int = 4, shared: int = 0) -> Kernel:
    code = tuple(kernels._instructions(CODE))
    return Kernel("a", code, "", warps, registers, shared, spilled=0)


def names(code: tuple[Instruction, ...]) -> list[str]:
    return [one.name for one in code]


def test_loops_and_widths_of_code() -> None:
    """A loop in a loop, which a jump by a table leaves for the code behind the end and returns."""
    inner, outer = sorted(kernel().loops, key=len)
    assert names(inner) == ["I2F.U8", "BRA"]
    assert names(outer) == ["LDG.E.U8", "BRA", "BRX", "STG.E.128", "BRA", "FADD", "BRA"]
    assert kernel().widths("LDG") == "1 x 8" and kernel().widths("STG") == "1 x 128"
    assert Cost.of(inner) == Cost(2, 8, 1)  # a conversion takes as long as eight others


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "occupancy"),
    [
        (32, 4, 0, 1),
        (64, 8, 0, 0.5),
        (65, 8, 0, 0.375),
        (32, 1, 0, 0.5),
        (32, 4, 113 * 1024, 0.125),
    ],
)
def test_occupancy(registers: int, warps: int, shared: int, occupancy: float) -> None:
    """Bound by registers, in eights; by the number of programs; by shared memory."""
    assert kernel(registers, warps, shared).occupancy == occupancy


def test_the_photometric_kernels_move_words() -> None:
    """Compiled for an H200: no single bytes, no spills, a blur without shared memory."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        config = AugmentConfig.alike(crop=224)
        found = pool.submit(kernels.photometric_kernels, config, torch.bfloat16).result()
    assert [one.name for one in found] == ["change_colours", "blur_rows", "blur_columns"]
    for one in found:
        assert one.spilled == 0 and one.registers <= 128
        widths = one.widths("LDG") + one.widths("STG")
        assert " x 8," not in widths and not widths.endswith(" x 8")
        assert "FADD.RZ" in names(one.code) or one.name != "change_colours"
        assert one.shared == 0 or one.name == "change_colours"
    table = kernels.table(found).splitlines()
    assert len(table) == 2 + 3 + 2 + 2
    rows = dict.fromkeys(name for one in found for name, _, _ in kernels.parts(one))
    assert {"radius 0", "radius 1", "operations, each once"} <= set(rows)
