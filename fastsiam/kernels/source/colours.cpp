// The colour operations.

#include "photometric.h"
#include "simd.h"

namespace fastsiam {
namespace {

// PIL's Image.blend, without clipping and truncation, which `store` does.
inline Float blend(Float degenerate, Float x, Float factor) {
    return degenerate + factor * (x - degenerate);
}

// PIL's luma. In units of 2**-16, sums are below 2**24, so float32 is exact.
inline Float luma(Float r, Float g, Float b) {
    const Float sum = fused(b, all(7471 / 65536.f), all(0.5f));
    return truncated(fused(r, all(19595 / 65536.f), fused(g, all(38470 / 65536.f), sum)));
}

// Replaces every level of a plane by its entry in `table`.
#if defined(__AVX512VBMI__)
struct Exchange {
    const uint8_t *table;
    static constexpr bool exact = true;

    Exchange(const uint8_t *table, float) : table(table) {}

    void run(uint8_t *plane, int64_t count) const {
        const __m512i t0 = _mm512_loadu_si512(table), t1 = _mm512_loadu_si512(table + 64);
        const __m512i t2 = _mm512_loadu_si512(table + 128), t3 = _mm512_loadu_si512(table + 192);
        for (int64_t i = 0; i < count; i += 64) {
            const __m512i x = _mm512_loadu_si512(plane + i);
            const __m512i low = _mm512_permutex2var_epi8(t0, x, t1);
            const __m512i high = _mm512_permutex2var_epi8(t2, x, t3);
            const __mmask64 upper = _mm512_movepi8_mask(x);
            _mm512_storeu_si512(plane + i, _mm512_mask_blend_epi8(upper, low, high));
        }
    }
};
#elif defined(__AVX2__)
// A linear function that gives the levels of the table, in units of 1/128 and 16 bits, if there is
// one. Sums saturate at 0 and 65,535.
struct Exchange {
    int slope = 0, offset = 0;
    bool exact = false;

    Exchange(const uint8_t *table, float factor) {
        if (!(factor >= 0 && factor < 2)) return;  // the slope must fit in 16 bits too
        for (int aside = 0; aside < 7 && !exact; aside++) {  // the nearest slope, or one next to it
            slope = (int)(factor * 32768 + 0.5f) + (aside % 2 ? aside / 2 + 1 : -aside / 2);
            int smallest = -65535, largest = 65535;
            for (int x = 0; x < 256; x++) {
                const int level = table[x], least = 128 * level - (x * slope >> 8);
                const int above = level > 0 ? least : -65535;  // clipped levels may be beyond
                const int below = level < 255 ? least + 127 : 65535;
                smallest = above > smallest ? above : smallest;
                largest = below < largest ? below : largest;
            }
            offset = smallest;
            exact = 0 <= slope && slope < 65536 && smallest <= largest;
        }
    }

