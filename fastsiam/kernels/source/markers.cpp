// Where the entropy code of a JPEG ends.

#include "job.h"

// Returns where the first marker from `begin` on has its code; -1 if there is none.
EXPORT int64_t fastsiam_next_marker(const uint8_t *data, int64_t begin, int64_t bytes) {
    const uint8_t *at = fastsiam::next_marker(data + begin, data + bytes);
    return at ? at - data : -1;
}
