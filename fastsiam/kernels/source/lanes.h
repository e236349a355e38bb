// What resampling needs of a processor that HAS_LANES of 32 bits: sums of levels times weights.
//
// A lane holds the levels of TAPS pixels side by side, and weights in as many PIECES as it takes to
// write 23 bits in the processor's products: sum = (piece 0 << BITS) + piece 1 and so on.
#pragma once

#include "simd.h"

namespace fastsiam {

constexpr int32_t PRECISION = 22;  // bits of a weight's fraction, as in PIL
constexpr int32_t HALF = 1 << (PRECISION - 1);

#if defined(__AVX2__)
#define HAS_LANES 1
namespace {

inline __m128i add_halves(__m256i x) {
    return _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}

#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)

// Four taps of 8 bits, weights of three pieces of 8 bits.
constexpr int TAPS = 4, PIECES = 3;
constexpr int WINDOW = 64, SHARERS = 16;  // bytes from which so many lanes are picked

// Returns a lane's index: where each of its taps is in the window.
inline uint32_t lane_index(int32_t first) { return first * 0x01010101u + 0x09060300u; }
inline Bits pick(const uint8_t *row, const int32_t *window, Bits index) {
    return (Bits)_mm512_permutexvar_epi8((__m512i)index, _mm512_loadu_si512(row + *window));
}
inline Bits add_products(Bits sum, Bits levels, Bits weights) {
    return (Bits)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)levels, (__m512i)weights);
}
// Adds up the groups of four lanes.
inline __m128i add_quads(Bits sums) {
    const __m512i x = (__m512i)sums;
    return add_halves(
        _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1)));
}
// Appends the level of a sum to the taps of each lane, of which the first is lost.
inline Bits append(Bits taps, Bits sum) { return taps >> 8 | sum >> PRECISION << 24; }
// Spreads the bytes of TAPS rows over four vectors, in the order in which `pack` joins them.
inline void spread(const uint8_t *const *rows, int64_t at, Bits *out) {
    const __m512i a = _mm512_loadu_si512(rows[0] + at), b = _mm512_loadu_si512(rows[1] + at);
    const __m512i c = _mm512_loadu_si512(rows[2] + at), d = _mm512_loadu_si512(rows[3] + at);
    const __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
    const __m512i AB = _mm512_unpackhi_epi8(a, b), CD = _mm512_unpackhi_epi8(c, d);
    out[0] = (Bits)_mm512_unpacklo_epi16(ab, cd), out[1] = (Bits)_mm512_unpackhi_epi16(ab, cd);
    out[2] = (Bits)_mm512_unpacklo_epi16(AB, CD), out[3] = (Bits)_mm512_unpackhi_epi16(AB, CD);
}

#else

// Two taps of 16 bits, weights of two pieces of 16 bits.
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

constexpr int BITS = 32 / TAPS;  // of a tap, and of a piece

}  // namespace
#endif

}  // namespace fastsiam
