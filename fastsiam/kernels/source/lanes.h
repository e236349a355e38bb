// SIMD primitives for resampling, on CPUs that HAS_LANES of 32 bits: sums of levels times weights.
//
// A lane contains the levels of TAPS neighbouring pixels. The 23 bits of a weight are split into
// PIECES that fit the CPU's multiply instruction: sum = (piece 0 << BITS) + piece 1, and so on.
#pragma once

#include "simd.h"

namespace fastsiam {

constexpr int32_t PRECISION = 22;  // fraction bits of a weight, as in PIL
constexpr int32_t HALF = 1 << (PRECISION - 1);

#if defined(__AVX2__)
#define HAS_LANES 1
namespace {

inline __m128i add_halves(__m256i x) {
    return _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}

#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)

// Four 8-bit taps per lane; weights in three 8-bit pieces.
constexpr int TAPS = 4, PIECES = 3;
constexpr int WINDOW = 64, SHARERS = 16;  // bytes of a window, and lanes that share it

// Returns a lane's shuffle index: the position of each of its taps in the window.
inline uint32_t lane_index(int32_t first) { return first * 0x01010101u + 0x09060300u; }
inline Bits pick(const uint8_t *row, const int32_t *window, Bits index) {
    return (Bits)_mm512_permutexvar_epi8((__m512i)index, _mm512_loadu_si512(row + *window));
}
inline Bits add_products(Bits sum, Bits levels, Bits weights) {
    return (Bits)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)levels, (__m512i)weights);
}
// Adds up all groups of four lanes.
inline __m128i add_quads(Bits sums) {
    const __m512i x = (__m512i)sums;
    return add_halves(
        _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1)));
}
// Appends the level of a sum to the taps of each lane, and drops the first tap.
inline Bits append(Bits taps, Bits sum) { return taps >> 8 | sum >> PRECISION << 24; }
// Interleaves the bytes of TAPS rows into four vectors, in the order that `pack` expects.
inline void spread(const uint8_t *const *rows, int64_t at, Bits *out) {
    const __m512i a = _mm512_loadu_si512(rows[0] + at), b = _mm512_loadu_si512(rows[1] + at);
    const __m512i c = _mm512_loadu_si512(rows[2] + at), d = _mm512_loadu_si512(rows[3] + at);
    const __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
    const __m512i AB = _mm512_unpackhi_epi8(a, b), CD = _mm512_unpackhi_epi8(c, d);
    out[0] = (Bits)_mm512_unpacklo_epi16(ab, cd), out[1] = (Bits)_mm512_unpackhi_epi16(ab, cd);
    out[2] = (Bits)_mm512_unpacklo_epi16(AB, CD), out[3] = (Bits)_mm512_unpackhi_epi16(AB, CD);
}

#else

// Two 16-bit taps per lane; weights in two 16-bit pieces.
constexpr int TAPS = 2, PIECES = 2;
constexpr int WINDOW = 16, SHARERS = 4;

inline uint32_t lane_index(int32_t first) { return first * 0x00010001u + 0x80038000u; }
inline Bits pick(const uint8_t *row, const int32_t *window, Bits index) {
    const __m128i low = _mm_loadu_si128((const __m128i *)(row + window[0]));
    const __m128i high = _mm_loadu_si128((const __m128i *)(row + window[1]));
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    return (Bits)_mm256_shuffle_epi8(both, (__m256i)index);
}
inline Bits add_products(Bits sum, Bits levels, Bits weights) {
    return sum + (Bits)_mm256_madd_epi16((__m256i)levels, (__m256i)weights);
}
inline __m128i add_quads(Bits sums) { return add_halves((__m256i)sums); }
inline Bits append(Bits taps, Bits sum) {
    const Bits level = sum >> (PRECISION - 16);
    return (Bits)_mm256_blend_epi16((__m256i)(taps >> 16), (__m256i)level, 0xAA);
}
inline void spread(const uint8_t *const *rows, int64_t at, Bits *out) {
    const __m256i a = load_vector<__m256i>(rows[0] + at), b = load_vector<__m256i>(rows[1] + at);
    const __m256i zero = _mm256_setzero_si256();
    const __m256i ab = _mm256_unpacklo_epi8(a, b), AB = _mm256_unpackhi_epi8(a, b);
    out[0] = (Bits)_mm256_unpacklo_epi8(ab, zero), out[1] = (Bits)_mm256_unpackhi_epi8(ab, zero);
    out[2] = (Bits)_mm256_unpacklo_epi8(AB, zero), out[3] = (Bits)_mm256_unpackhi_epi8(AB, zero);
}

#endif

constexpr int BITS = 32 / TAPS;  // bits of a tap, and of a piece

}  // namespace
#endif

}  // namespace fastsiam
