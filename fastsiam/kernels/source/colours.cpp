#include "colours.h"

#include "simd.h"

namespace fastsiam {
namespace {

// PIL's Image.blend, before it clips and truncates, which `store` does.
inline Float blend(Float degenerate, Float x, Float factor) {
    return degenerate + factor * (x - degenerate);
}

// PIL's luma: sums are below 2**24, so float32 is exact.
inline Float luma(Float r, Float g, Float b) {
    const Float sum = r * (19595 / 65536.f) + g * (38470 / 65536.f) + b * (7471 / 65536.f);
    return truncated(sum + 0.5f);
}

#if defined(__AVX512VBMI__)
// Looks 64 levels at a time up in a table of 256: per-channel operations are one each.
void look_up(uint8_t *plane, int64_t count, const uint8_t *table) {
    const __m512i t0 = _mm512_loadu_si512(table), t1 = _mm512_loadu_si512(table + 64);
    const __m512i t2 = _mm512_loadu_si512(table + 128), t3 = _mm512_loadu_si512(table + 192);
    for (int64_t i = 0; i < count; i += 64) {
        const __m512i x = _mm512_loadu_si512(plane + i);
        const __m512i low = _mm512_permutex2var_epi8(t0, x, t1);
        const __m512i high = _mm512_permutex2var_epi8(t2, x, t3);
        _mm512_storeu_si512(plane + i, _mm512_mask_blend_epi8(_mm512_movepi8_mask(x), low, high));
    }
}
#endif

void blend_with(const Planes &x, float level, float factor) {
    const Float degenerate = all(level), f = all(factor);
    uint8_t *const planes[] = {x.r, x.g, x.b};
#if defined(__AVX512VBMI__)
    uint8_t table[256];
    for (int i = 0; i < 256; i++) table[i] = (uint8_t)i;
    for (int i = 0; i < 256; i += PIXELS_AT_ONCE) {
        Four levels = load(table + i);
        for (Float &part : levels.part) part = blend(degenerate, part, f);
        store(table + i, levels);
    }
    for (uint8_t *plane : planes) look_up(plane, x.count, table);
#else
    for (uint8_t *plane : planes) {
        for (int64_t i = 0; i < x.count; i += PIXELS_AT_ONCE) {
            Four levels = load(plane + i);
            for (Float &part : levels.part) part = blend(degenerate, part, f);
            store(plane + i, levels);
        }
    }
#endif
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

// A block of colours on their way to PIL's HSV and back.
struct Turned {
    alignas(64) uint8_t value[RUN], chroma[RUN], hue[RUN], saturation[RUN];
    alignas(64) int8_t sextant[RUN];  // 1, 3 or 5, or 2 less
    alignas(64) int16_t beside[RUN];
    alignas(64) uint8_t lost[3][RUN];
};

inline uint8_t greater(uint8_t a, uint8_t b) { return a > b ? a : b; }
inline uint8_t lesser(uint8_t a, uint8_t b) { return a < b ? a : b; }

// Tells the greatest level, the range and the sextant. The hue's place in the sextant is what the
// middle level lacks of the greatest as a part of the range: `beside`, below 0 where it counts
// backward.
void compare(const uint8_t *r, const uint8_t *g, const uint8_t *b, Turned &x) {
    for (int64_t i = 0; i < RUN; i++) {
        const uint8_t value = greater(r[i], greater(g[i], b[i]));
        const uint8_t red = r[i] == value ? 255 : 0, green = (g[i] == value ? 255 : 0) & ~red;
        const uint8_t blue = ~(red | green);
        const uint8_t ahead = (g[i] & red) | (b[i] & green) | (r[i] & blue);
        const uint8_t behind = r[i] ^ g[i] ^ b[i] ^ value ^ ahead;  // the one that is left
        const uint8_t middle = greater(ahead, behind), back = ahead == middle ? 255 : 0;
        x.value[i] = value;
        x.chroma[i] = value - lesser(r[i], lesser(g[i], b[i]));
        x.sextant[i] = (int8_t)((red | (green & 1) | (blue & 3)) + (back & 2));
        const int16_t sign = (int8_t)back;
        x.beside[i] = (int16_t)(((value - middle) ^ sign) - sign);
    }
}

// Rounds as PIL does, in float and double by turns: equal for every colour.
void measure(Turned &x) {
    for (int64_t i = 0; i < RUN; i += PIXELS_AT_ONCE) {
        Four hue, saturation;
        for (int k = 0; k < 4; k++) {
            const int64_t at = i + k * LANES;
            const Float chroma = load_levels(x.chroma + at), value = load_levels(x.value + at);
            const Float place = load_signed(x.beside + at) / chroma;
            const Float sextant = load_signed(x.sextant + at) + place;
            // Below 0 it is red on blue's side: a turn, 255, is added.
            const Float turns = divided(sextant, 6, 1 / 6.f) * 255.f;
            hue.part[k] = turns + where(turns < 0, all(255));
            saturation.part[k] = (chroma * 255.f + 0.5f) * reciprocal(value);
        }
        store(x.hue + i, hue);
        store(x.saturation + i, saturation);
    }
}

// Tells how much of its saturation each channel loses: in 85ths, by the hue's distance, in 510ths of
// a turn, from where the channel is the least (red) or the greatest (green, blue).
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
    int64_t total = 0;
    for (int64_t first = 0; first < whole; first += 1 << 20) {  // a lane's sum stays below 2**31
        const int64_t last = first + (1 << 20) < whole ? first + (1 << 20) : whole;
        Int sum = {};
        for (int64_t i = first; i < last; i += PIXELS_AT_ONCE) {
            const Four r = load(x.r + i), g = load(x.g + i), b = load(x.b + i);
            for (int k = 0; k < 4; k++) sum += to_int(luma(r.part[k], g.part[k], b.part[k]));
        }
        for (int lane = 0; lane < LANES; lane++) total += sum[lane];
    }
    for (int64_t i = whole; i < x.count; i++)
        total += (x.r[i] * 19595 + x.g[i] * 38470 + x.b[i] * 7471 + 32768) >> 16;
    return total;
}

}  // namespace fastsiam
