// Decodes part of a JPEG with libjpeg-turbo's public functions for cropping and skipping.
//
// bench compiles it on demand. The output columns start at an iMCU boundary at or before the part's
// left edge. Upsampling does not see pixels beyond these columns, so the pixels at both ends can
// differ from those of the entire image.

#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

struct Errors {
    jpeg_error_mgr manager;  // must be first: libjpeg-turbo gets a pointer to it
    jmp_buf caller;
};

// Replaces libjpeg-turbo's error handler, which exits the process.
static void leave(j_common_ptr codec) {
    longjmp(reinterpret_cast<Errors *>(codec->err)->caller, 1);
}

static void print_nothing(j_common_ptr) {}

// Decodes the rows of a box to RGB, with its columns and possibly some more. The arguments are
// those of fastsiam_decode; the image's height and width are ignored.
//
// box: top, left, bottom, right, in pixels. out: large enough for the entire image; its rows are
// contiguous. columns: the first column of out in the image, and the number of columns.
// Returns 0, or 1 if libjpeg-turbo rejects the image or warns about it.
extern "C" int crop_and_skip(const uint8_t *data, int64_t bytes, int32_t, int32_t,
                             const int32_t *box, uint8_t *out, uint32_t *columns) {
    jpeg_decompress_struct codec;
    Errors errors;
    codec.err = jpeg_std_error(&errors.manager);
    errors.manager.error_exit = leave;
    errors.manager.output_message = print_nothing;
    jpeg_create_decompress(&codec);
    if (setjmp(errors.caller)) {
        jpeg_destroy_decompress(&codec);
        return 1;
    }
    jpeg_mem_src(&codec, data, bytes);
    jpeg_read_header(&codec, TRUE);
    codec.out_color_space = JCS_RGB;
    codec.dct_method = JDCT_ISLOW;
    codec.do_fancy_upsampling = TRUE;
    jpeg_start_decompress(&codec);
    JDIMENSION left = box[1], width = box[3] - box[1];
    jpeg_crop_scanline(&codec, &left, &width);
    columns[0] = left;
    columns[1] = width;
    jpeg_skip_scanlines(&codec, box[0]);
    while (codec.output_scanline < static_cast<JDIMENSION>(box[2])) {
        jpeg_read_scanlines(&codec, &out, 1);
        out += 3 * width;
    }
    int warnings = errors.manager.num_warnings > 0;
    jpeg_destroy_decompress(&codec);  // the rows below the box are never decoded
    return warnings;
}
