// The weights by which PIL's bilinear filter makes the pixels of one axis.
#pragma once

#include <math.h>

#include "job.h"

namespace fastsiam {

constexpr int32_t PRECISION = 22;  // bits of a weight's fraction, as in PIL
constexpr int32_t HALF = 1 << (PRECISION - 1);

// For each pixel of the result: the pixels of the source that it is made of.
struct Axis {
    int32_t side;            // pixels of the result
    int32_t taps;            // weights of each
    const int32_t *begin;    // (side,) the first pixel that is weighed; rises
    const int32_t *weights;  // (taps, side) in 2**-22ths

    int32_t end() const { return begin[side - 1] + taps; }
};

namespace {

// Makes the weights for `side` of the `resized` pixels that become of `length`, from `corner` on.
//
// Pixels that would lie before the first or behind the last get weights of 0. Every sum and product
// is rounded as PIL rounds it, so their order must stay; it is side by side that pixels are made.
Axis weigh(int32_t length, int32_t resized, int32_t corner, int32_t side, Room &room) {
    const double scale = (double)length / resized, support = scale > 1.0 ? scale : 1.0;
    const double narrow = 1 / support, wanted = ceil(2 * support);
    const int32_t taps = wanted < length ? (int32_t)wanted : length, last = length - taps;
    double *centre = room.of<double>(side * (3LL + 2 * taps)), *total = centre + side;
    double *heights = total + side;  // of the triangle: (taps, side)
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

}  // namespace

}  // namespace fastsiam
