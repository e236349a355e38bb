// Geometry of crops, and their computation with SIMD lanes; see lanes.h.
#pragma once

#include "job.h"
#include "lanes.h"

namespace fastsiam {

// Resampling along one axis: the source pixels of each output pixel, and their weights.
struct Axis {
    int32_t side;            // number of output pixels
    int32_t taps;            // weights per output pixel
    const int32_t *begin;    // (side,) first source pixel of each; never decreases
    const int32_t *weights;  // (taps, side) in units of 2**-22

    int32_t end() const { return begin[side - 1] + taps; }
};

// The box of an image. Its memory may be read only up to `end`.
struct Source {
    const uint8_t *first;  // first byte of the box
    int64_t pitch;
    const uint8_t *end;

    // Returns a row, of which `reach` bytes will be read, but only `count` matter. If reading would
    // go past `end`, returns a copy of the bytes that matter.
    const uint8_t *row(int32_t y, int64_t count, int64_t reach, uint8_t *copy) const {
        const uint8_t *own = first + y * pitch;
        if (own + reach <= end) return own;
        memcpy(copy, own, count);
        return copy;
    }

    // Prefetches bytes of the rows from *next to `end` into the cache, and sets *next to `end`.
    void fetch(int32_t *next, int32_t end, int64_t from, int64_t until) const {
        for (; *next < end; ++*next)
            for (int64_t at = from; at < until; at += 64)
                __builtin_prefetch(first + *next * pitch + at);
    }
};

#if defined(HAS_LANES)
namespace {

constexpr int BYTES = sizeof(Bits);      // bytes of a vector; four vectors are packed into as many
constexpr int MOST = 32;                 // maximum chunks of TAPS taps; other code handles more
constexpr int ENTRY = 1 + PIECES;        // vectors per chunk in a table
constexpr int FETCHED = 4;               // number of source rows to prefetch
constexpr int GROUPS = LANES / SHARERS;  // groups of lanes in a vector, each sharing a window
constexpr int QUADS = LANES / 4;         // groups of four lanes in a vector: RGB and a blank

// The weights of an axis in pieces: (chunks, PIECES, side). Padding taps, which complete the last
// chunk or, if `blanks_first`, the first one, have weight 0.
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
        const int32_t chunk = (k + blank) / TAPS, shift = (k + blank) % TAPS * BITS;
        uint32_t *target = pieces + chunk * PIECES * side;
        const int32_t *weights = axis.weights + k * side;
        for (int32_t x = 0; x < side; x++) {
            int32_t rest = weights[x];
            for (int p = PIECES - 1; p >= 0; p--) {  // the lowest piece first; it is signed
                const uint32_t low = rest & ((1 << BITS) - 1);
                target[p * side + x] |= low << shift;
                rest = (rest + (1 << (BITS - 1))) >> BITS;
            }
        }
    }
    return {chunks, side, pieces};
}

// Table for resizing a row along x. A group of lanes picks each chunk of its taps from a separate
// window of the source row. If the pixels of a group are too far apart for a window (`apart`), the
// output is computed pixel by pixel, with the taps of a pixel distributed over all lanes.
struct Table {
    bool apart;
    int32_t vectors;        // vectors of lanes in an output row
    int32_t chunks;         // chunks of taps
    int64_t reach;          // bytes of a source row that are read
    const int32_t *window;  // (vectors, chunks, GROUPS) offset of each; apart: (pixels,)
    const Bits *entries;    // (vectors, chunks, ENTRY) index, weights; vectors are padded to fours
                            // apart: index, then weights (pixels, chunks, PIECES)
};

// Fills a table; returns false if the pixels of a group of lanes do not fit in a window.
bool lay_out(const Axis &axis, const Pieces &pieces, bool flip, Room &window_room,
             Room &entries_room, Table *table) {
    constexpr int32_t STEP = 3 * TAPS;
    const int32_t side = axis.side, length = 3 * side, chunks = pieces.chunks;
    const int32_t vectors = (length + LANES - 1) / LANES, padded = (vectors + 3) / 4 * 4;
    const int32_t taps = axis.taps < TAPS ? axis.taps : TAPS, pitch = chunks * ENTRY * LANES;
    const int64_t windows = (int64_t)padded * chunks * GROUPS;
    int32_t *window = window_room.of<int32_t>(windows), reach = 0;
    uint32_t *entries = entries_room.of<uint32_t>((int64_t)padded * pitch);
    memset(window, 0, windows * sizeof *window);
    memset(entries + (vectors - 1LL) * pitch, 0, (padded - vectors + 1LL) * pitch * 4);
    for (int32_t from = 0; from < length; from += SHARERS) {
        const int32_t to = from + SHARERS < length ? from + SHARERS : length;
        const int32_t low = from / 3, high = (to - 1) / 3, vector = from / LANES;
        const int32_t begin = axis.begin[flip ? side - 1 - high : low];
        if (3 * (axis.begin[flip ? side - 1 - low : high] - begin + taps) > WINDOW) return false;
        int32_t *place = window + vector * chunks * GROUPS + from % LANES / SHARERS;
        for (int c = 0; c < chunks; c++) place[c * GROUPS] = 3 * begin + STEP * c;
        const int32_t end = 3 * begin + STEP * (chunks - 1) + WINDOW;
        reach = end > reach ? end : reach;
        for (int32_t o = from; o < to; o++) {
            const int32_t x = flip ? side - 1 - o / 3 : o / 3;
            const uint32_t index = lane_index(3 * (axis.begin[x] - begin) + o % 3);
            uint32_t *target = entries + (int64_t)vector * pitch + o % LANES;
            for (int c = 0; c < chunks; c++, target += ENTRY * LANES) {
                *target = index;
                for (int p = 0; p < PIECES; p++) target[(1 + p) * LANES] = pieces.of(c, p)[x];
            }
        }
    }
    *table = {false, vectors, chunks, reach, window, (const Bits *)entries};
    return true;
}

