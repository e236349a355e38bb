// PIL's Gaussian blur.

#include "photometric.h"
#include "simd.h"

namespace fastsiam {
namespace {

// Levels stay 16-bit words between the passes, so they are widened and packed only once.
typedef uint16_t Word;
constexpr int64_t WORDS_AT_ONCE = 32;  // rows are padded by as many after their last word
constexpr int64_t MOST_WHOLE = 128;  // largest `whole` of a box whose sums fit in words
constexpr int ROWS = 8;  // rows that go through a pass together: none waits for its own last store

// Box filter. `tap[0]` to `tap[2 * whole + 2]` point to the source pixels of the first output
// pixel, from one end of the box to the other; those of the next output pixel follow.
class Box {
  public:
    const int64_t whole;

    explicit Box(const uint32_t *weights)
        : whole(weights[2]), inner(weights[0]), outer(weights[1]) {
        if (whole == 0) find_weight();
    }

    // Writes `count` levels to `out`, which is padded by WORDS_AT_ONCE levels, like all taps.
    // Values that a store could alias are copied to local variables, to avoid loading them again.
    void run(const Word *const *tap, int64_t count, Word *out) const {
        if (exact && large) return three<true>(tap[0], tap[1], tap[2], count, out);
        if (exact) return three<false>(tap[0], tap[1], tap[2], count, out);
        if (whole > MOST_WHOLE) return one_by_one(tap, count, out);
        const int64_t last = 2 * whole + 2;
        const uint32_t inner = this->inner, outer = this->outer;
        const Word *const first = tap[0], *const second = tap[1], *const end = tap[last];
        for (int64_t i = 0; i < count; i += 2 * LANES) {
            const Bits ends = load_vector<Bits>(first + i) + load_vector<Bits>(end + i);
            Bits sum = load_vector<Bits>(second + i);  // two words in each lane
            for (int64_t k = 2; k < last; k++) sum += load_vector<Bits>(tap[k] + i);
            const Bits even = (sum & 0xFFFF) * inner + (ends & 0xFFFF) * outer + (1u << 23);
            const Bits odd = (sum >> 16) * inner + (ends >> 16) * outer + (1u << 23);
            store_vector(out + i, even >> 24 | (odd >> 8 & 0xFF0000));
        }
    }

  private:
    const uint32_t inner, outer;
    // For a box of three pixels, in 16 bits: see `find_weight`.
    bool exact = false, large = false;
    int16_t weight = 0;
    uint16_t offset = 0;

    [[gnu::noinline]] void one_by_one(const Word *const *tap, int64_t count, Word *out) const {
        for (int64_t i = 0; i < count; i++) {
            uint32_t sum = 0, ends = tap[0][i] + tap[2 * whole + 2][i];
            for (int64_t k = 1; k < 2 * whole + 2; k++) sum += tap[k][i];
            out[i] = (sum * inner + ends * outer + (1u << 23)) >> 24;  // below 2**32
        }
    }

    // 256 times the change of the middle; `bend` is the sum of the ends minus twice the middle.
    template <bool LARGE>
    static int change(int bend, int weight) {
        return (bend * 64 * weight >> 16) + LARGE * bend * 64;
    }

    // Searches for a 16-bit weight and offset that give the same levels as the exact weights. They
    // exist for 99% of the sigmas between 0.1 and 2 whose box has three pixels.
    //
    // The exact level is middle + floor((bend * outer + 2**23 - middle * rest) / 2**24), where
    // `rest` is 2**24 minus all weights. In 16 bits, it is middle + floor((change + offset) / 256).
    // Each of the 1,021 values of bend has a range of offsets that give the exact level. The offset
    // must be in all ranges. A weight above 1/8 is stored minus 1/4, or it would need 17 bits.
    void find_weight() {
        const int64_t rest = (1 << 24) - inner - 2 * (int64_t)outer;
        large = outer >= 1 << 21;
        const int nearest = (int)((outer + 32) >> 6) - large * 65536;
        for (int aside = 0; aside < 3 && !exact; aside++) {
            const int candidate = nearest + (aside % 2 ? aside / 2 + 1 : -aside / 2);
            int smallest = 0, largest = 65535;
            for (int bend = -510; bend <= 510; bend++) {
                const int64_t exactly = bend * (int64_t)outer + (1 << 23);
                const int rough = large ? change<true>(bend, candidate)
                                        : change<false>(bend, candidate);
                const int at_least = 256 * (int)(exactly >> 24) - rough;
                const int at_most = 256 * (int)((exactly - 255 * rest) >> 24) + 255 - rough;
                smallest = at_least > smallest ? at_least : smallest;
                largest = at_most < largest ? at_most : largest;
            }
            weight = (int16_t)candidate;
            offset = (uint16_t)smallest;
            exact = weight == candidate && smallest <= largest;
        }
    }

