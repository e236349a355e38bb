#include "blur.h"

#include "job.h"
#include "simd.h"

namespace fastsiam {
namespace {

constexpr int ROWS = 8;  // that go through a pass together: none waits for its own last store

// Averages `count` pixels: `tap[0]` to `tap[2 * whole + 2]` are the pixels from one end of the box
// to the other, each of them for the first of the result.
struct Box {
    int64_t whole;
    uint32_t inner, outer;

    uint8_t level(const uint8_t *const *tap, int64_t i) const {
        uint32_t sum = 0, ends = tap[0][i] + tap[2 * whole + 2][i];
        for (int64_t k = 1; k < 2 * whole + 2; k++) sum += tap[k][i];
        return (sum * inner + ends * outer + (1u << 23)) >> 24;  // below 2**32
    }

#if defined(__AVX2__)
#if defined(__AVX512VNNI__)
    using Register = __m512i;
    static Register loaded(const uint8_t *from) { return _mm512_loadu_si512(from); }
    static Register low8(Register a, Register b) { return _mm512_unpacklo_epi8(a, b); }
    static Register high8(Register a, Register b) { return _mm512_unpackhi_epi8(a, b); }
    static Register low16(Register a, Register b) { return _mm512_unpacklo_epi16(a, b); }
    static Register high16(Register a, Register b) { return _mm512_unpackhi_epi16(a, b); }
    static Register add16(Register a, Register b) { return _mm512_add_epi16(a, b); }
    static Register weigh(Register x, Register high, Register low) {
        const Register b = _mm512_dpwssd_epi32(_mm512_set1_epi32(1 << 23), x, low);
        return _mm512_srli_epi32(_mm512_dpwssd_epi32(_mm512_srli_epi32(b, 12), x, high), 12);
    }
    static Register pack32(Register a, Register b) { return _mm512_packs_epi32(a, b); }
    static Register pack16(Register a, Register b) { return _mm512_packus_epi16(a, b); }
    static Register pairs(uint32_t a, uint32_t b) { return _mm512_set1_epi32(a | b << 16); }
    static Register zero() { return _mm512_setzero_si512(); }
    static void stored(uint8_t *to, Register x) { _mm512_storeu_si512(to, x); }
#else
    using Register = __m256i;
    static Register loaded(const uint8_t *from) {
        return _mm256_loadu_si256((const Register *)from);
    }
    static Register low8(Register a, Register b) { return _mm256_unpacklo_epi8(a, b); }
    static Register high8(Register a, Register b) { return _mm256_unpackhi_epi8(a, b); }
    static Register low16(Register a, Register b) { return _mm256_unpacklo_epi16(a, b); }
    static Register high16(Register a, Register b) { return _mm256_unpackhi_epi16(a, b); }
    static Register add16(Register a, Register b) { return _mm256_add_epi16(a, b); }
    static Register weigh(Register x, Register high, Register low) {
        const Register a = _mm256_madd_epi16(x, high), b = _mm256_madd_epi16(x, low);
        const Register half = _mm256_set1_epi32(1 << 11);
        return _mm256_srli_epi32(
            _mm256_add_epi32(_mm256_add_epi32(a, half), _mm256_srli_epi32(b, 12)), 12);
    }
    static Register pack32(Register a, Register b) { return _mm256_packs_epi32(a, b); }
    static Register pack16(Register a, Register b) { return _mm256_packus_epi16(a, b); }
    static Register pairs(uint32_t a, uint32_t b) { return _mm256_set1_epi32(a | b << 16); }
    static Register zero() { return _mm256_setzero_si256(); }
    static void stored(uint8_t *to, Register x) { _mm256_storeu_si256((Register *)to, x); }
#endif
    static constexpr int64_t AT_ONCE = sizeof(Register);

    // Weights are in two parts of 12 bits, so that 16-bit products of the sum and of the ends can
    // be added in pairs; a floor of the floor is the floor of the whole. What a store of bytes
    // could change is in variables of its own here: nothing is read again for each register.
    template <int64_t WHOLE>
    void levels(const uint8_t *const *tap, int64_t count, uint8_t *out) const {
        const int64_t whole = WHOLE < 0 ? this->whole : WHOLE;
        const uint8_t *own[WHOLE < 0 ? 1 : 2 * WHOLE + 3];
        if (WHOLE >= 0)
            for (int64_t k = 0; k < 2 * WHOLE + 3; k++) own[k] = tap[k];
        else
            own[0] = nullptr;
        const uint8_t *const *const from = WHOLE < 0 ? tap : own;
        const Register high = pairs(inner >> 12, outer >> 12);
        const Register low = pairs(inner & 4095, outer & 4095), none = zero();
        for (int64_t i = 0; i < count; i += AT_ONCE) {
            const Register first = loaded(from[0] + i), last = loaded(from[2 * whole + 2] + i);
            const Register ends_low = add16(low8(first, none), low8(last, none));
            const Register ends_high = add16(high8(first, none), high8(last, none));
            Register x = loaded(from[1] + i), sum_low = low8(x, none), sum_high = high8(x, none);
            for (int64_t k = 2; k < 2 * whole + 2; k++) {
                x = loaded(from[k] + i);
                sum_low = add16(sum_low, low8(x, none));
                sum_high = add16(sum_high, high8(x, none));
            }
            const Register a = pack32(weigh(low16(sum_low, ends_low), high, low),
                                      weigh(high16(sum_low, ends_low), high, low));
            const Register b = pack32(weigh(low16(sum_high, ends_high), high, low),
                                      weigh(high16(sum_high, ends_high), high, low));
            stored(out + i, pack16(a, b));
        }
    }
#endif

