// See jpeg_huffman.h.

#include "jpeg_huffman.h"

#include <string.h>

namespace fastsiam {
namespace {

// The first members of libjpeg's private type, which are the same from 6b to libjpeg-turbo 3.2.
struct EntropyDecoder {
    void (*start_pass)(j_decompress_ptr);
    boolean (*decode_mcu)(j_decompress_ptr, JBLOCKROW *);
};

constexpr int END = 128;  // run that ends the block
constexpr int WRONG = 64;  // run that stands for an invalid code
// Maximum bits of a code and a level; 8-bit images have at most 16 + 11. A fill loads twice that.
constexpr int MOST_BITS = 28;
// Maximum bytes of an MCU, which is how far past the end corrupt data may make the decoder read.
constexpr int64_t BEHIND = D_MAX_BLOCKS_IN_MCU * DCTSIZE2 * 4 + 8;

constexpr uint8_t ZIGZAG[DCTSIZE2] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

// Positions of levels in a block. Entries past the last are for the 0 of an end-of-block code.
struct Order {
    uint8_t at[DCTSIZE2 + END + 16];
    constexpr Order() : at() {
        for (int k = 0; k < (int)sizeof at; k++) at[k] = k < DCTSIZE2 ? ZIGZAG[k] : 63;
    }
};
constexpr Order ORDER;

uint64_t eight_bytes(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, 8);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

int bits_of(Codes::Entry entry) { return entry & 63; }
int run_of(Codes::Entry entry) { return entry >> 8 & 255; }

// Returns the level, which is at the end of the entry's bits; these are the highest ones in `bits`.
int level(Codes::Entry entry, uint64_t bits) {
    const int mask = entry >> 16, count = bits_of(entry);
    const int value = (bits << count | bits >> (64 - count)) & mask;
    return value - ((value - mask / 2 - 1) >> 31 & mask);  // no branch: signs are unpredictable
}

}  // namespace

Codes::Entry Codes::entry(int symbol, int length, bool ac) {
    const int size = ac ? symbol % 16 : symbol;
    int run = ac ? symbol / 16 : 0;
    if (ac && size == 0 && run != 15) run = END;
    if (length + size > MOST_BITS) run = WRONG;
    return (length + size) | run << 8 | ((1u << size) - 1) << 16;
}

void Codes::prepare(const JHUFF_TBL &table, bool ac) {
    ac_ = ac;
    memcpy(symbol_, table.huffval, 256);
    memset(entry_, 0, sizeof entry_);
    int32_t code = 0, place = 0;
    for (int length = 1; length <= 16; length++) {
        offset_[length] = place - code;
        for (int i = 0; i < table.bits[length] && length <= LOOK; i++) {
            const Entry same = entry(symbol_[place + i], length, ac);
            const int first = (code + i) << (LOOK - length);
            for (int k = 0; k < 1 << (LOOK - length); k++) entry_[first + k] = same;
        }
        code += table.bits[length];
        place += table.bits[length];
        limit_[length] = code << (16 - length);
        code *= 2;
    }
}

Codes::Entry Codes::longer(uint64_t bits) const {
    const uint32_t code = bits >> 48;
    for (int length = LOOK + 1; length <= 16; length++)
        if (code < limit_[length])
            return entry(symbol_[(code >> (16 - length)) + offset_[length]], length, ac_);
    return 1 | WRONG << 8;
}

bool Huffman::replace(jpeg_decompress_struct *info, jmp_buf *doubt) {
    if (info->progressive_mode || info->arith_code || jpeg_has_multiple_scans(info)) return false;
    if (info->unread_marker || info->Ss != 0 || info->Se != DCTSIZE2 - 1) return false;
    for (int i = 0; i < info->comps_in_scan; i++) {
        const jpeg_component_info &own = *info->cur_comp_info[i];
        codes_[0][own.dc_tbl_no].prepare(*info->dc_huff_tbl_ptrs[own.dc_tbl_no], false);
        codes_[1][own.ac_tbl_no].prepare(*info->ac_huff_tbl_ptrs[own.ac_tbl_no], true);
    }
    blocks_ = info->blocks_in_MCU;
    for (int i = 0; i < blocks_; i++) {
        component_[i] = info->MCU_membership[i];
        dc_[i] = &codes_[0][info->cur_comp_info[component_[i]]->dc_tbl_no];
        ac_[i] = &codes_[1][info->cur_comp_info[component_[i]]->ac_tbl_no];
    }
    across_ = info->MCUs_per_row;
    left_ = (int64_t)across_ * info->MCU_rows_in_scan;
    interval_ = info->restart_interval ? info->restart_interval : left_;
    if (!unstuff(info)) return false;
    only(0, across_);
    column_ = 0;
    at_ = begin_;
    begin_interval();
    doubt_ = doubt;
    info->client_data = this;
    ((EntropyDecoder *)info->entropy)->decode_mcu = decode;
    return true;
}

// Removes stuffed zeros and restart markers, and leaves the source at the end marker. Returns false
// if there are other markers or a wrong number of restart markers, or if memory is exhausted.
bool Huffman::unstuff(jpeg_decompress_struct *info) {
    const uint8_t *from = info->src->next_input_byte, *end = from + info->src->bytes_in_buffer;
    const int64_t intervals = (left_ + interval_ - 1) / interval_;
    uint8_t *to = code_.bytes_or_null(end - from + BEHIND);
    begin_ = to;
    end_ = (int64_t *)ends_.bytes_or_null(intervals * sizeof *end_);
    if (!to || !end_) return false;  // libjpeg-turbo's own decoder needs neither buffer
    for (int64_t done = 0;;) {
        const uint8_t *marker = (const uint8_t *)memchr(from, 0xFF, end - from);
        if (!marker || marker + 1 == end) return false;
        const uint8_t code = marker[1];
        const int64_t count = marker - from + (code == 0);
        memcpy(to, from, count);
        to += count;
        from = marker + 2;
        if (code == 0) continue;
        if (done == intervals) return false;
        end_[done] = to - begin_;
        if (code == JPEG_EOI) {
            if (done != intervals - 1) return false;
            memset(to, 0, BEHIND);
            info->src->bytes_in_buffer = end - marker;
            info->src->next_input_byte = marker;
            return true;
        }
        if (code != JPEG_RST0 + done % 8) return false;
        done++;
    }
}

void Huffman::begin_interval() {
    memset(level_, 0, sizeof level_);
    to_go_ = interval_ < left_ ? interval_ : left_;
    bits_ = count_ = 0;
}

// The data of each interval must be used up, except for bits that pad its last byte.
void Huffman::end_interval() {
    const int64_t used = at_ - begin_ - count_ / 8;
    if (used != *end_) longjmp(*doubt_, DOUBT);
    at_ = begin_ + *end_++;
    if (left_) begin_interval();
}

boolean Huffman::decode(j_decompress_ptr info, JBLOCKROW *blocks) {
    Huffman &own = *(Huffman *)info->client_data;
    if (blocks && own.column_ >= own.first_ && own.column_ <= own.last_)
        own.mcu<true>(blocks);
    else
        own.mcu<false>(blocks);
    if (++own.column_ == own.across_) own.column_ = 0;
    own.left_--;
    if (--own.to_go_ == 0)
        own.end_interval();
    else if (8 * (own.at_ - own.begin_) - own.count_ > 8 * *own.end_)
        longjmp(*own.doubt_, DOUBT);
    return TRUE;
}

template <bool WANTED> void Huffman::mcu(JBLOCKROW *blocks) {
    uint64_t bits = bits_;
    int count = count_;
    const uint8_t *at = at_;
    const auto fill = [&] {  // to at least 56 bits
        bits |= eight_bytes(at) >> count;
        at += (63 - count) >> 3;
        count |= 56;
    };
    for (int i = 0; i < blocks_; i++) {
        fill();
        const Codes::Entry dc = dc_[i]->next(bits);
        const uint32_t now = level_[component_[i]] += (uint32_t)level(dc, bits);
        if (run_of(dc)) longjmp(*doubt_, DOUBT);
        bits <<= bits_of(dc);
        count -= bits_of(dc);
        JCOEF *block = WANTED ? *blocks[i] : nullptr;
        if (WANTED) block[0] = now;
        const Codes &codes = *ac_[i];
        int k = 1;
        const auto next = [&] {
            const Codes::Entry ac = codes.next(bits);
            k += run_of(ac);
            if (WANTED) block[ORDER.at[k]] = level(ac, bits);
            bits <<= bits_of(ac);
            count -= bits_of(ac);
            k++;
        };
        do {
            fill();
            next();
            if (k >= DCTSIZE2) break;
            next();
        } while (k < DCTSIZE2);
        if (k > DCTSIZE2 && k <= END) longjmp(*doubt_, DOUBT);
    }
    bits_ = bits;
    count_ = count;
    at_ = at;
}

}  // namespace fastsiam
