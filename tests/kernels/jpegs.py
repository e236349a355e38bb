"""JPEGs that PIL cannot write: any sampling and any scans, with random coefficients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from struct import pack

import numpy as np

Sampling = Sequence[tuple[int, int]]
"""Horizontal and vertical sampling factor of each component."""

_DC = list(range(8))  # size categories of DC differences; all symbols have 4-bit codes
_AC = [0, *(run * 16 + size for run in (0, 1, 3) for size in (1, 2, 3))]  # 0: end of block
_QUANTISER = 8


def jpeg(
    height: int,
    width: int,
    sampling: Sampling,
    *,
    seed: int = 0,
    restart: int = 0,
    scans: Sequence[tuple[Sequence[int], int, int]] = (),
    frame: int = 0xC0,
    adobe: int | None = None,
) -> bytes:
    """Encode a JPEG of noise.

    Args:
        height: in pixels.
        width: in pixels.
        sampling: factors of each component.
        seed: of the random coefficients.
        restart: MCUs between restart markers; 0 writes none.
        scans: components, first and last coefficient of each scan; by default a single scan.
        frame: the frame's marker: 0xC0 is baseline, 0xC2 progressive.
        adobe: colour transform for an Adobe marker; None writes no marker.
    """
    generator = np.random.default_rng(seed)
    most = max(h for h, _ in sampling), max(v for _, v in sampling)
    parts = [b"\xff\xd8"]
    if adobe is not None:
        parts.append(_marker(0xEE, b"Adobe" + pack(">HHHB", 100, 0, 0, adobe)))
    parts.append(_marker(0xDB, b"\0" + bytes([_QUANTISER]) * 64))
    components = (bytes([i + 1, h * 16 + v, 0]) for i, (h, v) in enumerate(sampling))
    size = pack(">BHHB", 8, height, width, len(sampling))
    parts.append(_marker(frame, size + b"".join(components)))
    for table, symbols in ((0x00, _DC), (0x10, _AC)):
        counts = bytes([0, 0, 0, len(symbols)] + [0] * 12)
        parts.append(_marker(0xC4, bytes([table]) + counts + bytes(symbols)))
    if restart:
        parts.append(_marker(0xDD, pack(">H", restart)))
    for which, first, last in scans or [(range(len(sampling)), 0, 63)]:
        chosen = b"".join(bytes([i + 1, 0]) for i in which)
        header = bytes([len(which)]) + chosen + bytes([first, last, 0])
        parts.append(_marker(0xDA, header))
        mcus = list(_mcus(height, width, sampling, which, most))
        step = restart or len(mcus)
        for turn, begin in enumerate(range(0, len(mcus), step)):
            if begin:
                parts.append(bytes([0xFF, 0xD0 + (turn - 1) % 8]))
            parts.append(_entropy(mcus[begin : begin + step], first, last, generator))
    return b"".join([*parts, b"\xff\xd9"])


def _marker(code: int, content: bytes) -> bytes:
    return bytes([0xFF, code]) + pack(">H", len(content) + 2) + content


def _mcus(
    height: int, width: int, sampling: Sampling, which: Sequence[int], most: tuple[int, int]
) -> Iterator[list[int]]:
    """Yield the component of each block, MCU by MCU."""
    if len(which) == 1:  # not interleaved: as many blocks as the component needs
        h, v = sampling[which[0]]
        across, down = -(-width * h // (8 * most[0])), -(-height * v // (8 * most[1]))
        blocks = [which[0]]
    else:
        across, down = -(-width // (8 * most[0])), -(-height // (8 * most[1]))
        blocks = [i for i in which for _ in range(sampling[i][0] * sampling[i][1])]
    for _ in product(range(down), range(across)):
        yield blocks


def _entropy(
    mcus: Sequence[Sequence[int]], first: int, last: int, generator: np.random.Generator
) -> bytes:
    """Return the entropy-coded data of random blocks."""
    bits: list[str] = []
    before: dict[int, int] = {}
    for component in (i for mcu in mcus for i in mcu):
        if first == 0:
            level = int(generator.integers(-50, 51))
            bits += _coded(_DC, 0, level - before.get(component, 0))
            before[component] = level
        if last:
            at = max(first, 1)
            for run in generator.choice((0, 1, 3), int(generator.integers(0, 5))).tolist():
                if at + run <= last:
                    bits += _coded(_AC, run * 16, int(generator.integers(1, 8)) - 4 or 5)
                    at += run + 1
            if at <= last:
                bits += _coded(_AC, 0, 0)
    text = "".join(bits)
    text += "1" * (-len(text) % 8)
    return int(text, 2).to_bytes(len(text) // 8, "big").replace(b"\xff", b"\xff\0")


def _coded(symbols: Sequence[int], run: int, level: int) -> list[str]:
    """Return the Huffman code of a run and size, and the bits of the level."""
    size = abs(level).bit_length()
    code = format(symbols.index(run + size), "04b")
    return [code, format(level if level > 0 else level + 2**size - 1, f"0{size}b") if size else ""]