    // Fills `out`, which has room for PIXELS_AT_ONCE bytes more, as all taps have.
    void run(const uint8_t *const *tap, int64_t count, uint8_t *out) const {
#if defined(__AVX2__)
        if (inner >> 12 < 4096 && whole <= 60) {  // sums fit 15 bits, the upper weight 12
            if (whole == 0) return levels<0>(tap, count, out);
            if (whole == 1) return levels<1>(tap, count, out);
            return levels<-1>(tap, count, out);
        }
#endif
        if (whole == 0) {
            const uint8_t *a = tap[0], *b = tap[1], *c = tap[2];
            for (int64_t i = 0; i < count; i++)
                out[i] =
                    ((uint32_t)b[i] * inner + (uint32_t)(a[i] + c[i]) * outer + (1u << 23)) >> 24;
        } else {
            for (int64_t i = 0; i < count; i++) out[i] = level(tap, i);
        }
    }
};

// Repeats the pixels at both ends of a row of `count` by `border` more.
void extend(uint8_t *row, int64_t count, int64_t border) {
    memset(row - border, row[0], border);
    memset(row + count, row[count - 1], border);
}

void along_rows(uint8_t *plane, int32_t width, int32_t height, const Box &box, uint8_t *room,
                const uint8_t **tap) {
    const int64_t border = box.whole + 1, pitch = width + 2 * border + PIXELS_AT_ONCE;
    const auto row = [=](int turn, int y) { return room + (turn % 2 * ROWS + y) * pitch + border; };
    for (int32_t first = 0; first < height; first += ROWS) {
        const int rows = height - first < ROWS ? height - first : ROWS;
        uint8_t *own = plane + (int64_t)first * width;
        for (int y = 0; y < rows; y++) memcpy(row(0, y), own + (int64_t)y * width, width);
        for (int turn = 0; turn < 3; turn++) {
            for (int y = 0; y < rows; y++) {
                extend(row(turn, y), width, border);
                for (int64_t k = 0; k < 2 * border + 1; k++) tap[k] = row(turn, y) + k - border;
                box.run(tap, width, row(turn + 1, y));
            }
        }
        for (int y = 0; y < rows; y++) memcpy(own + (int64_t)y * width, row(3, y), width);
    }
}

// All three passes go down the plane together, one behind the other: of what the first two make, no
// more rows are kept than the next needs.
void along_columns(uint8_t *plane, int32_t width, int32_t height, const Box &box, uint8_t *room,
                   const uint8_t **tap) {
    const int64_t border = box.whole + 1, kept = 2 * border + 1, pitch = width + PIXELS_AT_ONCE;
    const auto row = [=](int turn, int64_t y) {
        return turn ? room + ((turn - 1) * kept + y % kept) * pitch : plane + y * width;
    };
    for (int64_t step = 0; step < height + 2 * border; step++) {
        for (int turn = 0; turn < 3; turn++) {
            const int64_t y = step - turn * border;
            if (y < 0 || y >= height) continue;
            for (int64_t k = 0; k < kept; k++) {
                const int64_t at = y + k - border;
                tap[k] = row(turn, at < 0 ? 0 : at < height ? at : height - 1);
            }
            box.run(tap, width, row(turn + 1, y));
            if (turn == 2) memcpy(plane + y * width, row(3, y), width);
        }
    }
}

}  // namespace

void blur(uint8_t *plane, int32_t width, int32_t height, const uint32_t *weights) {
    static thread_local Room room, taps;
    const Box box = {weights[2], weights[0], weights[1]};
    const uint8_t **tap = taps.of<const uint8_t *>(2 * box.whole + 3);
    const int64_t border = box.whole + 1, pitch = width + 2 * border + PIXELS_AT_ONCE;
    const int64_t rows = 2 * ROWS, columns = 3 * (2 * border + 1);
    uint8_t *memory = room.bytes((rows > columns ? rows : columns) * pitch + PIXELS_AT_ONCE);
    along_rows(plane, width, height, box, memory, tap);
    along_columns(plane, width, height, box, memory, tap);
}

}  // namespace fastsiam
