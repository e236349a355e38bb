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

    // Fetches bytes of the rows from *next until `end` into the cache, and sets *next to `end`.
    void fetch(int32_t *next, int32_t end, int64_t from, int64_t until) const {
        for (; *next < end; ++*next)
            for (int64_t at = from; at < until; at += 64)
                __builtin_prefetch(first + *next * pitch + at);
    }
};

}  // namespace fastsiam
