// YCbCr to RGB, many pixels at once, to the last bit as libjpeg's fixed point (jdcolor.c) does.
//
// With b and r the distances of Cb and Cr from 128:
//     red = y + (91881 * r + 2^15) >> 16              = y + (22971 * 2r + 2^14) >> 15
//     green = y + (-22554 * b - 46802 * r + 2^15) >> 16
//     blue = y + (116130 * b + 2^15) >> 16            = y + (29033 * 2b + 2^14) >> 15
// The second forms, which processors have an instruction for, are equal for all 256 values.
#pragma once

#include "vector.h"

namespace fastsiam {
namespace {

#ifdef VECTOR

constexpr int32_t AT_ONCE = sizeof(Vector);

// Writes the colours of AT_ONCE pixels. Three and sixteen have no common factor: the sixteen bytes
// of one colour in a lane all go to different places 3 * i modulo 16, so that one shuffle serves
// the three vectors that are made of it.
inline void interleave(Vector red, Vector green, Vector blue, uint8_t *rgb) {
    const Vector first =
        vector_of(_mm_setr_epi8(-1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1));
    const Vector second =
        vector_of(_mm_setr_epi8(0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0));
    const Vector third =
        vector_of(_mm_setr_epi8(0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0));
    const __m128i spread = _mm_setr_epi8(0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15, 10, 5);
    red = VECTOR(shuffle_epi8)(red, vector_of(spread));
    green = VECTOR(shuffle_epi8)(green, vector_of(_mm_alignr_epi8(spread, spread, 15)));
    blue = VECTOR(shuffle_epi8)(blue, vector_of(_mm_alignr_epi8(spread, spread, 14)));
    const Vector out[3] = {(red & first) | (green & second) | (blue & third),
                           (red & third) | (green & first) | (blue & second),
                           (red & second) | (green & third) | (blue & first)};
    for (int32_t i = 0; i < AT_ONCE / 16; i++)
        for (int32_t k = 0; k < 3; k++)
            _mm_storeu_si128((__m128i *)(rgb + 48 * i + 16 * k), lane(out[k], i));
}

inline void gray_to_rgb(const uint8_t *y, uint8_t *rgb) {
    const Vector gray = loaded(y);
    interleave(gray, gray, gray, rgb);
}

inline void ycc_to_rgb(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, uint8_t *rgb) {
    const Vector zero = {}, middle = VECTOR(set1_epi16)(128), half = VECTOR(set1_epi32)(1 << 15);
    const Vector of_red = VECTOR(set1_epi16)(22971), of_blue = VECTOR(set1_epi16)(29033);
    // 46802 does not fit 16 bits: 65536 of it are subtracted as r, what is left added.
    const Vector of_green = VECTOR(set1_epi32)((65536 - 46802) << 16 | (-22554 & 0xffff));
    const Vector luma = loaded(y), both[2] = {loaded(cb), loaded(cr)};
    Vector red[2], green[2], blue[2];
    for (int upper = 0; upper < 2; upper++) {
        const auto wide = [&](Vector bytes) {
            return upper ? VECTOR(unpackhi_epi8)(bytes, zero) : VECTOR(unpacklo_epi8)(bytes, zero);
        };
        const Vector light = wide(luma);
        const Vector b = VECTOR(sub_epi16)(wide(both[0]), middle);
        const Vector r = VECTOR(sub_epi16)(wide(both[1]), middle);
        const auto fourth = [&](Vector pairs) {
            return VECTOR(srai_epi32)(VECTOR(add_epi32)(VECTOR(madd_epi16)(pairs, of_green), half),
                                      16);
        };
        const Vector sum = VECTOR(packs_epi32)(fourth(VECTOR(unpacklo_epi16)(b, r)),
                                               fourth(VECTOR(unpackhi_epi16)(b, r)));
        red[upper] =
            VECTOR(add_epi16)(light, VECTOR(mulhrs_epi16)(VECTOR(add_epi16)(r, r), of_red));
        green[upper] = VECTOR(add_epi16)(VECTOR(sub_epi16)(light, r), sum);
        blue[upper] =
            VECTOR(add_epi16)(light, VECTOR(mulhrs_epi16)(VECTOR(add_epi16)(b, b), of_blue));
    }
    interleave(VECTOR(packus_epi16)(red[0], red[1]), VECTOR(packus_epi16)(green[0], green[1]),
               VECTOR(packus_epi16)(blue[0], blue[1]), rgb);
}

#else

constexpr int32_t AT_ONCE = 32;

inline void gray_to_rgb(const uint8_t *y, uint8_t *rgb) {
    for (int32_t i = 0; i < AT_ONCE; i++) rgb[3 * i] = rgb[3 * i + 1] = rgb[3 * i + 2] = y[i];
}

inline uint8_t clamped(int32_t value) { return value < 0 ? 0 : value > 255 ? 255 : value; }

inline void ycc_to_rgb(const uint8_t *y, const uint8_t *cb, const uint8_t *cr,
                       uint8_t *__restrict rgb) {
    for (int32_t i = 0; i < AT_ONCE; i++) {
        const int32_t b = cb[i] - 128, r = cr[i] - 128;
        rgb[3 * i] = clamped(y[i] + ((91881 * r + 32768) >> 16));
        rgb[3 * i + 1] = clamped(y[i] + ((-22554 * b - 46802 * r + 32768) >> 16));
        rgb[3 * i + 2] = clamped(y[i] + ((116130 * b + 32768) >> 16));
    }
}

#endif

}  // namespace
}  // namespace fastsiam
