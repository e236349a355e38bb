// The photometric stage of one view: jitter, gray, blur, solarise, normalisation.

#include "photometric.h"

#include <math.h>

namespace fastsiam {
namespace {

constexpr int SLOTS = 4;
constexpr int64_t CHUNK = 8192;  // pixels whose planes stay in a first-level cache of 32 KiB
constexpr int16_t NO_LEVEL = 256;
static_assert(CHUNK % RUN == 0, "an operation goes on to the end of a run");

Planes part(const Planes &x, int64_t first, int64_t end) {
    return {x.r + first, x.g + first, x.b + first, end - first};
}

// What is done to one view.
struct View {
    const int8_t *order;
    const float *factor;
    bool gray, blurred;
    int16_t solarise;

    void jitter(const Planes &x, int first, int last, float mean) const {
        for (int slot = first; slot < last; slot++) {
            const int8_t operation = order[slot];
            if (operation == BRIGHTNESS) brightness(x, factor[operation]);
            if (operation == CONTRAST) contrast(x, factor[operation], mean);
            if (operation == SATURATION) saturation(x, factor[operation]);
            if (operation == HUE) hue(x, factor[operation]);
        }
    }
};

// Inverts levels, and returns the planes that hold the result: of a gray view, one three times.
Planes last_of_all(const Planes &x, const View &view) {
    const Planes seen = view.gray ? Planes{x.r, x.r, x.r, x.count} : x;
    if (view.solarise < NO_LEVEL) {
        solarise(x.r, x.count, view.solarise);
        if (!view.gray) {
            solarise(x.g, x.count, view.solarise);
            solarise(x.b, x.count, view.solarise);
        }
    }
    return seen;
}

}  // namespace

// In chunks that stay in the cache, and in two sweeps if there is a contrast operation, which needs
// the mean of the whole view.
void finish(const uint8_t *crop, int32_t height, int32_t width, const Finish &how, int64_t number) {
    static thread_local Room room;
    const int64_t count = (int64_t)height * width;
    const int64_t plane = (count + RUN + 63) / 64 * 64;
    uint8_t *memory = room.bytes(3 * plane);
    const Planes whole = {memory, memory + plane, memory + 2 * plane, count};
    const uint32_t *box = how.blur + 3 * number;
    const View view = {how.order + SLOTS * number, how.factor + SLOTS * number,
                       how.gray[number] != 0, box[0] > 0, how.solarise[number]};
    const int64_t wide = how.type == FLOAT32 ? 4 : 2;
    uint8_t *out = (uint8_t *)how.out + number * 3 * count * wide;

    int before = 0;  // slots before the contrast: all, if there is none
    while (before < SLOTS && view.order[before] != CONTRAST) before++;
    float mean = 0;
    if (before < SLOTS) {
        int64_t total = 0;
        for (int64_t first = 0; first < count; first += CHUNK) {
            const Planes x = part(whole, first, first + CHUNK < count ? first + CHUNK : count);
            split(crop + 3 * first, x);
            view.jitter(x, 0, before, 0);
            total += sum_of_luma(x);
        }
        mean = (float)floor((double)total / count + 0.5);
    }
    for (int64_t first = 0; first < count; first += CHUNK) {
        const Planes x = part(whole, first, first + CHUNK < count ? first + CHUNK : count);
        if (before == SLOTS) {
            split(crop + 3 * first, x);
            view.jitter(x, 0, SLOTS, 0);
        } else {
            view.jitter(x, before, SLOTS, mean);
        }
        if (view.gray) grayscale(x);
        if (!view.blurred) normalize(last_of_all(x, view), how, out, first);
    }
    if (view.blurred) {
        blur(whole.r, width, height, box);
        if (!view.gray) {
            blur(whole.g, width, height, box);
            blur(whole.b, width, height, box);
        }
        normalize(last_of_all(whole, view), how, out, 0);
    }
}

}  // namespace fastsiam
