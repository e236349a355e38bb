// Processes a batch image by image: decoding, crops and the photometric stage.

#include "job.h"

#include <setjmp.h>
#include <time.h>

#include "photometric.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fastsiam {

namespace {

int64_t now() {
    timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    return at.tv_sec * 1000000000LL + at.tv_nsec;
}

int64_t this_thread() {
#if defined(__linux__)
    return syscall(SYS_gettid);
#else
    return 0;
#endif
}

// The jump target of `out_of_memory`.
thread_local jmp_buf no_memory;

// Calls `work(&at)`, which stores the index of its current piece of work in `at`. Returns -1, or
// that index if memory ran out.
template <typename Work> int64_t guarded(Work work) {
    volatile int64_t at = 0;
    if (setjmp(no_memory)) return at;
    work(&at);
    return -1;
}

int64_t take(int64_t *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

// Computes the bounding box (top, left, bottom, right) of all boxes of an image.
void needed(const Job &job, int64_t row, int32_t *box) {
    box[0] = box[1] = INT32_MAX;
    box[2] = box[3] = 0;
    for (int32_t s = 0; s < job.sides; s++) {
        const Side &side = job.side[s];
        for (int32_t view = 0; view < side.views; view++) {
            const int32_t *own = side.box + 4 * (view * job.count + row);
            for (int axis = 0; axis < 2; axis++) {
                const int32_t begin = own[axis], end = begin + own[2 + axis];
                if (begin < box[axis]) box[axis] = begin;
                if (end > box[2 + axis]) box[2 + axis] = end;
            }
        }
    }
}

// Larger images are decompression bombs to PIL (twice Image.MAX_IMAGE_PIXELS) and are left to it.
constexpr int64_t MOST_PIXELS = 2 * 89478485LL;

// Locates or decodes the pixels of an image; returns false if it cannot be decoded.
bool pixels_of(const Job &job, int64_t row, Image *image) {
    static thread_local Room room;
    const uint8_t *data = (const uint8_t *)job.address[row];
    const int32_t height = job.height[row], width = job.width[row];
    const int64_t size = 3LL * height * width;
    if (job.form[row] == PIXELS) {
        *image = {data, 3LL * width, 0, 0, data + size};
        return true;
    }
    if (size > 3 * MOST_PIXELS) return false;
    int32_t box[4];
    needed(job, row, box);
    uint8_t *decoded = room.bytes(size + ROOM_BEHIND);
    return job.decode(data, job.bytes[row], height, width, box, decoded, image) == 0;
}

// Makes all crops of an image, and the view of each crop if wanted, while the crop is still in the
// CPU cache. Returns the time spent on crops, in ns.
int64_t make_views(const Job &job, int64_t row, const Image &image) {
    static thread_local Room room;
    int64_t spent = 0;
    for (int32_t s = 0; s < job.sides; s++) {
        const Side &side = job.side[s];
        const int64_t size = 3LL * side.side * side.side;
        for (int32_t view = 0; view < side.views; view++) {
            const int64_t at = view * job.count + row, began = now();
            uint8_t *own = side.crops ? side.crops + at * size : room.bytes(size);
            crop(image, side.box + 4 * at, side.flip[at], side.resized + 2 * at,
                 side.corner + 2 * at, side.side, own);
            spent += now() - began;
            if (side.finish) finish(own, side.side, side.side, *side.finish, at);
        }
    }
    return spent;
}

}  // namespace

[[noreturn]] void out_of_memory() { longjmp(no_memory, 1); }

// Processes images until all are taken, but skips those that are neither JPEGs nor pixels. Returns
// -1, or the row of an image for which memory ran out; the call ends there.
EXPORT int64_t fastsiam_make(const Job *job) {
    return guarded([job](volatile int64_t *at) {
        for (int64_t place; (place = take(job->taken)) < job->count;) {
            const int64_t row = *at = job->turn[place];
            if (job->form[row] > PIXELS) continue;
            int64_t time[4] = {now(), 0, 0, 0};
            Image image;
            job->refused[row] = !pixels_of(*job, row, &image);
            if (!job->refused[row]) {
                time[1] = now();
                time[2] = time[1] + make_views(*job, row, image);
                time[3] = now();
            }
            memcpy(job->time + 4 * row, time, sizeof time);
            job->thread[row] = this_thread();
        }
    });
}

// Processes one image whose pixels, height x width x 3, the caller provides. Returns -1, or the row
// if memory ran out.
EXPORT int64_t fastsiam_make_pixels(const Job *job, int64_t row, const uint8_t *pixels) {
    const int64_t pitch = 3LL * job->width[row];
    const Image image = {pixels, pitch, 0, 0, pixels + pitch * job->height[row]};
    return guarded([&](volatile int64_t *at) {
        *at = row;
        make_views(*job, row, image);
    });
}

// Applies the photometric stage to crops until all are taken. Returns -1, or the index of a crop
// for which memory ran out; the call ends there.
EXPORT int64_t fastsiam_finish(const uint8_t *crops, int64_t count, int32_t height, int32_t width,
                               const Finish *how, int64_t *taken) {
    const int64_t size = 3LL * height * width;
    return guarded([=](volatile int64_t *at) {
        for (int64_t view; (view = take(taken)) < count;)
            finish(crops + (*at = view) * size, height, width, *how, view);
    });
}

// Replaces every level of each channel by a number of `size` bytes, in images until all are taken;
// see `look_up`.
EXPORT void fastsiam_normalize(const uint8_t *images, int64_t count, int64_t pixels,
                               const uint8_t *table, int32_t size, uint8_t *out, int64_t *taken) {
    for (int64_t image; (image = take(taken)) < count;) {
        const int64_t first = 3 * image * pixels;
        look_up(images + first, pixels, table, size, out + first * size);
    }
}

// Returns the offset of the second byte of a JPEG's first marker from `begin` on, or -1.
EXPORT int64_t fastsiam_next_marker(const uint8_t *data, int64_t begin, int64_t bytes) {
    const uint8_t *at = next_marker(data + begin, data + bytes);
    return at ? at - data : -1;
}

}  // namespace fastsiam
