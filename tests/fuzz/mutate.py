"""Random corruption of files, determined only by a random generator."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

_NUMBERS = (
    0, 1, 2, 3, 7, 8, 16, 100, 127, 128, 255, 256, 1000, 4096, 32767, 32768, 65535, 65536,
    2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -128, -(2**31),
    -(2**63),
)  # fmt: skip
_WORDS = (
    b"null", b"true", b"NaN", b"Infinity", b"-1", b"0", b"1e999", b"9" * 30, b"9" * 5000, b'""',
    b"[]", b"{}", b"[" * 3000, b'{"a":' * 3000, b"\xff\xfe", b"\x00", b"\xf4\x90\x80\x80",
    b"\\ud800", b"../../x", b"/etc/passwd", b"!!python/object:os.system x", b"&a [*a, *a]",
    b"- " * 400, b"\n", b"%s", b"=", b"#", b"'''", b'"""', b"1979-05-27T07:32:00Z",
    b"0x" + b"f" * 50, b"\xe2\x80\xa8",
)  # fmt: skip
_MAX_BYTES = 1 << 20
"""Maximum size of a corrupted file in bytes."""

Content = bytearray


def corrupt(corpus: Sequence[bytes], chance: random.Random) -> bytes:
    """Return one of several valid files, corrupted in one to eight places."""
    content = Content(chance.choice(corpus))
    for _ in range(1 << chance.randrange(4)):
        chance.choice(_MUTATIONS)(content, chance, corpus)
    return bytes(content[:_MAX_BYTES])


def _place(content: Content, chance: random.Random) -> int:
    """Return an offset. Both ends, where headers and directories are, are more likely."""
    where, size = chance.random(), len(content)
    if where < 0.3:
        return chance.randrange(min(size, 64) + 1)
    if where < 0.5:
        return max(0, size - chance.randrange(128))
    return chance.randrange(size + 1)


def _flip(content: Content, chance: random.Random, _: Sequence[bytes]) -> None:
    if content:
        content[min(_place(content, chance), len(content) - 1)] ^= 1 << chance.randrange(8)


def _set(content: Content, chance: random.Random, _: Sequence[bytes]) -> None:
    if content:
        content[min(_place(content, chance), len(content) - 1)] = chance.randrange(256)


def _number(content: Content, chance: random.Random, _: Sequence[bytes]) -> None:
    """Overwrite bytes with a number of random width and byte order."""
    width, at = chance.choice((1, 2, 4, 8)), _place(content, chance)
    number = chance.choice(_NUMBERS) % (1 << 8 * width)
    content[at : at + width] = number.to_bytes(width, chance.choice(("little", "big")))


def _text_number(content: Content, chance: random.Random, _: Sequence[bytes]) -> None:
    """Replace digits by a number as text."""
    at = _place(content, chance)
    while at < len(content) and not chr(content[at]).isdigit():
        at += 1
    end = at
    while end < len(content) and chr(content[end]).isdigit():
        end += 1
    content[at:end] = str(chance.choice(_NUMBERS)).encode()


def _word(content: Content, chance: random.Random, _: Sequence[bytes]) -> None:
    at = _place(content, chance)
    content[at : at + chance.choice((0, 0, 1, 4))] = chance.choice(_WORDS)


def _cut(content: Content, chance: random.Random, _: Sequence[bytes]) -> None:
    del content[_place(content, chance) :]


def _remove(content: Content, chance: random.Random, _: Sequence[bytes]) -> None:
    at = _place(content, chance)
    del content[at : at + 1 + chance.randrange(64)]


def _repeat(content: Content, chance: random.Random, _: Sequence[bytes]) -> None:
    at = _place(content, chance)
    piece = content[at : at + 1 + chance.randrange(256)]
    content[at:at] = piece * chance.choice((1, 1, 2, 40))


def _splice(content: Content, chance: random.Random, corpus: Sequence[bytes]) -> None:
    """Replace everything after some offset by a part of another valid file."""
    other = chance.choice(corpus)
    content[_place(content, chance) :] = other[chance.randrange(len(other) + 1) :]


def _zero(content: Content, chance: random.Random, _: Sequence[bytes]) -> None:
    at, size = _place(content, chance), 1 + chance.randrange(64)
    content[at : at + size] = bytes(min(size, max(0, len(content) - at)))


_MUTATIONS: tuple[Callable[[Content, random.Random, Sequence[bytes]], None], ...] = (
    _flip, _flip, _set, _number, _number, _text_number, _word, _cut, _remove, _repeat, _splice,
    _zero,
)  # fmt: skip
