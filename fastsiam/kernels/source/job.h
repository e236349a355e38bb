// What compiled code is asked for, and by which functions: the layout that library.py mirrors.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// What Python calls.
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fastsiam {

// How an image lies in memory.
enum Form : uint8_t {
    JPEG = 0,    // encoded
    PIXELS = 1,  // height x width x 3, uint8 RGB
};

enum Type : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// The photometric stage of M crops of one side: fastsiam.views.photometric.operations.Operations.
struct Finish {
    const int8_t *order;      // (M, 4)
    const float *factor;      // (M, 4)
    const uint8_t *gray;      // (M,)
    const uint32_t *blur;     // (M, 3) inner weight, outer weight, whole radius; 0, 0, 0: none
    const int16_t *solarise;  // (M,)
    const float *scale;       // (3,) of the normalisation
    const float *shift;       // (3,)
    void *out;                // (M, height * width * 3)
    int32_t type;             // of out
};

// The crops of one side, V of each of N images: fastsiam.pipelines.cuts.Cuts.
struct Side {
    int32_t side, views;     // the side in pixels; V
    const int32_t *box;      // (V, N, 4) top, left, height, width
    const uint8_t *flip;     // (V, N)
    const int32_t *resized;  // (V, N, 2)
    const int32_t *corner;   // (V, N, 2)
    uint8_t *crops;          // (V, N, side, side, 3), or null if only the views are wanted
    const Finish *finish;    // of the V * N crops, or null if only the crops are wanted
};

// An image, or the part of it that is needed, as pixels.
struct Image {
    const uint8_t *pixels;  // of the part, RGB
    int64_t pitch;          // bytes from one row to the next
    int32_t top, left;      // where the part begins in the image
    const uint8_t *end;     // no byte from here on may be read
};

// Decodes the pixels inside a box (top, left, bottom, right) of a JPEG, as PIL does.
//
// `room` holds as many bytes as the whole image's pixels and ROOM_BEHIND more. Returns 0, or another
// number if the JPEG is damaged, of another size, of other colours than RGB's, or doubtful.
using Decode = int (*)(const uint8_t *data, int64_t bytes, int32_t height, int32_t width,
                       const int32_t *box, uint8_t *room, Image *made);
constexpr int64_t ROOM_BEHIND = 64;

// A batch to be made, image by image, by several threads at once.
struct Job {
    int64_t count;           // N
    int64_t *taken;          // how many of them threads have taken
    const int64_t *turn;     // (N,) which image is taken first, second, ...
    const int64_t *address;  // (N,) of each image's first byte
    const int64_t *bytes;    // (N,) its length
    const int32_t *height, *width;  // (N,)
    const uint8_t *form;     // (N,)
    Decode decode;           // for JPEGs
    int32_t sides;
    const Side *side;
    uint8_t *refused;        // (N,) 1: not decoded, nothing made of it
    int64_t *time;           // (N, 4) when each stage began, and the last ended, in ns
    int64_t *thread;         // (N,) which thread it was
};

// Ends this thread's call of the library, which then reports that there was no memory: `guarded` in
// job.cpp. Nothing on the stack may need a destructor.
[[noreturn]] void out_of_memory();

// Memory of one thread that is kept from image to image. With EXACT_ROOMS it is new for each request
// and of exactly that size, so that AddressSanitizer sees every access that is outside of it.
class Room {
  public:
    // What is larger is kept until less is asked for: few images have more than 20 million pixels,
    // and sooner or later each thread would meet one.
    static constexpr int64_t KEPT = 64 << 20;

    ~Room() { free(memory); }
    // Returns at least so many bytes, aligned to 64, or null; what they held before is lost.
    uint8_t *bytes_or_null(int64_t count) {
#if defined(EXACT_ROOMS)
        constexpr bool EXACT = true;
#else
        constexpr bool EXACT = false;
#endif
        if (EXACT || count > size || (size > KEPT && count <= KEPT)) {
            free(memory);
            size = EXACT ? count : (count + 4095) / 4096 * 4096;
            void *allocated = nullptr;
            if (posix_memalign(&allocated, 64, size)) allocated = nullptr, size = 0;
            memory = (uint8_t *)allocated;
        }
        return memory;
    }
    // The same, but ends this thread's call if there is no memory.
    uint8_t *bytes(int64_t count) {
        uint8_t *there = bytes_or_null(count);
        if (!there) out_of_memory();
        return there;
    }
    template <typename T> T *of(int64_t count) { return (T *)bytes(count * sizeof(T)); }

  private:
    uint8_t *memory = nullptr;
    int64_t size = 0;
};

// Returns the code, the byte after 0xFF, of the first marker from `at` on; null if there is none.
// Escaped bytes, restarts and fill bytes belong to the entropy code.
inline const uint8_t *next_marker(const uint8_t *at, const uint8_t *end) {
    while (at < end && (at = (const uint8_t *)memchr(at, 0xFF, end - at)) && ++at < end) {
        const bool restarts = (*at & ~7) == 0xD0;
        if (*at && *at != 0xFF && !restarts) return at;
    }
    return nullptr;
}

// Makes one crop as PIL does: the box of the image is resized, a square of `side` pixels is cut out
// at `corner`, what lies outside is black, and the whole is mirrored if `flip`. `box` is in pixels of
// the whole image and inside the part that `image` holds. Writes side x side x 3 bytes, no others.
void crop(const Image &image, const int32_t *box, bool flip, const int32_t *resized,
          const int32_t *corner, int32_t side, uint8_t *out);

// Takes a crop through the photometric stage: `view` is its place among those of `how`.
void finish(const uint8_t *crop, int32_t height, int32_t width, const Finish &how, int64_t view);

}  // namespace fastsiam
