// Crops as PIL makes them: by a triangle filter, widened when it shrinks, along one axis and then
// along the other, rounding to whole levels after each.

#include <string.h>

#include "job.h"
#include "rows.h"
#include "source.h"
#include "weights.h"

namespace fastsiam {

namespace {

// Two pixels side by side, each byte a lane; two lanes are left over.
typedef int32_t Pair __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(8)));
constexpr int64_t AHEAD = 5;  // bytes that are read behind the last pixel, and have no weight

// Lays out horizontal weights: (side, pairs of taps) Pairs.
Pair *spread(const Axis &axis, bool flip, int32_t *first, Pair *table) {
    const int32_t pairs = (axis.taps + 1) / 2;
    for (int32_t x = 0; x < axis.side; x++) {
        const int32_t target = flip ? axis.side - 1 - x : x;
        first[target] = 3 * axis.begin[x];
        for (int32_t pair = 0; pair < pairs; pair++) {
            const int32_t k = 2 * pair;
            const int32_t a = axis.weights[k * axis.side + x];
            const int32_t b = k + 1 < axis.taps ? axis.weights[(k + 1) * axis.side + x] : 0;
            table[target * pairs + pair] = (Pair){a, a, a, b, b, b, 0, 0};
        }
    }
    return table;
}

// Makes a row of `side` pixels.
void weigh_pixels(const uint8_t *row, const int32_t *first, const Pair *table, int32_t pairs,
                  int32_t side, uint8_t *out) {
    for (int32_t x = 0; x < side; x++) {
        Pair total = {};
        for (int32_t pair = 0; pair < pairs; pair++) {
            Bytes levels;
            memcpy(&levels, row + first[x] + 6 * pair, sizeof levels);
            total += __builtin_convertvector(levels, Pair) * table[x * pairs + pair];
        }
        for (int channel = 0; channel < 3; channel++)
            out[3 * x + channel] = (total[channel] + total[3 + channel] + HALF) >> PRECISION;
    }
}

// Makes `count` bytes of rows that lie `pitch` apart.
void weigh_rows(const uint8_t *rows, int64_t pitch, const Axis &axis, int32_t y, int64_t count,
                int32_t *sums, uint8_t *out) {
    for (int64_t i = 0; i < count; i++) sums[i] = HALF;
    for (int32_t k = 0; k < axis.taps; k++) {
        const int32_t weight = axis.weights[k * axis.side + y];
        const uint8_t *row = rows + k * pitch;
        for (int64_t i = 0; i < count; i++) sums[i] += weight * row[i];
    }
    for (int64_t i = 0; i < count; i++) out[i] = sums[i] >> PRECISION;
}

// Makes a crop, whatever its size, on any processor.
void crop_plainly(const Source &source, const Axis &x, const Axis &y, bool flip, bool columns_first,
                  uint8_t *out) {
    static thread_local Room table_room, first_room, line_room, sums_room, rows_room;
    const int32_t side = x.side, pairs = (x.taps + 1) / 2;
    const int64_t length = 3LL * side, from = 3LL * x.begin[0], count = 3LL * x.end() - from;
    int32_t *first = first_room.of<int32_t>(side);
    int32_t *sums = sums_room.of<int32_t>(count > length ? count : length);
    uint8_t *line = line_room.bytes(3LL * x.end() + sizeof(Bytes));
    Pair *table = spread(x, flip, first, table_room.of<Pair>((int64_t)side * pairs));
    if (columns_first) {
        for (int32_t i = 0; i < side; i++) {
            const uint8_t *rows = source.first + y.begin[i] * source.pitch + from;
            weigh_rows(rows, source.pitch, y, i, count, sums, line + from);
            weigh_pixels(line, first, table, pairs, side, out + i * length);
        }
        return;
    }
    const int32_t above = y.begin[0];
    uint8_t *rows = rows_room.bytes((y.end() - above) * length);
    for (int32_t i = above; i < y.end(); i++) {
        const uint8_t *row = source.row(i, 3LL * x.end(), 3LL * x.end() + AHEAD, line);
        weigh_pixels(row, first, table, pairs, side, rows + (i - above) * length);
    }
    for (int32_t i = 0; i < side; i++) {
        const uint8_t *begin = rows + (y.begin[i] - above) * length;
        weigh_rows(begin, length, y, i, length, sums, out + i * length);
    }
}

}  // namespace

void crop(const Image &image, const int32_t *box, bool flip, const int32_t *resized,
          const int32_t *corner, int32_t side, uint8_t *out) {
    static thread_local Room x_room, y_room;
    const int64_t top = box[0] - image.top, left = box[1] - image.left, tall = box[2], wide = box[3];
    const Axis x = weigh(box[3], resized[1], corner[1], side, x_room);
    const Axis y = weigh(box[2], resized[0], corner[0], side, y_room);
    const Source source = {image.pixels + top * image.pitch + 3 * left, image.pitch, image.end};
    // Pillow 13's rule; before, never
    const bool columns_first = tall > resized[0] && tall - resized[0] > 2 * (wide - resized[1]);
#if defined(HAS_LANES)
    if (crop_by_lanes(source, x, y, flip, columns_first, out)) return;
#endif
    crop_plainly(source, x, y, flip, columns_first, out);
}

}  // namespace fastsiam