    // Sums are correct modulo 2**16, which is above 256 times the highest level.
    template <bool LARGE>
    void three(const Word *a, const Word *b, const Word *c, int64_t count,
               Word *__restrict out) const {
        const int16_t weight = this->weight;
        const Word offset = this->offset;
        for (int64_t first = 0; first < count; first += WORDS_AT_ONCE)
            for (int64_t i = first; i < first + WORDS_AT_ONCE; i++) {
                const int16_t bend = (int16_t)((a[i] + c[i] - 2 * b[i]) * 64);
                const Word rough = (Word)((bend * weight) >> 16) + (LARGE ? (Word)bend : 0);
                out[i] = (Word)(b[i] * 256 + rough + offset) >> 8;
            }
    }
};

// Extends a row of `count` levels by `border` copies of its first and last level.
void extend(Word *row, int64_t count, int64_t border) {
    for (int64_t i = 1; i <= border; i++) {
        row[-i] = row[0];
        row[count - 1 + i] = row[count - 1];
    }
}

// Ring buffer of the latest rows of levels; its size is a power of two.
struct Rows {
    Word *memory;
    int64_t pitch, ring;

    Word *operator[](int64_t y) const { return memory + (y & (ring - 1)) * pitch; }
};

// Applies the three passes along rows to some rows of a plane.
void along_rows(const uint8_t *plane, int32_t width, int rows, const Box &box, const Rows *between,
                const Word **tap, const Rows &out, int64_t first) {
    const int64_t border = box.whole + 1;
    for (int y = 0; y < rows; y++) {
        Word *__restrict to = between[0][y] + border;
        for (int32_t x = 0; x < width; x++) to[x] = plane[(int64_t)y * width + x];
    }
    for (int turn = 0; turn < 3; turn++) {
        for (int y = 0; y < rows; y++) extend(between[turn % 2][y] + border, width, border);
        for (int y = 0; y < rows; y++) {
            const Word *from = between[turn % 2][y] + border;
            for (int64_t k = 0; k < 2 * border + 1; k++) tap[k] = from + k - border;
            box.run(tap, width, turn == 2 ? out[first + y] : between[(turn + 1) % 2][y] + border);
        }
    }
}

}  // namespace

// All six passes move down the plane together, one after the other. Each keeps only as many rows of
// its result as the next one needs.
void blur(uint8_t *plane, int32_t width, int32_t height, const uint32_t *weights) {
    static thread_local Room room, taps;
    const Box box(weights);
    const int64_t border = box.whole + 1, kept = 2 * border + 1;
    const Word **tap = taps.of<const Word *>(kept);
    const int64_t pitch = (width + 2 * border + WORDS_AT_ONCE + 31) / 32 * 32;
    int64_t ring = ROWS;
    while (ring < kept + ROWS) ring *= 2;
    Word *memory = room.of<Word>((4 * ring + 2 * ROWS) * pitch);
    Rows made[4];  // results of the passes along rows, and of each pass along columns
    for (Rows &rows : made) {
        rows = {memory, pitch, ring};
        memory += ring * pitch;
    }
    const Rows between[2] = {{memory, pitch, ROWS}, {memory + ROWS * pitch, pitch, ROWS}};
    int32_t done = 0;  // rows that have gone through the passes along rows
    for (int64_t step = 0; step < height + 2 * border; step++) {
        while (done < height && done <= step + border) {
            const int rows = height - done < ROWS ? height - done : ROWS;
            along_rows(plane + (int64_t)done * width, width, rows, box, between, tap, made[0], done);
            done += rows;
        }
        for (int turn = 0; turn < 3; turn++) {
            const int64_t y = step - turn * border;
            if (y < 0 || y >= height) continue;
            for (int64_t k = 0; k < kept; k++) {
                const int64_t at = y + k - border;
                tap[k] = made[turn][at < 0 ? 0 : at < height ? at : height - 1];
            }
            box.run(tap, width, made[turn + 1][y]);
        }
        const int64_t y = step - 2 * border;
        if (y < 0) continue;
        const Word *from = made[3][y];
        uint8_t *__restrict to = plane + y * width;
        for (int32_t x = 0; x < width; x++) to[x] = (uint8_t)from[x];
    }
}

}  // namespace fastsiam