// Fills a table with the taps of a pixel distributed over all lanes; this always succeeds.
void lay_out_apart(const Axis &axis, const Pieces &pieces, bool flip, Room &window_room,
                   Room &entries_room, Table *table) {
    const int32_t side = axis.side, vectors = (3 * side + LANES - 1) / LANES;
    const int32_t chunks = (pieces.chunks + QUADS - 1) / QUADS;
    int32_t *window = window_room.of<int32_t>(side);
    uint32_t *entries = entries_room.of<uint32_t>(((int64_t)side * chunks * PIECES + 1) * LANES);
    for (int lane = 0; lane < LANES; lane++)
        entries[lane] = lane_index(lane / 4 * 3 * TAPS + lane % 4);
    uint32_t *target = entries + LANES;
    for (int32_t o = 0; o < side; o++) {
        const int32_t x = flip ? side - 1 - o : o;
        window[o] = 3 * axis.begin[x];
        for (int c = 0; c < chunks; c++)
            for (int p = 0; p < PIECES; p++)
                for (int lane = 0; lane < LANES; lane++) {
                    const int32_t own = c * QUADS + lane / 4;
                    *target++ = own < pieces.chunks ? pieces.of(own, p)[x] : 0;
                }
    }
    const int64_t reach = 3LL * (axis.begin[side - 1] + (chunks - 1) * QUADS * TAPS);
    *table = {true, vectors, chunks, reach + WINDOW, window, (const Bits *)entries};
}

inline Bits level(Bits sum) { return sum >> PRECISION; }

// Sums the products of all pieces; each piece is worth 2**-BITS of the previous one. CHUNKS is 0 if
// the number of chunks is not a compile-time constant.
template <int CHUNKS, typename Levels, typename Weight>
inline Bits sum(int32_t chunks, Levels levels, Weight weight, int32_t share = 1) {
    const Bits half = Bits{} + (HALF >> ((PIECES - 1) * BITS)) / share;
    if (CHUNKS) {
        Bits own[CHUNKS + 1], total = half;
        for (int c = 0; c < CHUNKS; c++) own[c] = levels(c);
        for (int p = 0; p < PIECES; p++) {
            if (p) total <<= BITS;
            for (int c = 0; c < CHUNKS; c++) total = add_products(total, own[c], weight(c, p));
        }
        return total;
    }
    Bits sums[PIECES] = {half};
    for (int32_t c = 0; c < chunks; c++) {
        const Bits own = levels(c);
        for (int p = 0; p < PIECES; p++) sums[p] = add_products(sums[p], own, weight(c, p));
    }
    for (int p = 1; p < PIECES; p++) sums[p] += sums[p - 1] << BITS;
    return sums[PIECES - 1];
}

// Computes the sums of all pixels of a row, with a table that is `apart`.
void add(const uint8_t *row, const Table table, int32_t side, int32_t *sums) {
    constexpr int32_t same[GROUPS] = {};
    const Bits index = load_vector<Bits>(table.entries), *weights = table.entries + 1;
    for (int32_t x = 0; x < side; x++, weights += table.chunks * PIECES) {
        const uint8_t *pixels = row + table.window[x];
        const Bits all = sum<0>(
            table.chunks, [=](int c) { return pick(pixels + c * 3 * QUADS * TAPS, same, index); },
            [=](int c, int p) { return load_vector<Bits>(weights + c * PIECES + p); }, QUADS);
        store_vector(sums + 3 * x, add_quads(all));  // the next pixel overwrites the blank
    }
}

