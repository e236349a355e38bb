// Crops by vectors of lanes: for all but those that shrink so much that a lane's pixels lie too far
// apart. See lanes.h.
#pragma once

#include "lanes.h"
#include "source.h"

#if defined(HAS_LANES)

namespace fastsiam {

namespace {

using Vector = Lanes::Vector;
constexpr int COUNT = Lanes::COUNT, TAPS = Lanes::TAPS, PIECES = Lanes::PIECES;
constexpr int BYTES = sizeof(Vector);  // of a vector; also what four vectors are packed into
constexpr int MOST = 4;                // chunks of TAPS taps; more are left to other code
constexpr int ENTRY = 1 + PIECES;      // vectors of a table for each chunk

// An axis' weights in pieces: (chunks, PIECES, side). `blank` taps of no weight stand before them.
struct Pieces {
    int32_t chunks, side;
    const uint32_t *at;

    const uint32_t *of(int chunk, int piece) const { return at + (chunk * PIECES + piece) * side; }
};

Pieces cut(const Axis &axis, bool blanks_first, Room &room) {
    const int32_t side = axis.side, chunks = (axis.taps + TAPS - 1) / TAPS;
    const int32_t blank = blanks_first ? chunks * TAPS - axis.taps : 0;
    uint32_t *pieces = room.of<uint32_t>((int64_t)chunks * PIECES * side);
    memset(pieces, 0, (int64_t)chunks * PIECES * side * sizeof *pieces);
    for (int32_t k = 0; k < axis.taps; k++) {
        const int32_t chunk = (k + blank) / TAPS, shift = (k + blank) % TAPS * Lanes::BITS;
        uint32_t *target = pieces + chunk * PIECES * side;
        const int32_t *weights = axis.weights + k * side;
        for (int32_t x = 0; x < side; x++) {
            int32_t rest = weights[x];
            for (int p = PIECES - 1; p >= 0; p--) {  // the lowest first; it is signed
                const uint32_t low = rest & ((1 << Lanes::BITS) - 1);
                target[p * side + x] |= low << shift;
                rest = (rest + (1 << (Lanes::BITS - 1))) >> Lanes::BITS;
            }
        }
    }
    return {chunks, side, pieces};
}

// What makes a row of the result of a row of the source.
struct Table {
    int32_t vectors;        // of lanes in a row of the result
    int32_t chunks;         // of taps
    int64_t reach;          // bytes of a row that are read
    const int32_t *window;  // (vectors, chunks, COUNT / SHARERS) where lanes are picked
    const Vector *entries;  // (vectors, chunks, ENTRY) index, weights; vectors are padded to fours
};

// Lays out a table; returns false if a window is too small for what has to be picked in it.
bool lay_out(const Axis &axis, bool flip, Table *table) {
    static thread_local Room pieces_room, window_room, entries_room;
    constexpr int WINDOWS = COUNT / Lanes::SHARERS;
    const int32_t side = axis.side, length = 3 * side;
    const Pieces pieces = cut(axis, false, pieces_room);
    if (pieces.chunks > MOST) return false;
    const int32_t chunks = pieces.chunks, vectors = (length + COUNT - 1) / COUNT;
    const int32_t padded = (vectors + 3) / 4 * 4, taps = axis.taps < TAPS ? axis.taps : TAPS;
    int32_t *window = window_room.of<int32_t>((int64_t)padded * chunks * WINDOWS);
    const int64_t size = (int64_t)padded * chunks * ENTRY * COUNT;
    uint32_t *entries = entries_room.of<uint32_t>(size);
    memset(window, 0, (int64_t)padded * chunks * WINDOWS * sizeof *window);
    const int64_t last = (int64_t)(vectors - 1) * chunks * ENTRY * COUNT;
    memset(entries + last, 0, (size - last) * sizeof *entries);
    int32_t reach = 0;
    for (int32_t group = 0; group * Lanes::SHARERS < length; group++) {
        const int32_t from = group * Lanes::SHARERS, to = from + Lanes::SHARERS - 1;
        int32_t low = from / 3, high = (to < length ? to : length - 1) / 3;
        if (flip) {
            const int32_t mirrored = side - 1 - high;
            high = side - 1 - low, low = mirrored;
        }
        const int32_t begin = axis.begin[low];
        if (3 * (axis.begin[high] - begin + taps) > Lanes::WINDOW) return false;
        for (int c = 0; c < chunks; c++) {
            const int32_t at = 3 * (begin + TAPS * c);
            window[(group / WINDOWS * chunks + c) * WINDOWS + group % WINDOWS] = at;
            reach = at + Lanes::WINDOW > reach ? at + Lanes::WINDOW : reach;
        }
    }
    for (int32_t o = 0; o < length; o++) {
        const int32_t x = flip ? side - 1 - o / 3 : o / 3, group = o / Lanes::SHARERS;
        const int32_t base = window[group / WINDOWS * chunks * WINDOWS + group % WINDOWS];
        uint32_t *target = entries + (int64_t)(o / COUNT) * chunks * ENTRY * COUNT + o % COUNT;
        for (int c = 0; c < chunks; c++) {
            *target = Lanes::index(3 * axis.begin[x] + o % 3 - base);
            for (int p = 0; p < PIECES; p++) target[(1 + p) * COUNT] = pieces.of(c, p)[x];
            target += ENTRY * COUNT;
        }
    }
    *table = {vectors, chunks, reach, window, (const Vector *)entries};
    return true;
}

// Makes one vector of a row of the result.
template <int CHUNKS>
inline Vector across(const uint8_t *row, const Table &table, int32_t vector) {
    constexpr int WINDOWS = COUNT / Lanes::SHARERS;
    const Vector *entry = table.entries + (int64_t)vector * CHUNKS * ENTRY;
    const int32_t *window = table.window + (int64_t)vector * CHUNKS * WINDOWS;
    Vector levels[CHUNKS], sum = Lanes::all(HALF >> ((PIECES - 1) * Lanes::BITS));
    for (int c = 0; c < CHUNKS; c++)
        levels[c] = Lanes::pick(row, window + c * WINDOWS, entry + c * ENTRY);
    for (int p = 0; p < PIECES; p++) {
        if (p) sum = Lanes::up(sum);
        for (int c = 0; c < CHUNKS; c++)
            sum = Lanes::add_products(sum, levels[c], Lanes::load(entry + c * ENTRY + 1 + p));
    }
    return Lanes::level(sum);
}

// Makes a row of the result, and appends it to the taps that were made of the rows before.
template <int CHUNKS>
void append_row(const uint8_t *row, const Table &table, const Vector *before, Vector *after) {
    for (int32_t v = 0; v < table.vectors; v++) {
        const Vector levels = across<CHUNKS>(row, table, v);
        Lanes::store(after + v, Lanes::append(Lanes::load(before + v), levels));
    }
}

// Makes a row of the result as bytes, whole vectors of them.
template <int CHUNKS> void make_row(const uint8_t *row, const Table &table, uint8_t *out) {
    for (int32_t v = 0; v < table.vectors; v += 4, out += BYTES) {
        Vector four[4];
        for (int j = 0; j < 4; j++) four[j] = across<CHUNKS>(row, table, v + j);
        Lanes::store(out, Lanes::straighten(Lanes::pack(four)));
    }
}

// The weights of row y of the result.
template <int CHUNKS> struct Weights {
    Vector at[CHUNKS][PIECES];

    Weights(const Pieces &pieces, int32_t y) {
        for (int c = 0; c < CHUNKS; c++)
            for (int p = 0; p < PIECES; p++) at[c][p] = Lanes::all(pieces.of(c, p)[y]);
    }
    Vector sum(const Vector *levels, int64_t step) const {
        Vector sum = Lanes::all(HALF >> ((PIECES - 1) * Lanes::BITS));
        for (int p = 0; p < PIECES; p++) {
            if (p) sum = Lanes::up(sum);
            for (int c = 0; c < CHUNKS; c++)
                sum = Lanes::add_products(sum, levels[c * step], at[c][p]);
        }
        return Lanes::level(sum);
    }
};

// Makes row y of the result of rows whose taps stand side by side in the lanes.
template <int CHUNKS>
void blend_lanes(const Vector *const *rows, const Pieces &pieces, int32_t y, int32_t vectors,
                 uint8_t *out) {
    const Weights<CHUNKS> weights(pieces, y);
    for (int32_t v = 0; v < vectors; v += 4, out += BYTES) {
        Vector four[4];
        for (int j = 0; j < 4; j++) {
            Vector levels[CHUNKS];
            for (int c = 0; c < CHUNKS; c++) levels[c] = Lanes::load(rows[c] + v + j);
            four[j] = weights.sum(levels, 1);
        }
        Lanes::store(out, Lanes::straighten(Lanes::pack(four)));
    }
}

// Makes row y of the result of (CHUNKS * TAPS) rows of bytes, whole vectors of them.
template <int CHUNKS>
void blend_bytes(const uint8_t *const *rows, const Pieces &pieces, int32_t y, int64_t count,
                 uint8_t *out) {
    const Weights<CHUNKS> weights(pieces, y);
    for (int64_t at = 0; at < count; at += BYTES) {
        Vector levels[CHUNKS][4], four[4];
        for (int c = 0; c < CHUNKS; c++) Lanes::spread(rows + c * TAPS, at, levels[c]);
        for (int j = 0; j < 4; j++) four[j] = weights.sum(&levels[0][j], 4);
        Lanes::store(out + at, Lanes::pack(four));
    }
}

constexpr decltype(&append_row<1>) APPEND_ROW[] = {append_row<1>, append_row<2>, append_row<3>,
                                                   append_row<4>};
constexpr decltype(&make_row<1>) MAKE_ROW[] = {make_row<1>, make_row<2>, make_row<3>, make_row<4>};
constexpr decltype(&blend_lanes<1>) BLEND_LANES[] = {blend_lanes<1>, blend_lanes<2>,
                                                     blend_lanes<3>, blend_lanes<4>};
constexpr decltype(&blend_bytes<1>) BLEND_BYTES[] = {blend_bytes<1>, blend_bytes<2>,
                                                     blend_bytes<3>, blend_bytes<4>};

// The crop, to which rows are written in whole vectors: what is too much of one is overwritten by
// the next, and what would be too much of the last ones is left out.
struct Target {
    uint8_t *out;
    int64_t length, size;  // of a row, of all
    uint8_t *spare;        // a row of whole vectors

