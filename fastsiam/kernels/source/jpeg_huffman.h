// Huffman decoding of images of one sequential scan, in libjpeg-turbo's place.
#pragma once

#include "job.h"

#include <setjmp.h>
#include <stdio.h>  // jpeglib.h needs it

#include <jpeglib.h>

namespace fastsiam {

static_assert(LIBJPEG_TURBO_VERSION_NUMBER >= 2001000, "libjpeg-turbo 2.1 or newer is needed");
// Whether `Huffman` knows the private structures of this version that it relies on.
constexpr bool KNOWN = LIBJPEG_TURBO_VERSION_NUMBER < 4000000;

// What the next bits of the entropy code mean, by as many bits as codes mostly have.
class Codes {
  public:
    static constexpr int LOOK = 10;
    // A code's length with that of the level behind it in the lowest byte, how many levels 0 come
    // first in the next one, and 2^size - 1 of the level's size. 0: the code is longer than LOOK.
    using Entry = uint32_t;

    void prepare(const JHUFF_TBL &table, bool ac);
    Entry next(uint64_t bits) const {
        const Entry entry = entry_[bits >> (64 - LOOK)];
        return __builtin_expect(entry != 0, 1) ? entry : longer(bits);
    }

  private:
    Entry longer(uint64_t bits) const;
    static Entry entry(int symbol, int length, bool ac);

    Entry entry_[1 << LOOK];
    uint32_t limit_[17];  // the first 16 bits that are beyond all codes of a length
    int32_t offset_[17];  // from such a code to its symbol's place
    uint8_t symbol_[256];
    bool ac_;
};

// Takes the place of libjpeg-turbo's Huffman decoder, which looks for markers at each byte. Here
// they are taken out before, the bits come by eight bytes, and one look gives a code and its level.
class Huffman {
  public:
    // Tells whether it can decode this image, and will do so; after jpeg_start_decompress. It jumps
    // to `doubt` with the value DOUBT when it finds what libjpeg-turbo should judge.
    bool replace(jpeg_decompress_struct *info, jmp_buf *doubt);
    static constexpr int DOUBT = 2;
    // Only these MCUs of each row are wanted.
    void only(int first, int last) { first_ = first, last_ = last; }

  private:
    bool unstuff(jpeg_decompress_struct *info);
    void begin_interval();
    void end_interval();
    static boolean decode(j_decompress_ptr info, JBLOCKROW *blocks);
    template <bool WANTED> void mcu(JBLOCKROW *blocks);

    Codes codes_[2][NUM_HUFF_TBLS];
    const Codes *dc_[D_MAX_BLOCKS_IN_MCU], *ac_[D_MAX_BLOCKS_IN_MCU];
    int component_[D_MAX_BLOCKS_IN_MCU];
    int blocks_, across_, first_, last_, column_;
    int64_t left_, interval_, to_go_;  // MCUs: of the image, of an interval, of the one at hand
    uint32_t level_[MAX_COMPS_IN_SCAN];  // DC, of the last block; damage may take it around
    uint64_t bits_;
    int count_;          // of them; the highest ones
    const uint8_t *at_;  // behind them
    Room code_;          // without markers and stuffed zeros
    Room ends_;          // of the intervals
    int64_t *end_;       // of the interval at hand
    const uint8_t *begin_;
    jmp_buf *doubt_;
};

}  // namespace fastsiam
