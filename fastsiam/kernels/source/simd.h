// Vectors of floats that fill a register, and conversions between them and bytes.
//
// Arithmetic uses the vector extensions of GCC and Clang. Intrinsics for each kind of CPU are used
// only where these compilers generate poor code.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__SSSE3__)
#include <immintrin.h>
#endif

namespace fastsiam {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Float __attribute__((vector_size(4 * LANES)));
typedef int32_t Int __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));  // one per lane

template <typename Vector> static inline Vector load_vector(const void *from) {
    Vector x;
    memcpy(&x, from, sizeof x);
    return x;
}
template <typename Vector> static inline void store_vector(void *to, const Vector &x) {
    memcpy(to, &x, sizeof x);
}
static inline Float all(float x) { return x - Float{}; }
static inline Float where(Int yes, Float x) { return (Float)(yes & (Int)x); }  // else 0
static inline Float to_float(Int x) { return __builtin_convertvector(x, Float); }
// Rounds toward zero.
static inline Int to_int(Float x) { return __builtin_convertvector(x, Int); }
static inline Float truncated(Float x) { return to_float(to_int(x)); }

// a * b + c, rounded only once if the CPU has FMA.
#if defined(__AVX512F__)
static inline Float fused(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__FMA__)
static inline Float fused(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
#else
static inline Float fused(Float a, Float b, Float c) { return a * b + c; }
#endif

// 1 / x for x >= 1, accurate to at least 22 bits.
static inline Float reciprocal(Float x) {
#if defined(__AVX512F__)
    const Float rough = _mm512_rcp14_ps(x);
#elif defined(__AVX2__)
    const Float rough = _mm256_rcp_ps(x);
#else
    return 1 / x;
#endif
#if defined(__AVX2__)
    return rough * fused(-x, rough, all(2));
#endif
}

// Four vectors of floats, whose levels fill a register as bytes.
struct Four {
    Float part[4];
};
constexpr int PIXELS_AT_ONCE = 4 * LANES;

// Converts integers to a register of floats. GCC generates poor code for this conversion.
#if defined(__AVX512F__)
static inline Float load_levels(const uint8_t *from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from)));
}
static inline Float load_levels(const int16_t *from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)from)));
}
#elif defined(__AVX2__)
static inline Float load_levels(const uint8_t *from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from)));
}
static inline Float load_levels(const int16_t *from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)from)));
}
#else
template <typename Level> static inline Float load_levels(const Level *from) {
    typedef Level Levels __attribute__((vector_size(LANES * sizeof(Level))));
    return to_float(__builtin_convertvector(load_vector<Levels>(from), Int));
}
#endif

static inline Four load(const uint8_t *from) {
    Four x;
    for (int i = 0; i < 4; i++) x.part[i] = load_levels(from + LANES * i);
    return x;
}

// Packs four vectors into the bytes of one, clipped to 0-255. The order of the bytes depends on the
// CPU's pack instructions; `straighten` restores the order of the vectors.
#if defined(__AVX512BW__)
static inline Bits pack(const Bits *x) {
    return (Bits)_mm512_packus_epi16(_mm512_packs_epi32((__m512i)x[0], (__m512i)x[1]),
                                     _mm512_packs_epi32((__m512i)x[2], (__m512i)x[3]));
}
static inline Bits straighten(Bits packed) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return (Bits)_mm512_permutexvar_epi32(order, (__m512i)packed);
}
#elif defined(__AVX2__)
static inline Bits pack(const Bits *x) {
    return (Bits)_mm256_packus_epi16(_mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]),
                                     _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]));
}
static inline Bits straighten(Bits packed) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return (Bits)_mm256_permutevar8x32_epi32((__m256i)packed, order);
}
#endif

// Truncates, clips to 0-255 and stores.
static inline void store(uint8_t *to, const Four &x) {
#if defined(__AVX2__)
    Bits levels[4];
    for (int i = 0; i < 4; i++) levels[i] = (Bits)to_int(x.part[i]);
    store_vector(to, straighten(pack(levels)));
#else
    for (int i = 0; i < 4; i++) {
        const Float low = x.part[i] < all(255) ? x.part[i] : all(255);
        const Float clipped = low > all(0) ? low : all(0);
        store_vector(to + LANES * i, __builtin_convertvector(to_int(clipped), Bytes));
    }
#endif
}

}  // namespace fastsiam
