// Between interleaved pixels and planes, and from planes to normalised views.
#pragma once

#include <stdint.h>

#include "colours.h"
#include "job.h"

namespace fastsiam {

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
