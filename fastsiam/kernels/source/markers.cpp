// Where the entropy code of a JPEG ends.

#include <stdint.h>
#include <string.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

// Returns where the first marker from `begin` on has its code, the byte after 0xFF; -1 if there is
// none. Escaped bytes, restarts and fill bytes belong to the entropy code.
EXPORT int64_t fastsiam_next_marker(const uint8_t *data, int64_t begin, int64_t bytes) {
    const uint8_t *at = data + begin, *end = data + bytes;
    while (at < end && (at = (const uint8_t *)memchr(at, 0xFF, end - at)) && ++at < end) {
        const bool restarts = (*at & ~7) == 0xD0;
        if (*at && *at != 0xFF && !restarts) return at - data;
    }
    return -1;
}
