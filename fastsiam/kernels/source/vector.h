// Vectors of bytes as x86 has them: one source for 16 (SSSE3) and 32 bytes (AVX2).
//
// Without them VECTOR is not defined, and plain loops do the same. 64 bytes (AVX-512BW) were no
// faster where this is used.
#pragma once

#include <stdint.h>

#if defined(__SSSE3__)
#include <immintrin.h>

namespace fastsiam {
namespace {

#if defined(__AVX2__)
using Vector = __m256i;
#define VECTOR(name) _mm256_##name
inline Vector vector_of(__m128i lane) { return _mm256_broadcastsi128_si256(lane); }
inline __m128i lane(Vector of, int32_t i) {
    return i ? _mm256_extracti128_si256(of, 1) : _mm256_castsi256_si128(of);
}
#else
using Vector = __m128i;
#define VECTOR(name) _mm_##name
inline Vector vector_of(__m128i lane) { return lane; }
inline __m128i lane(Vector of, int32_t) { return of; }
#endif
inline Vector loaded(const uint8_t *at) {
    Vector made;
    __builtin_memcpy(&made, at, sizeof made);
    return made;
}

inline void stored(uint8_t *at, Vector bytes) { __builtin_memcpy(at, &bytes, sizeof bytes); }

// Stores what came of the lower and of the upper halves of lanes, in order.
inline void put_together(uint8_t *at, Vector lower, Vector upper) {
#if defined(__AVX2__)
    stored(at, _mm256_permute2x128_si256(lower, upper, 0x20));
    stored(at + sizeof(Vector), _mm256_permute2x128_si256(lower, upper, 0x31));
#else
    stored(at, lower);
    stored(at + sizeof(Vector), upper);
#endif
}

}  // namespace
}  // namespace fastsiam
#endif
