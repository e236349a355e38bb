// Conversion between interleaved pixels and planes, and from planes to normalised views.

#include "photometric.h"
#include "simd.h"

namespace fastsiam {
namespace {

constexpr int64_t BLOCK = 16;  // pixels rearranged at a time: three registers of bytes

#if defined(__SSSE3__)
// Shuffle masks between three registers, [to][from]; 128 and above selects no byte.
struct Order {
    alignas(16) uint8_t split[3][3][16], merge[3][3][16];

    constexpr Order() : split(), merge() {
        for (int to = 0; to < 3; to++)
            for (int from = 0; from < 3; from++)
                for (int i = 0; i < 16; i++) {
                    const int pixel = 3 * i + to, merged = 16 * to + i;
                    split[to][from][i] = pixel / 16 == from ? pixel % 16 : 128;
                    merge[to][from][i] = merged % 3 == from ? merged / 3 : 128;
                }
    }
};
constexpr Order ORDER;

inline void rearrange(const uint8_t (*order)[3][16], const uint8_t *const *from,
                      uint8_t *const *to) {
    __m128i x[3], y[3];
    for (int i = 0; i < 3; i++) x[i] = _mm_loadu_si128((const __m128i *)from[i]);
    for (int i = 0; i < 3; i++) {
        const __m128i *own = (const __m128i *)order[i];
        y[i] = _mm_shuffle_epi8(x[0], own[0]) | _mm_shuffle_epi8(x[1], own[1]) |
               _mm_shuffle_epi8(x[2], own[2]);
    }
    for (int i = 0; i < 3; i++) _mm_storeu_si128((__m128i *)to[i], y[i]);
}
#endif

inline void merge_block(const uint8_t *r, const uint8_t *g, const uint8_t *b, uint8_t *pixels) {
#if defined(__SSSE3__)
    const uint8_t *const from[] = {r, g, b};
    uint8_t *const to[] = {pixels, pixels + 16, pixels + 32};
    rearrange(ORDER.merge, from, to);
#else
    for (int i = 0; i < BLOCK; i++) {
        pixels[3 * i] = r[i];
        pixels[3 * i + 1] = g[i];
        pixels[3 * i + 2] = b[i];
    }
#endif
}

template <Type TYPE>
constexpr int64_t WIDE = TYPE == FLOAT32 ? 4 : 2;

// Stores a register of floats as numbers of a type; bfloat16 rounds ties to even, like float16.
//
// STREAM bypasses the caches: the views of a batch are larger than these, and memory that is only
// written need not be read first. `to` must then be aligned to the register.
template <Type TYPE, bool STREAM> inline void store_as(uint8_t *to, Float x) {
#if defined(__AVX2__)
    const Bits bits = (Bits)x, rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
#if defined(__AVX512F__)
    const __m256i half = TYPE == BFLOAT16 ? _mm512_cvtepi32_epi16((__m512i)rounded)
                                          : _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
    if (STREAM && TYPE == FLOAT32) return _mm512_stream_ps((float *)to, x);
    if (STREAM) return _mm256_stream_si256((__m256i *)to, half);
#else
    const __m256i packed = _mm256_packus_epi32((__m256i)rounded, (__m256i)rounded);
    const __m256i ordered = _mm256_permute4x64_epi64(packed, 0b1000);
    const __m128i half = TYPE == BFLOAT16 ? _mm256_castsi256_si128(ordered)
                                          : _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
    if (STREAM && TYPE == FLOAT32) return _mm256_stream_ps((float *)to, x);
    if (STREAM) return _mm_stream_si128((__m128i *)to, half);
#endif
    if (TYPE != FLOAT32) return store_vector(to, half);
#endif
    store_vector(to, x);
}

// Scale and shift of interleaved channels; the pattern repeats after three registers.
struct Constants {
    Float scale[3], shift[3];

    explicit Constants(const Finish &how) {
        for (int i = 0; i < 3 * LANES; i++) {
            scale[i / LANES][i % LANES] = how.scale[i % 3];
            shift[i / LANES][i % LANES] = how.shift[i % 3];
        }
    }
};

template <Type TYPE, bool STREAM>
void normalize_as(const Planes &from, const Finish &how, uint8_t *out) {
    const Constants by(how);
    alignas(64) uint8_t merged[3 * BLOCK], made[3 * BLOCK * WIDE<TYPE>];
    for (int64_t i = 0; i < from.count; i += BLOCK) {
        const bool whole = i + BLOCK <= from.count;
        merge_block(from.r + i, from.g + i, from.b + i, merged);
        uint8_t *to = whole ? out + 3 * i * WIDE<TYPE> : made;
        for (int k = 0; k < 3 * BLOCK / LANES; k++)
            store_as<TYPE, STREAM>(
                to + k * LANES * WIDE<TYPE>,
                load_levels(merged + k * LANES) * by.scale[k % 3] + by.shift[k % 3]);
        if (!whole) memcpy(out + 3 * i * WIDE<TYPE>, made, 3 * (from.count - i) * WIDE<TYPE>);
    }
#if defined(__AVX2__)
    if (STREAM) _mm_sfence();
#endif
}

template <Type TYPE>
void normalize_to(const Planes &from, const Finish &how, void *out, int64_t first) {
    uint8_t *to = (uint8_t *)out + 3 * first * WIDE<TYPE>;
    ((uintptr_t)to % 64 ? normalize_as<TYPE, false> : normalize_as<TYPE, true>)(from, how, to);
}

template <typename Number>
void look_up_as(const uint8_t *pixels, int64_t count, const Number *table, Number *out) {
    for (int64_t i = 0; i < 3 * count; i += 3)
        for (int channel = 0; channel < 3; channel++)
            out[i + channel] = table[3 * pixels[i + channel] + channel];
}

}  // namespace

void split(const uint8_t *pixels, const Planes &to) {
    int64_t i = 0;
#if defined(__SSSE3__)
    for (; i + BLOCK <= to.count; i += BLOCK) {
        const uint8_t *const from[] = {pixels + 3 * i, pixels + 3 * i + 16, pixels + 3 * i + 32};
        uint8_t *const planes[] = {to.r + i, to.g + i, to.b + i};
        rearrange(ORDER.split, from, planes);
    }
#endif
    for (; i < to.count; i++) {
        to.r[i] = pixels[3 * i];
        to.g[i] = pixels[3 * i + 1];
        to.b[i] = pixels[3 * i + 2];
    }
}

void normalize(const Planes &from, const Finish &how, void *out, int64_t first) {
    if (how.type == FLOAT32) normalize_to<FLOAT32>(from, how, out, first);
#if defined(__AVX2__)  // without it, library.py requests only float32
    if (how.type == BFLOAT16) normalize_to<BFLOAT16>(from, how, out, first);
    if (how.type == FLOAT16) normalize_to<FLOAT16>(from, how, out, first);
#endif
}

void look_up(const uint8_t *pixels, int64_t count, const void *table, int32_t size, void *out) {
    if (size == 2)
        look_up_as(pixels, count, (const uint16_t *)table, (uint16_t *)out);
    else if (size == 4)
        look_up_as(pixels, count, (const uint32_t *)table, (uint32_t *)out);
    else
        look_up_as(pixels, count, (const uint64_t *)table, (uint64_t *)out);
}

}  // namespace fastsiam
