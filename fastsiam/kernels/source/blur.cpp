// PIL's Gaussian blur.

#include "photometric.h"
#include "simd.h"

namespace fastsiam {
namespace {

// Levels are words between the passes: they are widened and packed once.
typedef uint16_t Word;
constexpr int64_t WORDS_AT_ONCE = 32;  // rows have room for so many behind their last
constexpr int64_t MOST_WHOLE = 128;  // of a box whose sums are words
constexpr int ROWS = 8;  // that go through a pass together: none waits for its own last store

// Averages `count` pixels: `tap[0]` to `tap[2 * whole + 2]` are the pixels from one end of the box
// to the other, each of them for the first of the result.
class Box {
  public:
    const int64_t whole;

    explicit Box(const uint32_t *weights)
        : whole(weights[2]), inner(weights[0]), outer(weights[1]) {
        if (whole == 0) find_weight();
    }

    // Fills `out`, which has room for WORDS_AT_ONCE levels more, as all taps have. What a store
    // could change is in variables of its own here: nothing is read again for each of them.
    void run(const Word *const *tap, int64_t count, Word *out) const {
        if (exact && large) return three<true>(tap[0], tap[1], tap[2], count, out);
        if (exact) return three<false>(tap[0], tap[1], tap[2], count, out);
        if (whole > MOST_WHOLE) return one_by_one(tap, count, out);
        const int64_t last = 2 * whole + 2;
        const uint32_t inner = this->inner, outer = this->outer;
        const Word *const first = tap[0], *const second = tap[1], *const end = tap[last];
        for (int64_t i = 0; i < count; i += 2 * LANES) {
            const Bits ends = load_vector<Bits>(first + i) + load_vector<Bits>(end + i);
            Bits sum = load_vector<Bits>(second + i);  // of two words in each lane
            for (int64_t k = 2; k < last; k++) sum += load_vector<Bits>(tap[k] + i);
            const Bits even = (sum & 0xFFFF) * inner + (ends & 0xFFFF) * outer + (1u << 23);
            const Bits odd = (sum >> 16) * inner + (ends >> 16) * outer + (1u << 23);
            store_vector(out + i, even >> 24 | (odd >> 8 & 0xFF0000));
        }
    }

  private:
    const uint32_t inner, outer;
    // Of three pixels, in 16 bits: see `find_weight`.
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

    // 256 times what the ends change the middle by, `bend` being their sum less twice the middle.
    template <bool LARGE>
    static int change(int bend, int weight) {
        return (bend * 64 * weight >> 16) + LARGE * bend * 64;
    }

    // Looks for 16-bit numbers that give the same levels as the weights do: of sigmas between .1
    // and 2, 99% of those with a box of three pixels have them.
    //
    // A level is the middle and the whole part of `bend * outer + 2**23 - middle * rest`, in
    // 2**-24ths, `rest` being what the weights lack of 1. With a weight of 16 bits it is to be the
    // whole part of a 256th of the change and an offset. Each of the 1,021 bends has its smallest
    // and its largest offset that gives its level, and one is wanted that suits all of them. A
    // weight of more than an eighth is less by a quarter here, or it would take 17 bits.
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

    // Sums are right modulo 2**16, which is above 256 times the greatest level.
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

// Repeats the levels at both ends of a row of `count` by `border` more.
void extend(Word *row, int64_t count, int64_t border) {
    for (int64_t i = 1; i <= border; i++) {
        row[-i] = row[0];
        row[count - 1 + i] = row[count - 1];
    }
}

// Rows of levels: a ring of the latest, whose number is a power of two.
struct Rows {
    Word *memory;
    int64_t pitch, ring;

    Word *operator[](int64_t y) const { return memory + (y & (ring - 1)) * pitch; }
};

// Takes some rows of a plane through the passes along them.
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

// All six passes go down the plane together, one behind the other: of what each of them makes, no
// more rows are kept than the next needs.
void blur(uint8_t *plane, int32_t width, int32_t height, const uint32_t *weights) {
    static thread_local Room room, taps;
    const Box box(weights);
    const int64_t border = box.whole + 1, kept = 2 * border + 1;
    const Word **tap = taps.of<const Word *>(kept);
    const int64_t pitch = (width + 2 * border + WORDS_AT_ONCE + 31) / 32 * 32;
    int64_t ring = ROWS;
    while (ring < kept + ROWS) ring *= 2;
    Word *memory = room.of<Word>((4 * ring + 2 * ROWS) * pitch);
    Rows made[4];  // by the passes along the rows, and by each of those along the columns
    for (Rows &rows : made) {
        rows = {memory, pitch, ring};
        memory += ring * pitch;
    }
    const Rows between[2] = {{memory, pitch, ROWS}, {memory + ROWS * pitch, pitch, ROWS}};
    int32_t done = 0;  // rows that have gone through the passes along them
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