// Computes one vector of an output row, as sums. CHUNKS is 0 if the table has their number, and
// MADE if the row already contains sums.
constexpr int MADE = 3;
template <int CHUNKS> inline Bits across(const uint8_t *row, const Table &table, int32_t vector) {
    if (CHUNKS == MADE) return load_vector<Bits>(row + (int64_t)vector * BYTES);
    const int32_t chunks = CHUNKS ? CHUNKS : table.chunks;
    const Bits *entry = table.entries + (int64_t)vector * chunks * ENTRY;
    const int32_t *window = table.window + (int64_t)vector * chunks * GROUPS;
    return sum<CHUNKS>(
        chunks,
        [=](int c) {
            return pick(row, window + c * GROUPS, load_vector<Bits>(entry + c * ENTRY));
        },
        [=](int c, int p) { return load_vector<Bits>(entry + c * ENTRY + 1 + p); });
}

// Resizes two rows along x, and appends them to the taps from previous rows.
template <int CHUNKS>
void append_rows(const uint8_t *row, const uint8_t *next, const Table table, const Bits *before,
                 Bits *first, Bits *second) {
    for (int32_t v = 0; v < table.vectors; v++) {
        const Bits a = across<CHUNKS>(row, table, v), b = across<CHUNKS>(next, table, v);
        const Bits taps = append(load_vector<Bits>(before + v), a);
        store_vector(first + v, taps);
        store_vector(second + v, append(taps, b));
    }
}

// Computes an output row as bytes, in complete vectors.
template <int CHUNKS> void make_row(const uint8_t *row, const Table table, uint8_t *out) {
    for (int32_t v = 0; v < table.vectors; v += 4, out += BYTES) {
        Bits four[4];
        for (int j = 0; j < 4; j++) four[j] = level(across<CHUNKS>(row, table, v + j));
        store_vector(out, straighten(pack(four)));
    }
}

// The weights of output row y, kept in registers if CHUNKS is known.
template <int CHUNKS> struct Weights {
    const Pieces &pieces;
    int32_t y;
    Bits kept[CHUNKS + 1][PIECES];

    Weights(const Pieces &pieces, int32_t y) : pieces(pieces), y(y) {
        for (int c = 0; c < CHUNKS; c++)
            for (int p = 0; p < PIECES; p++) kept[c][p] = Bits{} + pieces.of(c, p)[y];
    }
    Bits operator()(int c, int p) const {
        return CHUNKS ? kept[c][p] : Bits{} + pieces.of(c, p)[y];
    }
};

// Computes output row y from rows whose taps are next to each other in the lanes.
template <int CHUNKS>
void blend_lanes(const Bits *const *rows, const Pieces &pieces, int32_t y, int32_t vectors,
                 uint8_t *out) {
    const Weights<CHUNKS> weights(pieces, y);
    for (int32_t v = 0; v < vectors; v += 4, out += BYTES) {
        Bits four[4];
        for (int j = 0; j < 4; j++)
            four[j] = level(sum<CHUNKS>(
                pieces.chunks, [=](int c) { return load_vector<Bits>(rows[c] + v + j); }, weights));
        store_vector(out, straighten(pack(four)));
    }
}

// Computes output row y from (chunks * TAPS) rows of bytes, in complete vectors.
template <int CHUNKS>
void blend_bytes(const uint8_t *const *rows, const Pieces &pieces, int32_t y, int64_t count,
                 uint8_t *out) {
    const Weights<CHUNKS> weights(pieces, y);
    for (int64_t at = 0; at < count; at += BYTES) {
        Bits four[4], levels[CHUNKS ? CHUNKS : MOST][4];
        for (int c = 0; c < pieces.chunks; c++) spread(rows + c * TAPS, at, levels[c]);
        for (int j = 0; j < 4; j++)
            four[j] = level(sum<CHUNKS>(
                pieces.chunks, [&](int c) { return levels[c][j]; }, weights));
        store_vector(out + at, pack(four));
    }
}

// Indexed by `code_of` chunks, or MADE.
constexpr decltype(&append_rows<0>) APPEND_ROWS[] = {append_rows<0>, append_rows<1>, append_rows<2>,
                                                     append_rows<MADE>};
constexpr decltype(&make_row<0>) MAKE_ROW[] = {make_row<0>, make_row<1>, make_row<2>,
                                               make_row<MADE>};
constexpr decltype(&blend_lanes<0>) BLEND_LANES[] = {blend_lanes<0>, blend_lanes<1>,
                                                     blend_lanes<2>};
constexpr decltype(&blend_bytes<0>) BLEND_BYTES[] = {blend_bytes<0>, blend_bytes<1>,
                                                     blend_bytes<2>};

int code_of(int32_t chunks) { return chunks > 2 ? 0 : chunks; }
int code_of(const Table &table) { return table.apart ? MADE : code_of(table.chunks); }

