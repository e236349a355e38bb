// JPEGs to their own planes, for `fastsiam convert --yuv`.

#include <setjmp.h>
#include <stdio.h>
// What follows needs what is above.
#include <jpeglib.h>

#include "planes.h"

namespace fastsiam {

namespace {

struct Errors {
    jpeg_error_mgr manager;
    jmp_buf leave;
};

[[noreturn]] void leave(j_common_ptr info) { longjmp(((Errors *)info->err)->leave, 1); }

void count_warning(j_common_ptr info, int level) {
    if (level < 0) info->err->num_warnings++;
}

void say_nothing(j_common_ptr) {}

// Tells whether all of a progressive JPEG's scans were there: else decoders make up what lacks.
bool complete(const jpeg_decompress_struct &info) {
    if (!info.coef_bits) return true;
    for (int i = 0; i < info.num_components; i++)
        for (int k = 0; k < DCTSIZE2; k++)
            if (info.coef_bits[i][k]) return false;
    return true;
}

// Notes size and sampling; returns the record's length, 0 if it is not an image for this.
int64_t describe(const jpeg_decompress_struct &info, PlanesHeader *header, Plane *plane) {
    const bool gray = info.jpeg_color_space == JCS_GRAYSCALE && info.num_components == 1;
    const bool colour = info.jpeg_color_space == JCS_YCbCr && info.num_components == 3;
    if (!(gray || colour) || info.data_precision != 8) return 0;
    *header = {{},
               (int32_t)info.image_height,
               (int32_t)info.image_width,
               (uint8_t)info.num_components,
               {}};
    memcpy(header->magic, PLANES_MAGIC, sizeof header->magic);
    for (int i = 0; i < info.num_components; i++) {
        const jpeg_component_info &own = info.comp_info[i];
        header->sampling[i] = own.h_samp_factor << 4 | own.v_samp_factor;
    }
    return planes_of(*header, plane);
}

// Decodes row of blocks by row of blocks, and keeps of each component what is inside the image.
void read_planes(jpeg_decompress_struct *info, const Plane *plane, uint8_t *out) {
    JSAMPROW rows[3][4 * DCTSIZE];
    JSAMPARRAY planes[3] = {rows[0], rows[1], rows[2]};
    for (int i = 0; i < info->num_components; i++) {
        const jpeg_component_info &own = info->comp_info[i];
        const JDIMENSION width = own.width_in_blocks * DCTSIZE;
        const JDIMENSION height = own.v_samp_factor * DCTSIZE;
        JSAMPARRAY memory = info->mem->alloc_sarray((j_common_ptr)info, JPOOL_IMAGE, width, height);
        memcpy(rows[i], memory, height * sizeof *memory);
    }
    const JDIMENSION lines = info->max_v_samp_factor * DCTSIZE;
    for (int32_t strip = 0; info->output_scanline < info->output_height; strip++) {
        jpeg_read_raw_data(info, planes, lines);
        for (int i = 0; i < info->num_components; i++) {
            const int32_t height = info->comp_info[i].v_samp_factor * DCTSIZE;
            const int64_t width = plane[i].width;
            for (int32_t y = 0; y < height && strip * height + y < plane[i].height; y++)
                memcpy(out + plane[i].start + (strip * height + y) * width, rows[i][y], width);
        }
    }
}

}  // namespace

// Makes the record of a JPEG of so many pixels. `out` holds `room` bytes, of which a record takes
// 80 + 3 * height * width at most. Returns its length, or 0 if the JPEG is damaged or doubtful in
// any way, of another size, or of other colours than gray and YCbCr; `out` then holds nothing.
extern "C" __attribute__((visibility("default"))) int64_t fastsiam_planes(
    const uint8_t *data, int64_t bytes, int32_t height, int32_t width, uint8_t *out, int64_t room) {
    Errors errors;
    jpeg_decompress_struct info;
    PlanesHeader header;
    Plane plane[3];
    info.err = jpeg_std_error(&errors.manager);
    errors.manager.error_exit = leave;
    errors.manager.emit_message = count_warning;
    errors.manager.output_message = say_nothing;
    if (setjmp(errors.leave)) {
        jpeg_destroy_decompress(&info);
        return 0;
    }
    jpeg_create_decompress(&info);
    jpeg_mem_src(&info, (unsigned char *)data, bytes);
    jpeg_read_header(&info, TRUE);
    volatile int64_t length = describe(info, &header, plane);
    if (length > room || header.height != height || header.width != width) length = 0;
    if (length) {
        info.raw_data_out = TRUE;
        jpeg_start_decompress(&info);
        memcpy(out, &header, sizeof header);
        read_planes(&info, plane, out);
        memset(out + length - PLANES_SLACK, 0, PLANES_SLACK);
        const bool whole = complete(info);  // finishing takes away what it looks at
        jpeg_finish_decompress(&info);
        if (info.err->num_warnings || !whole) length = 0;
    }
    jpeg_destroy_decompress(&info);
    return length;
}

}  // namespace fastsiam
