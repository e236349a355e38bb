// The colour operations, in place on planes of uint8 levels.
//
// All work on whole runs: planes need RUN bytes of room behind their last pixel.
#pragma once

#include <stdint.h>

namespace fastsiam {

constexpr int64_t RUN = 256;

struct Planes {
    uint8_t *r, *g, *b;
    int64_t count;  // pixels
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

}  // namespace fastsiam