// The crop. Rows are written in complete vectors: the excess of a row is overwritten by the next
// row, and rows whose excess would not fit are written to `spare` first.
struct Target {
    uint8_t *out;
    int64_t length, size;  // bytes of a row, bytes of the crop
    uint8_t *spare;        // buffer for a row of complete vectors

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
    static thread_local Room line_room, copies_room, sums_room;
    const int64_t from = 3LL * x.begin[0], until = 3LL * x.end();
    const int64_t reach = from + (until - from + BYTES - 1) / BYTES * BYTES;
    uint8_t *line = line_room.bytes(reach > table.reach ? reach : table.reach);
    uint8_t *copies = copies_room.bytes(reach * pieces.chunks * TAPS);
    int32_t *sums = sums_room.of<int32_t>((table.vectors + 4LL) * LANES);
    const int32_t blank = pieces.chunks * TAPS - y.taps;
    int32_t fetched = y.begin[0];
    const auto blend = BLEND_BYTES[code_of(pieces.chunks)];
    const auto make = MAKE_ROW[code_of(table)];
    for (int32_t i = 0; i < y.side; i++) {
        const uint8_t *rows[MOST * TAPS];
        source.fetch(&fetched, y.begin[i] + y.taps + FETCHED, from, until);
        for (int32_t k = 0; k < pieces.chunks * TAPS; k++) {
            const int32_t row = y.begin[i] + (k > blank ? k - blank : 0);
            rows[k] = source.row(row, until, reach, copies + k * reach) + from;
        }
        blend(rows, pieces, i, until - from, line + from);
        uint8_t *out = target.row(i);
        if (table.apart) add(line, table, x.side, sums);
        make(table.apart ? (const uint8_t *)sums : line, table, out);
        target.written(i, out);
    }
}

// Resizes along x, then along y: each output row is computed as soon as its rows are available.
void rows_then_columns(const Source &source, const Axis &x, const Axis &y, const Pieces &pieces,
                       const Table &table, const Target &target) {
    static thread_local Room ring_room, copies_room, sums_room;
    const int32_t depth = TAPS * (pieces.chunks - 1) + 2, pitch = (table.vectors + 3) / 4 * 4;
    Bits *ring = ring_room.of<Bits>((int64_t)depth * pitch);
    const auto taps_until = [=](int32_t row) { return ring + row % depth * pitch; };
    uint8_t *copies = copies_room.bytes(2 * table.reach);
    const int64_t length = (table.vectors + 1LL) * LANES;
    int32_t *sums = sums_room.of<int32_t>(2 * length);
    const auto append = APPEND_ROWS[code_of(table)];
    const auto blend = BLEND_LANES[code_of(pieces.chunks)];
    int32_t made = y.begin[0], fetched = made;
    for (int32_t i = 0; i < y.side; i++) {
        const int32_t last = y.begin[i] + y.taps - 1;
        for (; made <= last; made += 2) {  // two at a time, because both need the same table
            const uint8_t *rows[2];
            source.fetch(&fetched, made + 2 + FETCHED, 3LL * x.begin[0], 3LL * x.end());
            for (int32_t k = 0; k < 2; k++) {
                const int32_t row = made + k < y.end() ? made + k : made;
                rows[k] = source.row(row, 3LL * x.end(), table.reach, copies + k * table.reach);
                if (!table.apart) continue;
                add(rows[k], table, x.side, sums + k * length);
                rows[k] = (const uint8_t *)(sums + k * length);
            }
            append(rows[0], rows[1], table, taps_until(made + depth - 1), taps_until(made),
                   taps_until(made + 1));
        }
        const Bits *taps[MOST];
        for (int c = 0; c < pieces.chunks; c++)
            taps[c] = taps_until(last - TAPS * (pieces.chunks - 1 - c));
        uint8_t *out = target.row(i);
        blend(taps, pieces, i, table.vectors, out);
        target.written(i, out);
    }
}

// Makes a crop; returns false, without writing anything, if it needs too many taps.
bool crop_by_lanes(const Source &source, const Axis &x, const Axis &y, bool flip,
                   bool columns_first, uint8_t *out) {
    static thread_local Room x_room, y_room, window_room, entries_room, spare_room;
    const Pieces along = cut(x, false, x_room), pieces = cut(y, true, y_room);
    if (pieces.chunks > MOST) return false;
    Table table;
    if (!lay_out(x, along, flip, window_room, entries_room, &table))
        lay_out_apart(x, along, flip, window_room, entries_room, &table);
    const int64_t length = 3LL * x.side;
    const Target target = {out, length, length * y.side, spare_room.bytes(length + BYTES)};
    const auto resize = columns_first ? columns_then_rows : rows_then_columns;
    resize(source, x, y, pieces, table, target);
    return true;
}

}  // namespace
#endif

}  // namespace fastsiam
