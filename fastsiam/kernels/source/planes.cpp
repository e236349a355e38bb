// RGB of a JPEG's planes, as libjpeg-turbo's "fancy" upsampling and its colour conversion make it.
//
// Both are integer arithmetic with a rounding of their own (jdsample.c, jdcolor.c; the rules for
// planes of half the height alone are those since version 2.1), which is followed to the last bit.

#include "planes.h"

#include "job.h"
#include "upsample.h"
#include "ycc.h"

namespace fastsiam {

namespace {

// A row is read so far beyond its end, at most.
static_assert(PLANES_SLACK > STEP && PLANES_SLACK >= AT_ONCE);

// One component of an image, row by row.
class Rows {
  public:
    // `left` and `wanted`: which columns of the image are wanted.
    void begin(const uint8_t *data, const Plane &own, int32_t left, int32_t wanted);
    // Returns the component's samples at the wanted columns of a row of the image.
    const uint8_t *at(int32_t row);

  private:
    Room room;
    const uint8_t *samples;  // of the plane, from its first wanted column on
    Plane plane;
    int32_t count;     // columns of the plane that are wanted
    int32_t skip;      // columns of the image between the first of them and the first wanted one
    bool first, last;  // whether they begin or end at the plane's edge
    bool smooth;
    uint8_t *made;
};

void Rows::begin(const uint8_t *data, const Plane &own, int32_t left, int32_t wanted) {
    const int32_t from = left / own.across, to = (left + wanted - 1) / own.across + 1;
    plane = own;
    samples = data + own.start + from;
    count = to - from;
    skip = left - from * own.across;
    first = from == 0;
    last = to == own.width;
    // libjpeg smooths factors of two alone, and to the right only what is three samples wide.
    smooth =
        (own.across == 1 && own.down == 2) || (own.across == 2 && own.down <= 2 && own.width > 2);
    made = room.bytes((int64_t)own.across * rounded(count) + AT_ONCE);
}

const uint8_t *Rows::at(int32_t row) {
    const int32_t own = row / plane.down;
    const uint8_t *here = samples + (int64_t)own * plane.width;
    if (plane.across == 1 && !smooth) return here;
    if (!smooth) {
        for (int32_t i = 0; i < count; i++) memset(made + i * plane.across, here[i], plane.across);
        return made + skip;
    }
    // The nearest row but its own; at the edges, its own.
    const int32_t other = row % 2 ? own + 1 : own - 1;
    const bool inside = other >= 0 && other < plane.height;
    const uint8_t *beside = inside ? samples + (int64_t)other * plane.width : here;
    if (plane.across == 1)
        between(here, beside, 1 + row % 2, count, made);
    else if (plane.down == 1)
        double_across<false>(here, here, count, first, last, made);
    else
        double_across<true>(here, beside, count, first, last, made);
    return made + skip;
}

// Writes one row of pixels, and nothing behind it: the last pixels are made with those before them.
void write_row(const uint8_t *const *samples, int32_t planes, int32_t count, uint8_t *rgb) {
    uint8_t few[3 * AT_ONCE];
    for (int32_t i = 0; i < count; i += AT_ONCE) {
        const int32_t at = count < AT_ONCE ? 0 : i + AT_ONCE > count ? count - AT_ONCE : i;
        uint8_t *to = count < AT_ONCE ? few : rgb + 3 * at;
        if (planes == 1)
            gray_to_rgb(samples[0] + at, to);
        else
            ycc_to_rgb(samples[0] + at, samples[1] + at, samples[2] + at, to);
    }
    if (count < AT_ONCE) memcpy(rgb, few, 3 * count);
}

}  // namespace

int from_planes(const uint8_t *data, int64_t bytes, int32_t height, int32_t width,
                const int32_t *box, uint8_t *room, Image *made) {
    static thread_local Rows rows[3];
    PlanesHeader header;
    Plane plane[3];
    if (bytes < (int64_t)sizeof header) return 1;
    memcpy(&header, data, sizeof header);
    if (memcmp(header.magic, PLANES_MAGIC, sizeof header.magic) || header.height != height ||
        header.width != width || planes_of(header, plane) != bytes)
        return 1;
    const int32_t top = box[0], left = box[1], count = box[3] - left;
    for (int32_t i = 0; i < header.components; i++) rows[i].begin(data, plane[i], left, count);
    for (int32_t row = top; row < box[2]; row++) {
        const uint8_t *samples[3];
        for (int32_t i = 0; i < header.components; i++) samples[i] = rows[i].at(row);
        write_row(samples, header.components, count, room + 3LL * (row - top) * count);
    }
    *made = {room, 3LL * count, top, left, room + 3LL * height * width + ROOM_BEHIND};
    return 0;
}

}  // namespace fastsiam
