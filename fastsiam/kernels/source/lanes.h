// Vectors of 32-bit lanes, each of which sums levels times weights: what the resampling needs of a
// processor. `Lanes` is the widest kind this library is compiled for, if HAS_LANES is defined.
//
// A lane holds the levels of TAPS pixels side by side, and weights in as many PIECES as it takes to
// write 23 bits in the processor's products: sum = (piece 0 << BITS) + piece 1 and so on.
#pragma once

#include "weights.h"

#if defined(__AVX2__)
#include <immintrin.h>
#define HAS_LANES 1

namespace fastsiam {

namespace {

#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)

// Four taps of 8 bits, weights of three pieces of 8 bits.
struct Lanes {
    using Vector = __m512i;
    static constexpr int COUNT = 16, TAPS = 4, PIECES = 3, BITS = 8;
    static constexpr int WINDOW = 64, SHARERS = 16;  // bytes from which so many lanes are picked

    static Vector load(const void *from) { return _mm512_loadu_si512(from); }
    static void store(void *to, Vector vector) { _mm512_storeu_si512(to, vector); }
    static Vector all(int32_t value) { return _mm512_set1_epi32(value); }
    // A lane of the index says where each of its taps is in the window.
    static uint32_t index(int32_t first) { return first * 0x01010101u + 0x09060300u; }
    static Vector pick(const uint8_t *row, const int32_t *window, Vector index) {
        return _mm512_permutexvar_epi8(index, load(row + *window));
    }
    static Vector add(Vector a, Vector b) { return _mm512_add_epi32(a, b); }
    // Adds up the groups of four lanes, and stores four sums.
    static void store_added(int32_t *to, Vector sums) {
        const __m256i two = _mm256_add_epi32(_mm512_castsi512_si256(sums),
                                             _mm512_extracti64x4_epi64(sums, 1));
        const __m128i one = _mm_add_epi32(_mm256_castsi256_si128(two),
                                          _mm256_extracti128_si256(two, 1));
        _mm_storeu_si128((__m128i *)to, one);
    }
    static Vector add_products(Vector sum, Vector levels, Vector weights) {
        return _mm512_dpbusd_epi32(sum, levels, weights);
    }
    static Vector up(Vector sum) { return _mm512_slli_epi32(sum, BITS); }
    static Vector level(Vector sum) { return _mm512_srli_epi32(sum, PRECISION); }
    // Appends the level of a sum to the taps of each lane, of which the first is lost.
    static Vector append(Vector taps, Vector sum) {
        return _mm512_or_si512(_mm512_srli_epi32(taps, 8), _mm512_slli_epi32(level(sum), 24));
    }
    // Spreads the bytes of TAPS rows over four vectors, in the order in which `pack` joins them.
    static void spread(const uint8_t *const *rows, int64_t at, Vector *out) {
        const Vector a = load(rows[0] + at), b = load(rows[1] + at);
        const Vector c = load(rows[2] + at), d = load(rows[3] + at);
        const Vector ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
        const Vector AB = _mm512_unpackhi_epi8(a, b), CD = _mm512_unpackhi_epi8(c, d);
        out[0] = _mm512_unpacklo_epi16(ab, cd), out[1] = _mm512_unpackhi_epi16(ab, cd);
        out[2] = _mm512_unpacklo_epi16(AB, CD), out[3] = _mm512_unpackhi_epi16(AB, CD);
    }
    static Vector pack(const Vector *four) {
        return _mm512_packus_epi16(_mm512_packus_epi32(four[0], four[1]),
                                   _mm512_packus_epi32(four[2], four[3]));
    }
    // Puts what was packed into the order of the four vectors, one after the other.
    static Vector straighten(Vector packed) {
        const Vector order =
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        return _mm512_permutexvar_epi32(order, packed);
    }
};

#else

// Two taps of 16 bits, weights of two pieces of 16 bits.
struct Lanes {
    using Vector = __m256i;
    static constexpr int COUNT = 8, TAPS = 2, PIECES = 2, BITS = 16;
    static constexpr int WINDOW = 16, SHARERS = 4;

    static Vector load(const void *from) { return _mm256_loadu_si256((const Vector *)from); }
    static void store(void *to, Vector vector) { _mm256_storeu_si256((Vector *)to, vector); }
    static Vector all(int32_t value) { return _mm256_set1_epi32(value); }
    static uint32_t index(int32_t first) { return first * 0x00010001u + 0x80038000u; }
    static Vector pick(const uint8_t *row, const int32_t *window, Vector index) {
        const __m128i low = _mm_loadu_si128((const __m128i *)(row + window[0]));
        const __m128i high = _mm_loadu_si128((const __m128i *)(row + window[1]));
        const Vector both = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
        return _mm256_shuffle_epi8(both, index);
    }
    static Vector add(Vector a, Vector b) { return _mm256_add_epi32(a, b); }
    static void store_added(int32_t *to, Vector sums) {
        const __m128i one = _mm_add_epi32(_mm256_castsi256_si128(sums),
                                          _mm256_extracti128_si256(sums, 1));
        _mm_storeu_si128((__m128i *)to, one);
    }
    static Vector add_products(Vector sum, Vector levels, Vector weights) {
        return add(sum, _mm256_madd_epi16(levels, weights));
    }
    static Vector up(Vector sum) { return _mm256_slli_epi32(sum, BITS); }
    static Vector level(Vector sum) { return _mm256_srli_epi32(sum, PRECISION); }
    static Vector append(Vector taps, Vector sum) {
        const Vector before = _mm256_srli_epi32(taps, 16);
        return _mm256_blend_epi16(before, _mm256_srli_epi32(sum, PRECISION - 16), 0xAA);
    }
    static void spread(const uint8_t *const *rows, int64_t at, Vector *out) {
        const Vector a = load(rows[0] + at), b = load(rows[1] + at), zero = all(0);
        const Vector ab = _mm256_unpacklo_epi8(a, b), AB = _mm256_unpackhi_epi8(a, b);
        out[0] = _mm256_unpacklo_epi8(ab, zero), out[1] = _mm256_unpackhi_epi8(ab, zero);
        out[2] = _mm256_unpacklo_epi8(AB, zero), out[3] = _mm256_unpackhi_epi8(AB, zero);
    }
    static Vector pack(const Vector *four) {
        return _mm256_packus_epi16(_mm256_packus_epi32(four[0], four[1]),
                                   _mm256_packus_epi32(four[2], four[3]));
    }
    static Vector straighten(Vector packed) {
        return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    }
};

#endif

}  // namespace

}  // namespace fastsiam

#endif
