// PIL's Gaussian blur: three box blurs along the rows, three along the columns.
#pragma once

#include <stdint.h>

namespace fastsiam {

// Blurs a plane in place.
//
// `box`: weight of the whole pixels, weight of the two at the ends, both in 2**-24ths, and how many
// whole pixels lie on either side.
void blur(uint8_t *plane, int32_t width, int32_t height, const uint32_t *box);

}  // namespace fastsiam
