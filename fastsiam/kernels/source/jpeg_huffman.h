// Huffman decoder for images with one sequential scan, which replaces libjpeg-turbo's.
#pragma once

#include "job.h"

#include <setjmp.h>
#include <stdio.h>  // jpeglib.h needs it

#include <jpeglib.h>

namespace fastsiam {

static_assert(LIBJPEG_TURBO_VERSION_NUMBER >= 2001000, "libjpeg-turbo 2.1 or newer is needed");
// Whether this version is known to have the private structures that `Huffman` relies on.
constexpr bool KNOWN = LIBJPEG_TURBO_VERSION_NUMBER < 4000000;

// Lookup table of Huffman codes by the next LOOK bits, which is enough for most codes.
class Codes {
  public:
    static constexpr int LOOK = 10;
    // Lowest byte: bits of the code plus bits (size) of the level after it. Next byte: number of
    // zero levels before that level. Upper bytes: 2^size - 1. 0: the code is longer than LOOK.
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
    uint32_t limit_[17];  // by length: the first 16-bit value beyond all codes
    int32_t offset_[17];  // by length: from a code to the index of its symbol
    uint8_t symbol_[256];
    bool ac_;
};

// Replaces libjpeg-turbo's Huffman decoder, which checks each byte for markers. This one removes
// them beforehand, loads eight bytes at a time, and gets a code and its level by one lookup.
class Huffman {
  public:
    // Installs this decoder, and returns whether it can decode the image. Call it after
    // jpeg_start_decompress. It jumps to `doubt` with the value DOUBT if libjpeg-turbo must decide.
    bool replace(jpeg_decompress_struct *info, jmp_buf *doubt);
    static constexpr int DOUBT = 2;
    // Sets the range of MCUs that are wanted in each row.
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
    int64_t left_, interval_, to_go_;  // MCUs: left in the image, per interval, left in this one
    uint32_t level_[MAX_COMPS_IN_SCAN];  // DC of the last block; corrupt data may wrap it around
    uint64_t bits_;
    int count_;          // number of valid bits in bits_, from the highest
    const uint8_t *at_;  // the byte after these bits
    Room code_;          // entropy-coded data without markers and stuffed zeros
    Room ends_;          // ends of the intervals
    int64_t *end_;       // end of the current interval
    const uint8_t *begin_;
    jmp_buf *doubt_;
};

}  // namespace fastsiam
