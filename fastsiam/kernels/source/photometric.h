// Operations of the photometric stage, which photometric.cpp combines.
#pragma once

#include "job.h"

namespace fastsiam {

constexpr int64_t RUN = 256;

// The channels of an image as planes. The colour operations work in place on complete runs, so
// planes need RUN bytes of padding after their last pixel.
struct Planes {
    uint8_t *r, *g, *b;
    int64_t count;  // pixels

    Planes part(int64_t first, int64_t end) const {
        return {r + first, g + first, b + first, end - first};
    }
};

// Codes of the operations, as in fastsiam.views.draws.
enum Operation : int8_t { BRIGHTNESS = 0, CONTRAST = 1, SATURATION = 2, HUE = 3 };

void brightness(const Planes &x, float factor);
void contrast(const Planes &x, float factor, float mean);
void saturation(const Planes &x, float factor);
void hue(const Planes &x, float factor);
void grayscale(const Planes &x);
void solarise(uint8_t *plane, int64_t count, int threshold);
// Returns the sum of the luma, which is an integer for each pixel.
int64_t sum_of_luma(const Planes &x);

// Blurs a plane in place like PIL: three box blurs along the rows, three along the columns.
//
// `box`: weight of the inner pixels and weight of the two end pixels, in units of 2**-24, and the
// number of inner pixels on either side.
void blur(uint8_t *plane, int32_t width, int32_t height, const uint32_t *box);

// Splits interleaved pixels into planes; writes only `count` bytes of each plane.
void split(const uint8_t *pixels, const Planes &to);

// Normalises the pixels of planes and writes them, interleaved, as numbers of type `how.type`.
//
// `first` is the index of the planes' first pixel in the view, which starts at `out`.
void normalize(const Planes &from, const Finish &how, void *out, int64_t first);

// Replaces every level of each channel by a number of `size` bytes: 2, 4 or 8.
//
// `table` contains the numbers, (256, 3).
void look_up(const uint8_t *pixels, int64_t count, const void *table, int32_t size, void *out);

}  // namespace fastsiam
