// The parts of the photometric stage, which photometric.cpp puts together.
#pragma once

#include "job.h"

namespace fastsiam {

constexpr int64_t RUN = 256;

// The channels of pixels. The colour operations work in place on whole runs: planes need RUN bytes
// of room behind their last pixel.
struct Planes {
    uint8_t *r, *g, *b;
    int64_t count;  // pixels

    Planes part(int64_t first, int64_t end) const {
        return {r + first, g + first, b + first, end - first};
    }
};

// Numbers of the operations: fastsiam.views.draws.
enum Operation : int8_t { BRIGHTNESS = 0, CONTRAST = 1, SATURATION = 2, HUE = 3 };

void brightness(const Planes &x, float factor);
void contrast(const Planes &x, float factor, float mean);
void saturation(const Planes &x, float factor);
void hue(const Planes &x, float factor);
void grayscale(const Planes &x);
void solarise(uint8_t *plane, int64_t count, int threshold);
// Sums the luma, which is whole for each pixel.
int64_t sum_of_luma(const Planes &x);

// Blurs a plane in place as PIL does: three box blurs along the rows, three along the columns.
//
// `box`: weight of the whole pixels, weight of the two at the ends, both in 2**-24ths, and how many
// whole pixels lie on either side.
void blur(uint8_t *plane, int32_t width, int32_t height, const uint32_t *box);

// Takes interleaved pixels apart; of the planes, no more than `count` bytes are written.
void split(const uint8_t *pixels, const Planes &to);

// Writes the pixels of planes as normalised numbers of the wanted type, interleaved.
//
// `first` is the place of the planes' first pixel in the view, `out` the view.
void normalize(const Planes &from, const Finish &how, void *out, int64_t first);

// Puts in the place of every level of a channel a number of 2, 4 or 8 bytes.
//
// `table` holds these, (256, 3).
void look_up(const uint8_t *pixels, int64_t count, const void *table, int32_t size, void *out);

}  // namespace fastsiam
