// Crops that are identical to PIL's: a triangle filter, widened for downscaling, is applied along
// one axis and then along the other. Levels are rounded to integers after each.

#include "rows.h"

#include <math.h>

namespace fastsiam {

namespace {

// Computes weights that resize `length` pixels to `resized`, for `side` of these from `corner` on.
//
// Output pixels outside of the resized ones get weights of 0. Every sum and product is rounded like
// PIL's, so their order must not change; the inner loops run across pixels instead.
Axis weigh(int32_t length, int32_t resized, int32_t corner, int32_t side, Room &room) {
    const double scale = (double)length / resized, support = scale > 1.0 ? scale : 1.0;
    const double narrow = 1 / support, wanted = ceil(2 * support);
    const int32_t taps = wanted < length ? (int32_t)wanted : length, last = length - taps;
    double *centre = room.of<double>(side * (3LL + 2 * taps)), *total = centre + side;
    double *heights = total + side;  // heights of the triangle: (taps, side)
    int32_t *begin = (int32_t *)(heights + (int64_t)taps * side), *weights = begin + side;
    for (int32_t x = 0; x < side; x++) {
        centre[x] = (x + corner + 0.5) * scale;
        int32_t first = (int32_t)(centre[x] - support + 0.5);
        first = first > 0 ? first : 0;
        begin[x] = first < last ? first : last;
        total[x] = 0;
    }
    for (int32_t k = 0; k < taps; k++) {
        double *height = heights + (int64_t)k * side;
        for (int32_t x = 0; x < side; x++) {
            const double at = 1.0 - fabs(((double)(begin[x] + k) - centre[x] + 0.5) * narrow);
            height[x] = at > 0.0 ? at : 0.0;
            total[x] += height[x];
        }
    }
    for (int32_t x = 0; x < side; x++) total[x] = total[x] > 0 ? total[x] : 1;  // far outside
    for (int32_t k = 0; k < taps; k++) {
        const double *height = heights + (int64_t)k * side;
        for (int32_t x = 0; x < side; x++) {
            const int32_t weight = (int32_t)(height[x] / total[x] * (1 << PRECISION) + 0.5);
            const int32_t place = x + corner;
            weights[(int64_t)k * side + x] = weight & -((place >= 0) & (place < resized));
        }
    }
    return {side, taps, begin, weights};
}

// Resizes a row along x.
void weigh_pixels(const uint8_t *row, const Axis &axis, bool flip, uint8_t *out) {
    for (int32_t x = 0; x < axis.side; x++) {
        const uint8_t *pixel = row + 3LL * axis.begin[x];
        const int32_t *weight = axis.weights + x;
        int32_t red = HALF, green = HALF, blue = HALF;
        for (int32_t k = 0; k < axis.taps; k++, pixel += 3, weight += axis.side) {
            red += *weight * pixel[0];
            green += *weight * pixel[1];
            blue += *weight * pixel[2];
        }
        uint8_t *target = out + 3LL * (flip ? axis.side - 1 - x : x);
        target[0] = red >> PRECISION, target[1] = green >> PRECISION, target[2] = blue >> PRECISION;
    }
}

// Computes `count` bytes of output row y from rows that are `pitch` bytes apart.
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

// Makes a crop of any size, on any processor.
void crop_plainly(const Source &source, const Axis &x, const Axis &y, bool flip, bool columns_first,
                  uint8_t *out) {
    static thread_local Room line_room, sums_room, rows_room;
    const int64_t length = 3LL * x.side, from = 3LL * x.begin[0], count = 3LL * x.end() - from;
    int32_t *sums = sums_room.of<int32_t>(count > length ? count : length);
    if (columns_first) {
        uint8_t *line = line_room.bytes(3LL * x.end());
        for (int32_t i = 0; i < y.side; i++) {
            const uint8_t *rows = source.first + y.begin[i] * source.pitch + from;
            weigh_rows(rows, source.pitch, y, i, count, sums, line + from);
            weigh_pixels(line, x, flip, out + i * length);
        }
        return;
    }
    const int32_t above = y.begin[0];
    uint8_t *rows = rows_room.bytes((y.end() - above) * length);
    for (int32_t i = above; i < y.end(); i++)
        weigh_pixels(source.first + i * source.pitch, x, flip, rows + (i - above) * length);
    for (int32_t i = 0; i < y.side; i++) {
        const uint8_t *begin = rows + (y.begin[i] - above) * length;
        weigh_rows(begin, length, y, i, length, sums, out + i * length);
    }
}

}  // namespace

void crop(const Image &image, const int32_t *box, bool flip, const int32_t *resized,
          const int32_t *corner, int32_t side, uint8_t *out) {
    static thread_local Room x_room, y_room;
    const int64_t top = box[0] - image.top, left = box[1] - image.left;
    const int64_t tall = box[2], wide = box[3];
    const Axis x = weigh(box[3], resized[1], corner[1], side, x_room);
    const Axis y = weigh(box[2], resized[0], corner[0], side, y_room);
    const Source source = {image.pixels + top * image.pitch + 3 * left, image.pitch, image.end};
    // The rule of Pillow 13; earlier versions always resize along x first.
    const bool columns_first = tall > resized[0] && tall - resized[0] > 2 * (wide - resized[1]);
#if defined(HAS_LANES)
    if (crop_by_lanes(source, x, y, flip, columns_first, out)) return;
#endif
    crop_plainly(source, x, y, flip, columns_first, out);
}

}  // namespace fastsiam
