// Rows of a plane to twice as many samples, to the last bit as libjpeg-turbo's "fancy" upsampling
// (jdsample.c): samples are weighed three to one with their neighbours, each step rounded its way.
//
// Loops take STEP samples at once. They read so many behind a row and one before it, and write so
// many behind what they were asked for.
#pragma once

#include <stdint.h>

#include "vector.h"

namespace fastsiam {
namespace {

constexpr int32_t STEP = 32;

inline int32_t rounded(int32_t count) { return (count + STEP - 1) / STEP * STEP; }

// Makes `count` samples between two rows, nearer to the first.
inline void between(const uint8_t *row, const uint8_t *beside, int32_t half, int32_t count,
                    uint8_t *__restrict out) {
    for (int32_t i = 0; i < rounded(count); i++)
        out[i] = (uint16_t)(3 * row[i] + beside[i] + half) >> 2;
}

template <bool down>
inline uint16_t sum(const uint8_t *row, const uint8_t *beside, int32_t i) {
    return down ? 3 * row[i] + beside[i] : row[i];
}

// Makes a sample on the left and one on the right of each of `count`; if `down`, between two rows.
// `first`, `last`: whether they begin or end at the image's edge, beyond which lies what is at it.
template <bool down>
void double_across(const uint8_t *row, const uint8_t *beside, int32_t count, bool first, bool last,
                   uint8_t *out) {
    constexpr int shift = down ? 4 : 2, before = down ? 8 : 1, behind = down ? 7 : 2;
#ifdef VECTOR
    // One instruction weighs two bytes, a sample and the one in the row beside, and adds them.
    const Vector once = VECTOR(set1_epi16)(down ? 1 << 8 | 3 : 1);
    const Vector thrice = VECTOR(set1_epi16)(down ? 3 << 8 | 9 : 3);
    const Vector half_left = VECTOR(set1_epi16)(before), half_right = VECTOR(set1_epi16)(behind);
    for (int32_t i = 0; i < count; i += (int32_t)sizeof(Vector)) {
        Vector pairs[2];
        for (int upper = 0; upper < 2; upper++) {
            const auto weighed = [&](int32_t at, Vector weights) {
                const Vector a = loaded(row + at), b = down ? loaded(beside + at) : Vector{};
                return VECTOR(maddubs_epi16)(
                    upper ? VECTOR(unpackhi_epi8)(a, b) : VECTOR(unpacklo_epi8)(a, b), weights);
            };
            const Vector own = weighed(i, thrice);
            const Vector left = VECTOR(add_epi16)(own, weighed(i - 1, once));
            const Vector right = VECTOR(add_epi16)(own, weighed(i + 1, once));
            pairs[upper] = VECTOR(srli_epi16)(VECTOR(add_epi16)(left, half_left), shift) |
                           VECTOR(slli_epi16)(
                               VECTOR(srli_epi16)(VECTOR(add_epi16)(right, half_right), shift), 8);
        }
        put_together(out + 2 * i, pairs[0], pairs[1]);
    }
#else
    uint16_t *__restrict const pairs = (uint16_t *)out;
    for (int32_t i = 0; i < rounded(count); i++) {
        const uint16_t own = 3 * sum<down>(row, beside, i);
        const uint16_t left = (uint16_t)(own + sum<down>(row, beside, i - 1) + before) >> shift;
        const uint16_t right = (uint16_t)(own + sum<down>(row, beside, i + 1) + behind) >> shift;
        pairs[i] = left | right << 8;
    }
#endif
    const int32_t end = count - 1;
    if (first) out[0] = (4 * sum<down>(row, beside, 0) + before) >> shift;
    if (last) out[2 * count - 1] = (4 * sum<down>(row, beside, end) + behind) >> shift;
}

}  // namespace
}  // namespace fastsiam
