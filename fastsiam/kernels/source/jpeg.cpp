// Decodes only the part of a JPEG that a box needs, using libjpeg-turbo with PIL's settings. Every
// pixel inside the box is identical to that of a complete decode.
//
// For rows above the box only the entropy-coded data is read. Rows below it are skipped, and so are
// columns beside it, in units of iMCUs. Corrupt data below the box may go unnoticed: PIL continues
// after it, and the box's pixels are the same. Images that this decoder rejects are left to PIL.

#include "jpeg_huffman.h"

namespace fastsiam {
namespace {

struct Handler {
    jpeg_error_mgr error;  // must be first: libjpeg points to it, and `refuse` casts that pointer
    jmp_buf refuse;
};

[[noreturn]] void refuse(j_common_ptr info) { longjmp(((Handler *)info->err)->refuse, 1); }

void message(j_common_ptr info, int level) {
    if (level < 0) refuse(info);  // a warning
}

// Decodes one image. It keeps no tables of previous images: an image without tables is rejected.
class Decompressor {
  public:
    Decompressor(const uint8_t *data, int64_t bytes, Huffman &huffman)
        : data_(data), bytes_(bytes), huffman_(huffman) {
        info_.err = jpeg_std_error(&handler_.error);
        handler_.error.error_exit = refuse;
        handler_.error.emit_message = message;
        handler_.error.output_message = [](j_common_ptr) {};
    }

    // Returns whether the box was decoded.
    bool decode(int32_t height, int32_t width, const int32_t *box, uint8_t *room, Image *made) {
        for (quick_ = KNOWN;; quick_ = false) {
            const int jumped = setjmp(handler_.refuse);
            bool done = false;
            if (!jumped) {
                jpeg_create_decompress(&info_);
                done = begin(height, width) && rows(box, room, made);
            }
            jpeg_destroy_decompress(&info_);
            if (jumped != Huffman::DOUBT) return done;
        }
    }

  private:
    bool begin(int32_t height, int32_t width);
    bool rows(const int32_t *box, uint8_t *room, Image *made);
    bool ends_well();

    const uint8_t *const data_;
    const int64_t bytes_;
    Huffman &huffman_;
    bool quick_;  // whether huffman_ may decode; after `begin`, whether it does
    jpeg_decompress_struct info_ = {};
    Handler handler_;
};

// Reads the header; returns false if pixels could differ from PIL's or from the expected size.
bool Decompressor::begin(int32_t height, int32_t width) {
    jpeg_mem_src(&info_, data_, bytes_);
    jpeg_read_header(&info_, TRUE);
    const J_COLOR_SPACE space = info_.jpeg_color_space;
    if (space != JCS_GRAYSCALE && space != JCS_YCbCr && space != JCS_RGB) return false;
    if ((int32_t)info_.image_height != height || (int32_t)info_.image_width != width) return false;
    if (info_.data_precision != 8) return false;
    if (!info_.progressive_mode && info_.Se != DCTSIZE2 - 1) return false;  // lossless
    info_.out_color_space = JCS_RGB;
    jpeg_start_decompress(&info_);
    quick_ = quick_ && huffman_.replace(&info_, &handler_.refuse);
    // libjpeg smooths a progressive file with missing coefficients, differently in each version.
    for (int i = 0; i < info_.num_components && info_.coef_bits; i++)
        for (int k = 0; k < DCTSIZE2; k++)
            if (info_.coef_bits[i][k]) return false;
    return true;
}

// Decodes the rows and columns that the box needs.
bool Decompressor::rows(const int32_t *box, uint8_t *room, Image *made) {
    const JDIMENSION height = info_.output_height, width = info_.output_width;
    const JDIMENSION column = DCTSIZE * info_.max_h_samp_factor;  // maximum width of an iMCU
    JDIMENSION top = 0, left = 0, bottom = box[2];
    // Upsampling treats the first and last column as edges of the image: include one on each side.
    if (width > 2 * column) {
        JDIMENSION first = box[1] ? (box[1] - 1) / column * column : 0;
        if (width - first < column) first -= column;  // a few columns are upsampled differently
        JDIMENSION last = ((JDIMENSION)box[3] / column + 1) * column;
        if (last > width) last = width;
        JDIMENSION wide = last - first;
        left = first;
        jpeg_crop_scanline(&info_, &left, &wide);
        const int mcu = info_.comps_in_scan == 1 ? DCTSIZE : column;
        huffman_.only(left / mcu, (left + wide - 1) / mcu);
    }
    if (box[0] && !info_.arith_code) {
        top = box[0];
        jpeg_skip_scanlines(&info_, top);
    }
    const int64_t pitch = 3LL * info_.output_width;
    *made = {room, pitch, (int32_t)top, (int32_t)left,
             room + 3LL * height * width + ROOM_BEHIND};
    while (info_.output_scanline < height) {
        if (info_.output_scanline >= bottom) {
            if (ends_well()) return true;
            bottom = height;
        }
        JSAMPROW row[MAX_SAMP_FACTOR];
        row[0] = room + (info_.output_scanline - top) * pitch;
        for (int i = 1; i < MAX_SAMP_FACTOR; i++) row[i] = row[i - 1] + pitch;
        const JDIMENSION left_over = height - info_.output_scanline;
        jpeg_read_scanlines(&info_, row,
                            left_over < MAX_SAMP_FACTOR ? left_over : MAX_SAMP_FACTOR);
    }
    jpeg_finish_decompress(&info_);
    return true;
}

// Returns whether the remaining entropy-coded data is followed by the end marker. If it is
// truncated or followed by another marker, PIL could fail, so it must be decoded.
bool Decompressor::ends_well() {
    if (quick_ || jpeg_has_multiple_scans(&info_)) return true;  // checked before
    if (info_.unread_marker) return info_.unread_marker == JPEG_EOI;
    const uint8_t *begin = info_.src->next_input_byte;
    const uint8_t *at = next_marker(begin, begin + info_.src->bytes_in_buffer);
    return at && *at == JPEG_EOI;
}

}  // namespace

EXPORT int fastsiam_decode(const uint8_t *data, int64_t bytes, int32_t height, int32_t width,
                           const int32_t *box, uint8_t *room, Image *made) {
    static thread_local Huffman huffman;
    return !Decompressor(data, bytes, huffman).decode(height, width, box, room, made);
}

}  // namespace fastsiam
