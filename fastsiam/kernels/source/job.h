// Structures and functions that the kernels share. library.py mirrors the structures.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// Marks functions that Python calls.
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fastsiam {

// How an image is stored in memory.
enum Form : uint8_t {
    JPEG = 0,    // encoded
    PIXELS = 1,  // height x width x 3, uint8 RGB
};

enum Type : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// Photometric parameters of M crops of one size: fastsiam.views.photometric.operations.Operations.
struct Finish {
    const int8_t *order;      // (M, 4)
    const float *factor;      // (M, 4)
    const uint8_t *gray;      // (M,)
    const uint32_t *blur;     // (M, 3) inner weight, outer weight, integer radius; 0, 0, 0: no blur
    const int16_t *solarise;  // (M,)
    const float *scale;       // (3,) for the normalisation
    const float *shift;       // (3,)
    void *out;                // (M, height * width * 3)
    int32_t type;             // Type of out
};

// V crops of one size from each of N images: fastsiam.pipelines.cuts.Cuts.
struct Side {
    int32_t side, views;     // side of a crop in pixels; V
    const int32_t *box;      // (V, N, 4) top, left, height, width
    const uint8_t *flip;     // (V, N)
    const int32_t *resized;  // (V, N, 2)
    const int32_t *corner;   // (V, N, 2)
    uint8_t *crops;          // (V, N, side, side, 3), or null if only the views are wanted
    const Finish *finish;    // for the V * N crops, or null if only the crops are wanted
};

// The pixels of an image, or of the part of it that is needed.
struct Image {
    const uint8_t *pixels;  // RGB
    int64_t pitch;          // bytes from one row to the next
    int32_t top, left;      // position of the part in the image
    const uint8_t *end;     // end of the memory that may be read
};

// Decodes the pixels inside a box (top, left, bottom, right) of a JPEG, identical to PIL's.
//
// `room` is a buffer for the pixels of the entire image plus ROOM_BEHIND bytes. Returns 0, or
// nonzero if the JPEG is corrupt, has an unexpected size or colour space, or if only PIL can tell.
using Decode = int (*)(const uint8_t *data, int64_t bytes, int32_t height, int32_t width,
                       const int32_t *box, uint8_t *room, Image *made);
constexpr int64_t ROOM_BEHIND = 64;

// A batch of images, which several threads process concurrently, one image at a time.
struct Job {
    int64_t count;           // N
    int64_t *taken;          // number of images that threads have taken
    const int64_t *turn;     // (N,) order in which images are taken
    const int64_t *address;  // (N,) address of each image's first byte
    const int64_t *bytes;    // (N,) size of each image
    const int32_t *height, *width;  // (N,)
    const uint8_t *form;     // (N,) Form of each image
    Decode decode;           // for JPEGs
    int32_t sides;
    const Side *side;
    uint8_t *refused;        // (N,) 1: not decoded, no crops made
    int64_t *time;           // (N, 4) start of each stage and end of the last one, in ns
    int64_t *thread;         // (N,) ID of the thread that processed the image
};

// Aborts this thread's call into the library, which then reports that memory ran out; see `guarded`
// in job.cpp. It uses longjmp, so no object on the stack may need a destructor.
[[noreturn]] void out_of_memory();

// Scratch buffer of one thread, reused from image to image. With EXACT_ROOMS each request allocates
// exactly the requested size, so that AddressSanitizer detects every access out of bounds.
class Room {
  public:
    // A buffer above this size, in bytes, is freed when at most this size is requested. Few images
    // have more than 20 million pixels, but sooner or later every thread would keep a buffer for
    // one.
    static constexpr int64_t KEPT = 64 << 20;

    ~Room() { free(memory); }
    // Returns at least `count` bytes, aligned to 64, or null. The previous contents are lost.
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
    // Like bytes_or_null, but calls out_of_memory instead of returning null.
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

// Returns the second byte (after 0xFF) of the first JPEG marker from `at` on, or null. Escaped
// bytes, restart markers and fill bytes are skipped: they belong to entropy-coded data.
inline const uint8_t *next_marker(const uint8_t *at, const uint8_t *end) {
    while (at < end && (at = (const uint8_t *)memchr(at, 0xFF, end - at)) && ++at < end) {
        const bool restarts = (*at & ~7) == 0xD0;
        if (*at && *at != 0xFF && !restarts) return at;
    }
    return nullptr;
}

// Makes one crop, identical to PIL's: resizes the box, cuts out a square of `side` pixels at
// `corner` (black outside of the resized box), and mirrors it if `flip`. `box` is in pixels of the
// entire image and must be inside the part in `image`. Writes exactly side x side x 3 bytes.
void crop(const Image &image, const int32_t *box, bool flip, const int32_t *resized,
          const int32_t *corner, int32_t side, uint8_t *out);

// Applies the photometric stage to a crop; `view` is the index of its parameters in `how`.
void finish(const uint8_t *crop, int32_t height, int32_t width, const Finish &how, int64_t view);

}  // namespace fastsiam
