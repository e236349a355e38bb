"""PIL's blur on a GPU: three boxes along each axis, whole levels after each, as Triton kernels.

Boxes of radius 0 and 1, which is a sigma below 2.4, have a kernel for each axis. A thread walks
along a line, keeps what the next box needs in registers, and lets each value through all three
boxes: an axis reads the levels once and writes them once. Lines of rows are walked by the pixel,
sixteen of which are three loads of 128 bits; columns by the word of four values beside each other.

What is left, wider boxes and sides that are no multiples of 16, goes through six passes of one box.
"""

# The parameters of kernels have types that are Triton's own, found out when they are compiled.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# So have tuples, which grow as loops are unrolled.
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from .cuda_colours import COLUMNS, TABLE, apart, four, look_up, pairs

WIDEST = 1
"""Whole radius of the widest box that has kernels of its own."""
MULTIPLE = 16
"""Of which a side must be for those: pixels of a row that are walked at a time."""
LINES = tl.constexpr(32)  # of one program, which is a warp

# Columns of the table of boxes, all float32.
INNER, OUTER = tl.constexpr(0), tl.constexpr(1)  # weights of whole pixels, and of the ends
WHOLE, VIEW = tl.constexpr(2), tl.constexpr(3)


@triton.jit
def blur_rows(levels, boxes, SIDE: tl.constexpr):
    """Blur along rows, in place.

    Args:
        levels: (M, SIDE, 3 / 4 of SIDE) 32-bit words.
        boxes: (B, 4), of the views to be blurred.
        SIDE: of a view.
    """
    box = boxes + (tl.program_id(0) // tl.cdiv(SIDE, LINES)) * 4
    row = (tl.program_id(0) % tl.cdiv(SIDE, LINES)) * LINES + tl.arange(0, LINES)
    start = tl.load(box + VIEW).to(tl.int64) * (SIDE * SIDE // 4 * 3)
    line = levels + start + tl.minimum(row, SIDE - 1) * (SIDE // 4 * 3)
    inner, outer = tl.load(box + INNER).to(tl.uint32), tl.load(box + OUTER).to(tl.uint32)
    if tl.load(box + WHOLE) == 0:
        _walk_row(line, row < SIDE, inner, outer, SIDE, 1)
    else:
        _walk_row(line, row < SIDE, inner, outer, SIDE, 2)


@triton.jit
def blur_columns(levels, boxes, views, lookup, out, SIDE: tl.constexpr):
    """Blur along columns, and write the results.

    Args:
        levels: (M, SIDE, 3 / 4 of SIDE) 32-bit words.
        boxes: (B, 4), of the views to be blurred.
        views: (M, COLUMNS).
        lookup: (K, 3, 256) integers that hold the bits of results.
        out: (M, SIDE, SIDE, 3) of that type, as 32-bit words.
        SIDE: of a view.
    """
    WORDS: tl.constexpr = SIDE // 4 * 3  # of a row
    box = boxes + (tl.program_id(0) // tl.cdiv(WORDS, LINES)) * 4
    word = (tl.program_id(0) % tl.cdiv(WORDS, LINES)) * LINES + tl.arange(0, LINES)
    view = tl.load(box + VIEW).to(tl.int64)
    column = levels + view * (SIDE * WORDS) + tl.minimum(word, WORDS - 1)
    inner, outer = tl.load(box + INNER).to(tl.uint32), tl.load(box + OUTER).to(tl.uint32)
    lookup += tl.load(views + view * COLUMNS + TABLE).to(tl.int32)
    # The values of a word begin with any of the three channels.
    value = 4 * word
    table = four(
        lookup + value % 3 * 256,
        lookup + (value + 1) % 3 * 256,
        lookup + (value + 2) % 3 * 256,
        lookup + value % 3 * 256,
    )
    PER_WORD: tl.constexpr = 32 // lookup.dtype.element_ty.primitive_bitwidth
    result = out + view * (SIDE * SIDE * 3 // PER_WORD)
    if tl.load(box + WHOLE) == 0:
        _walk_column(column, table, result, word, inner, outer, SIDE, 1)
    else:
        _walk_column(column, table, result, word, inner, outer, SIDE, 2)


# A line is walked in groups: what comes out of the third box lies 3 * REACH places behind what goes
# into the first. Each box has its own window of the values that came last; where a line begins, it
# is filled with the first value, and at the end the last value comes in again: edges repeat
# outwards, in the result of each box.


@triton.jit
def _walk_row(line, inside, inner, outer, SIDE: tl.constexpr, REACH: tl.constexpr):
    """Walk along a row in groups of 16 pixels, whose twelve words are loaded one group ahead."""
    LAG: tl.constexpr = 3 * REACH
    words = _twelve(line)
    first = ()
    for i in tl.static_range(LAG):
        first += (_pixel(words, i),)
    one, two, three = _begin(first, inner, outer, REACH)
    for group in range(SIDE // 16 - 1):
        following = _twelve(line + 12 * (group + 1))
        done = ()
        for i in tl.static_range(16):
            x = _pixel(words, i + LAG) if i + LAG < 16 else _pixel(following, i + LAG - 16)
            x, one, two, three = _pass(x, one, two, three, inner, outer)
            done += (x,)
        _store_twelve(line + 12 * group, done, inside)
        words = following
    done = ()
    for i in tl.static_range(16 - LAG):
        x, one, two, three = _pass(_pixel(words, i + LAG), one, two, three, inner, outer)
        done += (x,)
    done += _end(one, two, three, inner, outer, REACH)
    _store_twelve(line + 12 * (SIDE // 16 - 1), done, inside)


@triton.jit
def _walk_column(column, table, out, word, inner, outer, SIDE: tl.constexpr, REACH: tl.constexpr):
    """Walk down a column of words in groups of 8 rows."""
    LAG: tl.constexpr = 3 * REACH
    WORDS: tl.constexpr = SIDE // 4 * 3
    one, two, three = _begin(_rows(column, 0, LAG, WORDS), inner, outer, REACH)
    for group in range(SIDE // 8 - 1):
        rows = _rows(column + 8 * WORDS * group, LAG, 8, WORDS)
        for i in tl.static_range(8):
            x, one, two, three = _pass(rows[i], one, two, three, inner, outer)
            _store_row(out, table, 8 * group + i, word, x, WORDS)
    rows = _rows(column + WORDS * (SIDE - 8), LAG, 8 - LAG, WORDS)
    for i in tl.static_range(8 - LAG):
        x, one, two, three = _pass(rows[i], one, two, three, inner, outer)
        _store_row(out, table, SIDE - 8 + i, word, x, WORDS)
    done = _end(one, two, three, inner, outer, REACH)
    for i in tl.static_range(LAG):
        _store_row(out, table, SIDE - LAG + i, word, done[i], WORDS)


@triton.jit
def _begin(values, inner, outer, REACH: tl.constexpr):
    """Return the windows of the three boxes after the first 3 * REACH values of a line."""
    one = _filled(values[0], REACH)
    y = values[0]
    for i in tl.static_range(1, REACH + 1):
        y, one = _box(one, values[i], inner, outer)
    two = _filled(y, REACH)
    for i in tl.static_range(REACH + 1, 2 * REACH + 1):
        x, one = _box(one, values[i], inner, outer)
        y, two = _box(two, x, inner, outer)
    three = _filled(y, REACH)
    for i in tl.static_range(2 * REACH + 1, 3 * REACH):
        y, one, two, three = _pass(values[i], one, two, three, inner, outer)
    return one, two, three


@triton.jit
def _end(one, two, three, inner, outer, REACH: tl.constexpr):
    """Return the last 3 * REACH values of a line."""
    done = ()
    last = one[2 * REACH - 1]
    for _ in tl.static_range(REACH):
        x, one, two, three = _pass(last, one, two, three, inner, outer)
        done += (x,)
    last = two[2 * REACH - 1]
    for _ in tl.static_range(REACH):
        x, two = _box(two, last, inner, outer)
        x, three = _box(three, x, inner, outer)
        done += (x,)
    last = three[2 * REACH - 1]
    for _ in tl.static_range(REACH):
        x, three = _box(three, last, inner, outer)
        done += (x,)
    return done


@triton.jit
def _pass(x, one, two, three, inner, outer):
    """Let a value into the first box; return what leaves the third, and the windows."""
    x, one = _box(one, x, inner, outer)
    x, two = _box(two, x, inner, outer)
    x, three = _box(three, x, inner, outer)
    return x, one, two, three


@triton.jit
def _box(window, x, inner, outer):
    """Return the level of the box that ends with ``x``, and the window of the next."""
    middle = window[1]
    for i in tl.static_range(2, len(window)):
        middle += window[i]
    ends = window[0] + x
    window = window[1:]
    window += (x,)
    return box_level(middle, ends, inner, outer), window


@triton.jit
def box_level(middle, ends, inner, outer):
    """Return the whole level of a box: all in uint32, below 2**32, as in PIL."""
    return (middle * inner + ends * outer + (1 << 23)) >> 24


@triton.jit
def _filled(x, REACH: tl.constexpr):
    window = (x,)
    for _ in tl.static_range(2 * REACH - 1):
        window += (x,)
    return window


@triton.jit
def _twelve(line):
    """Load the words of 16 pixels."""
    word = line[:, None] + tl.arange(0, 4)[None, :]
    a = tl.load(word)
    b = tl.load(word + 4)
    c = tl.load(word + 8)
    return _split(a) + _split(b) + _split(c)


@triton.jit
def _split(words):
    a, b, c, d = apart(tl.reshape(words, (words.shape[0], 2, 2)))
    return (a, b, c, d)


@triton.jit
def _pixel(words, PIXEL: tl.constexpr):
    """Return r, g, b of a pixel side by side, and a 0 with which the compiler does nothing."""
    r, g, b = _byte(words, 3 * PIXEL), _byte(words, 3 * PIXEL + 1), _byte(words, 3 * PIXEL + 2)
    return four(r, g, b, tl.zeros_like(r))


@triton.jit
def _byte(words, BYTE: tl.constexpr):
    return (words[BYTE // 4].to(tl.uint32) >> (8 * (BYTE % 4))) & 255


@triton.jit
def _store_twelve(line, pixels, inside):
    """Store 16 pixels as the words that they are."""
    values = ()
    for i in tl.static_range(16):
        r, g, b, _ = apart(pixels[i])
        values += (r, g, b)
    for i in tl.static_range(3):
        four_words = four(
            _packed(values, 16 * i),
            _packed(values, 16 * i + 4),
            _packed(values, 16 * i + 8),
            _packed(values, 16 * i + 12),
        )
        words = tl.reshape(four_words, (line.shape[0], 4)).to(tl.int32, bitcast=True)
        tl.store(line[:, None] + (4 * i + tl.arange(0, 4)[None, :]), words, inside[:, None])


@triton.jit
def _packed(values, AT: tl.constexpr):
    low = values[AT] | (values[AT + 1] << 8)
    return low | (values[AT + 2] << 16) | (values[AT + 3] << 24)


@triton.jit
def _rows(column, FIRST: tl.constexpr, COUNT: tl.constexpr, WORDS: tl.constexpr):
    """Load a word of so many rows: four values each, side by side."""
    words = ()
    for i in tl.static_range(COUNT):
        words += (tl.load(column + (FIRST + i) * WORDS),)
    rows = ()
    for i in tl.static_range(COUNT):
        x = words[i].to(tl.uint32)
        rows += (four(x & 255, (x >> 8) & 255, (x >> 16) & 255, x >> 24),)
    return rows


@triton.jit
def _store_row(out, table, row, word, x, WORDS: tl.constexpr):
    """Store the results of four values, which are a word of a row."""
    a, b, c, d = look_up(*apart(table + x))
    inside = (word < WORDS)[:, None]
    if table.dtype.element_ty == tl.int32:
        at = out + row * (4 * WORDS) + (4 * word[:, None] + tl.arange(0, 4)[None, :])
        tl.store(at, tl.reshape(four(a, b, c, d), (word.shape[0], 4)), inside)
    else:
        at = out + row * (2 * WORDS) + (2 * word[:, None] + tl.arange(0, 2)[None, :])
        tl.store(at, tl.join(pairs(a, b), pairs(c, d)), inside)


@triton.jit
def box_blur(
    source,
    target,
    boxes,
    views,
    lookup,
    SIDE: tl.constexpr,
    STRIDE: tl.constexpr,
    LAST: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Blur by one box of any radius along the axis whose neighbours lie ``STRIDE`` bytes apart.

    Args:
        source: (M, SIDE, SIDE, 3) bytes.
        target: the same, or the last time the results, in integers as in ``lookup``.
        boxes: (B, 4), of the views to be blurred.
        views: (M, COLUMNS).
        lookup: (K, 3, 256) integers that hold the bits of results.
        SIDE: of a view.
        STRIDE: 3 or 3 * SIDE.
        LAST: whether results are wanted.
        BLOCKS: programs for a view.
        BLOCK: values of one.
    """
    VALUES: tl.constexpr = 3 * SIDE * SIDE
    box = boxes + (tl.program_id(0) // BLOCKS) * 4
    value = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = value < VALUES
    value = tl.minimum(value, VALUES - 1)
    inner, outer = tl.load(box + INNER).to(tl.uint32), tl.load(box + OUTER).to(tl.uint32)
    whole = tl.load(box + WHOLE).to(tl.int32)
    view = tl.load(box + VIEW).to(tl.int64)
    at = (value // STRIDE) % SIDE
    line = source + view * VALUES + (value - at * STRIDE)
    ends = tl.load(line + tl.maximum(at - whole - 1, 0) * STRIDE).to(tl.uint32)
    ends += tl.load(line + tl.minimum(at + whole + 1, SIDE - 1) * STRIDE).to(tl.uint32)
    middle = tl.zeros((BLOCK,), tl.uint32)
    offset = -whole
    while offset <= whole:
        near = tl.minimum(tl.maximum(at + offset, 0), SIDE - 1)  # edges repeat outwards
        middle += tl.load(line + near * STRIDE).to(tl.uint32)
        offset += 1
    level = box_level(middle, ends, inner, outer)
    if LAST:
        lookup += tl.load(views + view * COLUMNS + TABLE).to(tl.int32)
        result = tl.load(lookup + (value % 3) * 256 + level.to(tl.int32))
        tl.store(target + view * VALUES + value, result, inside)
    else:
        tl.store(target + view * VALUES + value, level.to(tl.uint8), inside)