    uint8_t *row(int32_t y) const {
        return (y + 1) * length + BYTES * 1LL <= size ? out + y * length : spare;
    }
    void written(int32_t y, const uint8_t *row) const {
        if (row == spare) memcpy(out + y * length, spare, length);
    }
};

// Resizes along y, then along x.
void columns_then_rows(const Source &source, const Axis &x, const Axis &y, const Pieces &pieces,
                       const Table &table, const Target &target) {
    static thread_local Room line_room, copies_room;
    const int64_t from = 3LL * x.begin[0], until = 3LL * x.end();
    const int64_t reach = from + (until - from + BYTES - 1) / BYTES * BYTES;
    uint8_t *line = line_room.bytes(reach > table.reach ? reach : table.reach);
    uint8_t *copies = copies_room.bytes(reach * MOST * TAPS);
    const int32_t blank = pieces.chunks * TAPS - y.taps;
    for (int32_t i = 0; i < y.side; i++) {
        const uint8_t *rows[MOST * TAPS];
        for (int32_t k = 0; k < pieces.chunks * TAPS; k++) {
            const int32_t row = y.begin[i] + (k > blank ? k - blank : 0);
            rows[k] = source.row(row, until, reach, copies + k * reach) + from;
        }
        BLEND_BYTES[pieces.chunks - 1](rows, pieces, i, until - from, line + from);
        uint8_t *out = target.row(i);
        MAKE_ROW[table.chunks - 1](line, table, out);
        target.written(i, out);
    }
}

// Resizes along x, then along y, each row as soon as its last row of the source is there.
void rows_then_columns(const Source &source, const Axis &x, const Axis &y, const Pieces &pieces,
                       const Table &table, const Target &target) {
    static thread_local Room ring_room, copy_room;
    const int32_t depth = TAPS * (pieces.chunks - 1) + 1, pitch = (table.vectors + 3) / 4 * 4;
    Vector *ring = ring_room.of<Vector>((int64_t)depth * pitch);  // taps that end with a row
    uint8_t *copy = copy_room.bytes(table.reach);
    int32_t made = y.begin[0];
    for (int32_t i = 0; i < y.side; i++) {
        const int32_t last = y.begin[i] + y.taps - 1;
        for (; made <= last; made++) {
            const uint8_t *row = source.row(made, 3LL * x.end(), table.reach, copy);
            const Vector *before = ring + (made + depth - 1) % depth * pitch;
            APPEND_ROW[table.chunks - 1](row, table, before, ring + made % depth * pitch);
        }
        const Vector *taps[MOST];
        for (int c = 0; c < pieces.chunks; c++)
            taps[c] = ring + (last - TAPS * (pieces.chunks - 1 - c)) % depth * pitch;
        uint8_t *out = target.row(i);
        BLEND_LANES[pieces.chunks - 1](taps, pieces, i, table.vectors, out);
        target.written(i, out);
    }
}

// Makes a crop; returns false, with nothing written, if that takes other code.
bool crop_by_lanes(const Source &source, const Axis &x, const Axis &y, bool flip,
                   bool columns_first, uint8_t *out) {
    static thread_local Room pieces_room, spare_room;
    Table table;
    if (y.taps > MOST * TAPS || !lay_out(x, flip, &table)) return false;
    const Pieces pieces = cut(y, true, pieces_room);
    const int64_t length = 3LL * x.side;
    const Target target = {out, length, length * y.side, spare_room.bytes(length + BYTES)};
    const auto resize = columns_first ? columns_then_rows : rows_then_columns;
    resize(source, x, y, pieces, table, target);
    return true;
}

}  // namespace

}  // namespace fastsiam

#endif
