// The photometric stage of one view: jitter, gray, blur, solarise, normalisation.

#include "photometric.h"

#include <math.h>

namespace fastsiam {
namespace {

constexpr int SLOTS = 4;
constexpr int64_t CHUNK = 8192;  // pixels whose planes stay in an L1 cache of 32 KiB
constexpr int16_t NO_LEVEL = 256;
static_assert(CHUNK % RUN == 0, "an operation continues to the end of a run");

// The photometric parameters of one view.
struct View {
    const int8_t *order;
    const float *factor;
    bool gray;
    int16_t threshold;

    void jitter(const Planes &x, int first, int last, float mean) const {
        for (int slot = first; slot < last; slot++) {
            const int8_t operation = order[slot];
            if (operation == BRIGHTNESS) brightness(x, factor[operation]);
            if (operation == CONTRAST) contrast(x, factor[operation], mean);
            if (operation == SATURATION) saturation(x, factor[operation]);
            if (operation == HUE) hue(x, factor[operation]);
        }
    }

    // Solarises, and returns the planes of the result: for a gray view, the same plane three times.
    Planes inverted(const Planes &x) const {
        uint8_t *const planes[] = {x.r, x.g, x.b};
        for (int i = 0; threshold < NO_LEVEL && i < (gray ? 1 : 3); i++)
            solarise(planes[i], x.count, threshold);
        return gray ? Planes{x.r, x.r, x.r, x.count} : x;
    }
};

}  // namespace

// Works in chunks that stay in the cache. If there is a contrast operation, which needs the mean of
// the entire view, it takes two sweeps.
void finish(const uint8_t *crop, int32_t height, int32_t width, const Finish &how, int64_t number) {
    static thread_local Room room;
    const int64_t count = (int64_t)height * width;
    const int64_t plane = (count + RUN + 63) / 64 * 64;
    uint8_t *memory = room.bytes(3 * plane);
    const Planes whole = {memory, memory + plane, memory + 2 * plane, count};
    const uint32_t *box = how.blur + 3 * number;
    const bool blurred = box[0] > 0;
    const View view = {how.order + SLOTS * number, how.factor + SLOTS * number,
                       how.gray[number] != 0, how.solarise[number]};
    uint8_t *out = (uint8_t *)how.out + number * 3 * count * (how.type == FLOAT32 ? 4 : 2);
    const auto sweep = [=](auto work) {
        for (int64_t first = 0; first < count; first += CHUNK)
            work(whole.part(first, first + CHUNK < count ? first + CHUNK : count), first);
    };

    int before = 0;  // slots before the contrast operation; without one, all slots
    while (before < SLOTS && view.order[before] != CONTRAST) before++;
    const auto begin = [=](const Planes &x, int64_t first) {
        split(crop + 3 * first, x);
        view.jitter(x, 0, before, 0);
    };
    int64_t luma = 0;
    if (before < SLOTS)
        sweep([&](const Planes &x, int64_t first) {
            begin(x, first);
            luma += sum_of_luma(x);
        });
    const float mean = (float)floor((double)luma / count + 0.5);
    sweep([=](const Planes &x, int64_t first) {
        if (before == SLOTS) begin(x, first);
        view.jitter(x, before, SLOTS, mean);
        if (view.gray) grayscale(x);
        if (!blurred) normalize(view.inverted(x), how, out, first);
    });
    if (!blurred) return;
    uint8_t *const planes[] = {whole.r, whole.g, whole.b};
    for (int i = 0; i < (view.gray ? 1 : 3); i++) blur(planes[i], width, height, box);
    normalize(view.inverted(whole), how, out, 0);
}

}  // namespace fastsiam
