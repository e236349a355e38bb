// Where a crop is cut.
#pragma once

#include <string.h>

#include "job.h"

namespace fastsiam {

// The box of an image: rows of which only some bytes may be read.
struct Source {
    const uint8_t *first;  // of the box
    int64_t pitch;
    const uint8_t *end;

    // Returns a row, of which `reach` bytes will be read and `count` matter: a copy of those if
    // what lies behind them is another's.
    const uint8_t *row(int32_t y, int64_t count, int64_t reach, uint8_t *copy) const {
        const uint8_t *own = first + y * pitch;
        if (own + reach <= end) return own;
        memcpy(copy, own, count);
        return copy;
    }
};

}  // namespace fastsiam
