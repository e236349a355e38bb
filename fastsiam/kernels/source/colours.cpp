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

// How far a channel is from its full value: 0 to 85, by its distance on the circle, in 510ths of a
// turn, from where it is the least of the three (red) or the greatest (green, blue).
inline Float within(Float x) { return least(most(x, all(0)), all(85)); }

// Turns the hue. The roundings are those of PIL's way to HSV, a mixture of float and double, and
// back: equal for every colour.
inline void turn(Float &r, Float &g, Float &b, Int shift) {
    const Float value = most(r, most(g, b)), chroma = value - least(r, least(g, b));
    const Int of_red = r == value, of_green = (g == value) & ~of_red,
              of_blue = ~(of_red | of_green);
    // PIL weighs, of the two other channels, how far each is from the greatest: of one of them that
    // is the chroma, and for the other one a rounded quotient is left.
    const Float ahead = where(of_red, g - b) + where(of_green, b - r) + where(of_blue, r - g);
    const Float quotient = (chroma - size(ahead)) / most(chroma, all(1));
    const Int sign = (Int)ahead & INT32_MIN;
    const Float base = where(of_green, all(2)) + where(of_blue, all(4));
    const Float sextant = base + (Float)((Int)all(1) | sign) - (Float)((Int)quotient ^ sign);
    // Below 0 it is red on blue's side: a turn, 255, is added there to what is rounded down.
    const Float turns = divided(sextant, 6, 1 / 6.f) * 255.f;
    const Int below = turns < 0;
    const Int hue = to_int(turns + where(below, all(256))) + below + shift;
    const Float place = to_float((hue & 255) << 1);  // a sextant has 85
    const Float saturation = truncated(chroma / most(value, all(1)) * 255.f);
    const Float full = value * (85.f * 255.f), lost = value * saturation;  // whole, below 2**24
    r = full - lost * within(170.f - size(place - 255.f));
    g = full - lost * within(size(place - 170.f) - 85.f);
    b = full - lost * within(size(place - 340.f) - 85.f);
    r = r * (1 / (85.f * 255.f)) + 0.5f;  // storing truncates
    g = g * (1 / (85.f * 255.f)) + 0.5f;
    b = b * (1 / (85.f * 255.f)) + 0.5f;
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
    const Int shift = Int{} + (int32_t)(factor * 255.0);
    for (int64_t i = 0; i < x.count; i += PIXELS_AT_ONCE) {
        Four r = load(x.r + i), g = load(x.g + i), b = load(x.b + i);
        for (int k = 0; k < 4; k++) turn(r.part[k], g.part[k], b.part[k], shift);
        store(x.r + i, r);
        store(x.g + i, g);
        store(x.b + i, b);
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