    void run(uint8_t *plane, int64_t count) const {
        const __m256i by = _mm256_set1_epi16((int16_t)slope), none = _mm256_setzero_si256();
        const __m256i more = _mm256_set1_epi16((int16_t)(offset > 0 ? offset : 0));
        const __m256i less = _mm256_set1_epi16((int16_t)(offset < 0 ? -offset : 0));
        const auto changed = [&](__m256i x) {
            const __m256i sum = _mm256_adds_epu16(_mm256_mulhi_epu16(x, by), more);
            return _mm256_srli_epi16(_mm256_subs_epu16(sum, less), 7);
        };
        for (int64_t i = 0; i < count; i += 32) {
            const __m256i x = _mm256_loadu_si256((const __m256i *)(plane + i));
            const __m256i low = changed(_mm256_unpacklo_epi8(none, x));
            const __m256i high = changed(_mm256_unpackhi_epi8(none, x));
            _mm256_storeu_si256((__m256i *)(plane + i), _mm256_packus_epi16(low, high));
        }
    }
};
#endif

void blend_with(const Planes &x, float level, float factor) {
    const Float degenerate = all(level), f = all(factor);
    const auto blend_all = [=](uint8_t *plane, int64_t count) {
        for (int64_t i = 0; i < count; i += PIXELS_AT_ONCE) {
            Four levels = load(plane + i);
            for (Float &part : levels.part) part = blend(degenerate, part, f);
            store(plane + i, levels);
        }
    };
    uint8_t *const planes[] = {x.r, x.g, x.b};
#if defined(__AVX2__)
    uint8_t table[256];
    for (int i = 0; i < 256; i++) table[i] = (uint8_t)i;
    blend_all(table, 256);
    const Exchange exchange(table, factor);
    if (exchange.exact) {
        for (uint8_t *plane : planes) exchange.run(plane, x.count);
        return;
    }
#endif
    for (uint8_t *plane : planes) blend_all(plane, x.count);
}

// a / b, correctly rounded, for a constant b whose reciprocal is given.
inline Float divided(Float a, float b, float reciprocal) {
#if defined(__FMA__)
    const Float quotient = a * reciprocal, rest = fused(-quotient, all(b), a);
    return fused(rest, all(reciprocal), quotient);
#else
    (void)reciprocal;
    return a / b;
#endif
}

// Intermediate values of a block of colours, for the conversion to PIL's HSV and back.
struct Turned {
    alignas(64) uint8_t value[RUN], chroma[RUN], hue[RUN], saturation[RUN];
    alignas(64) uint8_t sextant[RUN];  // the sextant plus 1: 2, 4 or 6, or 2 less
    alignas(64) int16_t beside[RUN];
    alignas(64) uint8_t lost[3][RUN];
};

inline uint8_t greater(uint8_t a, uint8_t b) { return a > b ? a : b; }
inline uint8_t lesser(uint8_t a, uint8_t b) { return a < b ? a : b; }

// Computes the maximum level, the range (chroma) and the sextant. The position of the hue in the
// sextant is (maximum - middle level) / range; `beside` is the numerator, negated where the hue
// counts backward.
void compare(const uint8_t *r, const uint8_t *g, const uint8_t *b, Turned &x) {
    for (int64_t i = 0; i < RUN; i++) {
        const uint8_t value = greater(r[i], greater(g[i], b[i]));
        const uint8_t red = r[i] == value ? 255 : 0, green = (g[i] == value ? 255 : 0) & ~red;
        const uint8_t blue = ~(red | green);
        const uint8_t ahead = (g[i] & red) | (b[i] & green) | (r[i] & blue);
        const uint8_t behind = r[i] ^ g[i] ^ b[i] ^ value ^ ahead;  // the third channel
        const uint8_t middle = greater(ahead, behind), back = ahead == middle ? 255 : 0;
        x.value[i] = value;
        x.chroma[i] = value - lesser(r[i], lesser(g[i], b[i]));
        x.sextant[i] = ((green & 2) | (blue & 4)) + (back & 2);
        const int16_t sign = (int8_t)back;
        x.beside[i] = (int16_t)(((value - middle) ^ sign) - sign);
    }
}

// Equals PIL, which mixes float and double, for every colour. The quotients of gray and black are
// not finite; what is stored for them has no effect, because the saturation or the value is 0.
void measure(Turned &x) {
    for (int64_t i = 0; i < RUN; i += PIXELS_AT_ONCE) {
        Four hue, saturation;
        for (int k = 0; k < 4; k++) {
            const int64_t at = i + k * LANES;
            const Float chroma = load_levels(x.chroma + at), value = load_levels(x.value + at);
            const Float place = load_levels(x.beside + at) / chroma;
            const Float sextant = load_levels(x.sextant + at) - 1.f + place;
            // A negative hue is red toward blue: add a full turn, 255.
            const Float turns = divided(sextant, 6, 1 / 6.f) * 255.f;
            hue.part[k] = turns + where(turns < 0, all(255));
            saturation.part[k] = (chroma * 255.f + 0.5f) * reciprocal(value);
        }
        store(x.hue + i, hue);
        store(x.saturation + i, saturation);
    }
}

// Computes how much of its saturation each channel loses, in units of 1/85. That depends on the
// distance of the hue, in units of 1/510 turn, from where the channel is lowest (red) or highest
// (green, blue).
void lose(Turned &x, uint8_t shift) {
    for (int64_t i = 0; i < RUN; i++) {
        const uint8_t hue = x.hue[i] + shift;
        const uint8_t red = 2 * greater(hue, 255 - hue) - 255;
        const uint8_t green = lesser(greater(hue, 85) - lesser(hue, 85), 85);
        const uint8_t blue = lesser(greater(hue, 170) - lesser(hue, 170), 85);
        x.lost[0][i] = lesser(170 - lesser(red, 170), 85);
        x.lost[1][i] = greater(2 * green, 85) - 85;
        x.lost[2][i] = greater(2 * blue, 85) - 85;
    }
}

void compose(const Turned &x, uint8_t *r, uint8_t *g, uint8_t *b) {
    uint8_t *const planes[] = {r, g, b};
    for (int64_t i = 0; i < RUN; i += PIXELS_AT_ONCE) {
        Four level[3];
        for (int k = 0; k < 4; k++) {
            const int64_t at = i + k * LANES;
            const Float value = load_levels(x.value + at);
            const Float part = value * load_levels(x.saturation + at) * (-1 / (85.f * 255.f));
            for (int c = 0; c < 3; c++)
                level[c].part[k] = fused(part, load_levels(x.lost[c] + at), value + 0.5f);
        }
        for (int c = 0; c < 3; c++) store(planes[c] + i, level[c]);
    }
}

}  // namespace

void brightness(const Planes &x, float factor) { blend_with(x, 0, factor); }

void contrast(const Planes &x, float factor, float mean) { blend_with(x, mean, factor); }

void saturation(const Planes &x, float factor) {
    const Float f = all(factor);
    for (int64_t i = 0; i < x.count; i += PIXELS_AT_ONCE) {
        Four r = load(x.r + i), g = load(x.g + i), b = load(x.b + i);
        for (int k = 0; k < 4; k++) {
            const Float gray = luma(r.part[k], g.part[k], b.part[k]);
            r.part[k] = blend(gray, r.part[k], f);
            g.part[k] = blend(gray, g.part[k], f);
            b.part[k] = blend(gray, b.part[k], f);
        }
        store(x.r + i, r);
        store(x.g + i, g);
        store(x.b + i, b);
    }
}

void hue(const Planes &x, float factor) {
    const uint8_t shift = (int32_t)(factor * 255.0);  // modulo 256
    Turned turned;
    for (int64_t i = 0; i < x.count; i += RUN) {
        compare(x.r + i, x.g + i, x.b + i, turned);
        measure(turned);
        lose(turned, shift);
        compose(turned, x.r + i, x.g + i, x.b + i);
    }
}

void grayscale(const Planes &x) {
    for (int64_t i = 0; i < x.count; i += PIXELS_AT_ONCE) {
        Four r = load(x.r + i), g = load(x.g + i), b = load(x.b + i);
        for (int k = 0; k < 4; k++) r.part[k] = luma(r.part[k], g.part[k], b.part[k]);
        store(x.r + i, r);
        store(x.g + i, r);
        store(x.b + i, r);
    }
}

void solarise(uint8_t *plane, int64_t count, int threshold) {
    for (int64_t i = 0; i < count; i++)
        plane[i] = plane[i] >= threshold ? 255 - plane[i] : plane[i];
}

int64_t sum_of_luma(const Planes &x) {
    const int64_t whole = x.count / PIXELS_AT_ONCE * PIXELS_AT_ONCE;
    Int sum = {};
    for (int64_t i = 0; i < whole; i += PIXELS_AT_ONCE) {
        const Four r = load(x.r + i), g = load(x.g + i), b = load(x.b + i);
        for (int k = 0; k < 4; k++) sum += to_int(luma(r.part[k], g.part[k], b.part[k]));
    }
    int64_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += sum[lane];
    for (int64_t i = whole; i < x.count; i++)
        total += (x.r[i] * 19595 + x.g[i] * 38470 + x.b[i] * 7471 + 32768) >> 16;
    return total;
}

}  // namespace fastsiam
