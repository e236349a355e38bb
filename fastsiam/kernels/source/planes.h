// How a JPEG's own planes are kept: one record of `fastsiam convert --yuv`.
//
//     PlanesHeader
//     plane of Y, then of Cb and Cr unless the image is gray:
//         ceil(height * v / largest v) rows of ceil(width * h / largest h) samples, uint8,
//         where h and v are the component's sampling factors; rows follow each other without a gap
//     64 zeros, so that every row may be read in whole vectors
//
// The samples are those that libjpeg's inverse DCT leaves: before upsampling and conversion to RGB.
#pragma once

#include <stdint.h>
#include <string.h>

namespace fastsiam {

constexpr char PLANES_MAGIC[4] = {'F', 'S', 'P', '1'};
constexpr int64_t PLANES_SLACK = 64;

struct PlanesHeader {
    char magic[4];
    int32_t height, width;  // of the image
    uint8_t components;     // 1: gray, 3: Y, Cb, Cr
    uint8_t sampling[3];    // of each: h << 4 | v, as a JPEG's frame header has it
};
static_assert(sizeof(PlanesHeader) == 16 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

// Where one component lies in a record, and how many pixels a sample stands for.
struct Plane {
    int64_t start;          // of its first sample, in bytes from the record's beginning
    int32_t height, width;  // in samples
    int32_t down, across;   // pixels of a sample, downwards and to the right
};

// Finds the planes; returns the length of the record, or 0 if libjpeg knows no such sampling.
inline int64_t planes_of(const PlanesHeader &header, Plane *plane) {
    const int32_t count = header.components;
    if ((count != 1 && count != 3) || header.height < 1 || header.width < 1) return 0;
    int32_t most_h = 0, most_v = 0;
    for (int32_t i = 0; i < count; i++) {
        const int32_t h = header.sampling[i] >> 4, v = header.sampling[i] & 15;
        if (h < 1 || h > 4 || v < 1 || v > 4) return 0;
        if (h > most_h) most_h = h;
        if (v > most_v) most_v = v;
    }
    int64_t end = sizeof(PlanesHeader);
    for (int32_t i = 0; i < count; i++) {
        const int32_t h = header.sampling[i] >> 4, v = header.sampling[i] & 15;
        if (most_h % h || most_v % v) return 0;
        const int32_t down = most_v / v, across = most_h / h;
        plane[i] = {end, (int32_t)((header.height - 1LL) / down + 1),
                    (int32_t)((header.width - 1LL) / across + 1), down, across};
        end += (int64_t)plane[i].height * plane[i].width;
    }
    return end + PLANES_SLACK;
}

}  // namespace fastsiam
