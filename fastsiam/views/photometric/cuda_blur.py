"""PIL's blur on a GPU, in Triton: three box filters along each axis, each rounded to integers.

Boxes of radius 0 and 1, for sigmas below 2.45, have one kernel per axis. A thread walks along a row
or column, keeps the windows of all three boxes in registers, and passes each value through the
three boxes. So each axis reads and writes the levels once. Rows are processed by pixels, sixteen of
which are three loads of 128 bits; columns by 32-bit words of four adjacent values.

Wider boxes, and sides that are not multiples of 16, take six passes of a general box filter.
"""

# Triton infers the types of kernel parameters when it compiles a kernel.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# It also infers the types of tuples, which grow as loops are unrolled.
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from .cuda_colours import COLUMNS, TABLE, apart, four, look_up, pairs

WIDEST = 1
"""Largest integer radius that ``blur_rows`` and ``blur_columns`` support."""
MULTIPLE = 16
"""Sides must be a multiple of this for those kernels: the pixels of a row loaded at a time."""
LINES = tl.constexpr(32)  # rows or columns per program, which is one warp

# Columns of ``boxes``, all float32.
INNER, OUTER = tl.constexpr(0), tl.constexpr(1)  # weights of the inner pixels, and of the two ends
WHOLE, VIEW = tl.constexpr(2), tl.constexpr(3)  # integer radius, and index of the view


@triton.jit
def blur_rows(levels, boxes, SIDE: tl.constexpr):
    """Blur along rows, in place.

    Args:
        levels: (M, SIDE, SIDE * 3 / 4) 32-bit words.
        boxes: (B, 4), boxes of the views to blur.
        SIDE: side of a view in pixels.
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
    """Blur along columns, and write the results of ``lookup``.

    Args:
        levels: (M, SIDE, SIDE * 3 / 4) 32-bit words.
        boxes: (B, 4), boxes of the views to blur.
        views: (M, COLUMNS), parameters of the views.
        lookup: (K, 3, 256) integers with the bit patterns of results.
        out: output (M, SIDE, SIDE, 3) of the type of ``lookup``, as 32-bit words.
        SIDE: side of a view in pixels.
    """
    WORDS: tl.constexpr = SIDE // 4 * 3  # per row
    box = boxes + (tl.program_id(0) // tl.cdiv(WORDS, LINES)) * 4
    word = (tl.program_id(0) % tl.cdiv(WORDS, LINES)) * LINES + tl.arange(0, LINES)
    view = tl.load(box + VIEW).to(tl.int64)
    column = levels + view * (SIDE * WORDS) + tl.minimum(word, WORDS - 1)
    inner, outer = tl.load(box + INNER).to(tl.uint32), tl.load(box + OUTER).to(tl.uint32)
    lookup += tl.load(views + view * COLUMNS + TABLE).to(tl.int32)
    # The first value of a word can belong to any of the three channels.
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


# A line (row or column) is processed in groups. The output of the third box lags 3 * REACH places
# behind the input of the first. Each box has a window of its last inputs, which starts filled with
# its first input. At the end of a line, each box gets its last input again. So edges are replicated
# at the input of every box.


@triton.jit
def _walk_row(line, inside, inner, outer, SIDE: tl.constexpr, REACH: tl.constexpr):
    """Blur a row in groups of 16 pixels, whose twelve words are loaded one group ahead."""
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
    """Blur a column of words in groups of 8 rows."""
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
    """Return the windows of the three boxes after the first 3 * REACH inputs of a line."""
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
    """Return the last 3 * REACH outputs of a line."""
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
    """Feed a value to the first box; return the output of the third, and the new windows."""
    x, one = _box(one, x, inner, outer)
    x, two = _box(two, x, inner, outer)
    x, three = _box(three, x, inner, outer)
    return x, one, two, three


@triton.jit
def _box(window, x, inner, outer):
    """Return the output of the box that ends at input ``x``, and the window for the next input."""
    middle = window[1]
    for i in tl.static_range(2, len(window)):
        middle += window[i]
    ends = window[0] + x
    window = window[1:]
    window += (x,)
    return box_level(middle, ends, inner, outer), window


@triton.jit
def box_level(middle, ends, inner, outer):
    """Return the output level of a box; sums fit in uint32, as in PIL."""
    return (middle * inner + ends * outer + (1 << 23)) >> 24


@triton.jit
def _filled(x, REACH: tl.constexpr):
    window = (x,)
    for _ in tl.static_range(2 * REACH - 1):
        window += (x,)
    return window


@triton.jit
def _twelve(line):
    """Load the twelve words of 16 pixels."""
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
    """Return r, g, b of a pixel, joined with a 0 that the compiler optimises away."""
    r, g, b = _byte(words, 3 * PIXEL), _byte(words, 3 * PIXEL + 1), _byte(words, 3 * PIXEL + 2)
    return four(r, g, b, tl.zeros_like(r))


@triton.jit
def _byte(words, BYTE: tl.constexpr):
    return (words[BYTE // 4].to(tl.uint32) >> (8 * (BYTE % 4))) & 255


@triton.jit
def _store_twelve(line, pixels, inside):
    """Store 16 pixels as twelve words."""
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
    """Load a word from each of COUNT rows, each unpacked into four joined values."""
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
    """Store the results of the four values of a word."""
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
    """Apply one box filter of any radius along the axis whose neighbours are STRIDE bytes apart.

    Args:
        source: (M, SIDE, SIDE, 3) bytes.
        target: output of the same shape: bytes, or in the last pass the integers of ``lookup``.
        boxes: (B, 4), boxes of the views to blur.
        views: (M, COLUMNS), parameters of the views.
        lookup: (K, 3, 256) integers with the bit patterns of results.
        SIDE: side of a view in pixels.
        STRIDE: 3 for rows, 3 * SIDE for columns.
        LAST: whether this is the last pass, which writes results instead of levels.
        BLOCKS: programs per view.
        BLOCK: values per program.
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
        near = tl.minimum(tl.maximum(at + offset, 0), SIDE - 1)  # replicate edges
        middle += tl.load(line + near * STRIDE).to(tl.uint32)
        offset += 1
    level = box_level(middle, ends, inner, outer)
    if LAST:
        lookup += tl.load(views + view * COLUMNS + TABLE).to(tl.int32)
        result = tl.load(lookup + (value % 3) * 256 + level.to(tl.int32))
        tl.store(target + view * VALUES + value, result, inside)
    else:
        tl.store(target + view * VALUES + value, level.to(tl.uint8), inside)
