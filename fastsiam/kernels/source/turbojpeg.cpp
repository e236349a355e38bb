// Decodes whole JPEGs by TurboJPEG's functions, whose places the caller states: for where the
// library of jpeg.cpp could not be compiled, but another package brings libjpeg-turbo.

#include "job.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fastsiam {
namespace {

using Handle = void *;
using Bytes = unsigned long;

Handle (*init)();
int (*header)(Handle, const uint8_t *, Bytes, int *width, int *height, int *sampling, int *space);
int (*decompress)(Handle, const uint8_t *, Bytes, uint8_t *, int width, int pitch, int height,
                  int format, int flags);
int (*destroy)(Handle);

constexpr int RGB = 0, ACCURATE_DCT = 4096;  // TJPF_RGB, TJFLAG_ACCURATEDCT: what PIL does

// A thread's decompressor.
struct Decompressor {
    Handle handle = nullptr;
    ~Decompressor() { end(); }
    void end() {
        if (handle) destroy(handle);
        handle = nullptr;
    }
    bool decode(const uint8_t *data, int64_t bytes, int32_t height, int32_t width, uint8_t *room) {
        int found[4];
        if (!handle && !(handle = init())) return false;
        if (header(handle, data, bytes, found, found + 1, found + 2, found + 3)) return false;
        if (found[0] != width || found[1] != height) return false;
        return !decompress(handle, data, bytes, room, width, 3 * width, height, RGB, ACCURATE_DCT);
    }
};

}  // namespace

// Takes tjInitDecompress, tjDecompressHeader3, tjDecompress2 and tjDestroy.
EXPORT void fastsiam_turbojpeg(void *init_, void *header_, void *decompress_, void *destroy_) {
    init = (decltype(init))init_;
    header = (decltype(header))header_;
    decompress = (decltype(decompress))decompress_;
    destroy = (decltype(destroy))destroy_;
}

// `Decode`, after fastsiam_turbojpeg was called.
EXPORT int fastsiam_decode_turbojpeg(const uint8_t *data, int64_t bytes, int32_t height,
                                     int32_t width, const int32_t *, uint8_t *room, Image *made) {
    static thread_local Decompressor own;
    const int64_t pitch = 3LL * width;
    *made = {room, pitch, 0, 0, room + pitch * height + ROOM_BEHIND};
    if (own.decode(data, bytes, height, width, room)) return 0;
    own.end();  // version 2.1 reads no header any more after one that ended early
    return 1;
}

}  // namespace fastsiam
