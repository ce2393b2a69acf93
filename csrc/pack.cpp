#include "pack.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace hc {

namespace {

uint8_t low_nibble(uint8_t v) { return v & 15; }

// Where the packed regions of one row begin; see the heads in block_types.h.
struct Packed {
    uint8_t* row;
    int64_t blocks, unit_bytes, header;
    uint8_t* lane(int64_t b) const {
        const int64_t group = b / kLanes * kLanes;
        return row + header + group * unit_bytes + (b - group) * 4;
    }
    int64_t stride(int64_t b) const {
        const int64_t left = blocks - b / kLanes * kLanes;
        return 4 * (left < kLanes ? left : kLanes);
    }
    void put(int64_t b, int64_t unit, const uint8_t* bytes) const {
        std::memcpy(lane(b) + unit * stride(b), bytes, 4);
    }
    void put_nibbles(int64_t b, const uint8_t* codes) const {
        for (int k = 0; k < 4; ++k) {
            uint8_t unit[4];
            for (int c = 0; c < 4; ++c)
                unit[c] = uint8_t(low_nibble(codes[4 * k + c]) | codes[16 + 4 * k + c] << 4);
            put(b, k, unit);
        }
    }
    void put_fifth_bits(int64_t b, const uint8_t* codes) const {
        uint8_t unit[4] = {};
        for (int e = 0; e < kBlock; ++e) unit[e % 4] = uint8_t(unit[e % 4] | (codes[e] >> 4 & 1) << (e / 4));
        put(b, 4, unit);
    }
};

// Types of 32 weights: header arrays first, then codes that lie as the file has them, but for the fifth bits.
void pack_small(Type type, const uint8_t* from, const Packed& to) {
    const int64_t size = block_size(type).bytes;
    const bool minimum = type == Q4_1 || type == Q5_1, five = type == Q5_0 || type == Q5_1;
    const int64_t scale = type == MXFP4 ? 1 : 2, head = scale + (minimum ? 2 : 0);
    for (int64_t b = 0; b < to.blocks; ++b, from += size) {
        std::memcpy(to.row + b * scale, from, size_t(scale));
        if (minimum) std::memcpy(to.row + 2 * to.blocks + 2 * b, from + 2, 2);
        const uint8_t* codes = from + head + (five ? 4 : 0);
        for (int64_t unit = 0; unit < (size - (codes - from)) / 4; ++unit) to.put(b, unit, codes + 4 * unit);
        if (!five) continue;
        uint32_t bits;
        std::memcpy(&bits, from + head, 4);
        uint8_t fifth[kBlock];
        for (int e = 0; e < kBlock; ++e) fifth[e] = uint8_t((bits >> e & 1) << 4);
        to.put_fifth_bits(b, fifth);
    }
}

// Q4_K and Q5_K: d, dmin, twelve bytes of 6-bit scales and minima, high bits (Q5_K), nibbles.
void pack_k(Type type, const uint8_t* from, const Packed& to) {
    const int64_t supers = to.blocks / 8;
    for (int64_t s = 0; s < supers; ++s, from += block_size(type).bytes) {
        std::memcpy(to.row + 2 * s, from, 2);
        std::memcpy(to.row + 2 * supers + 2 * s, from + 2, 2);
        const uint8_t *scales = from + 4, *high = from + 16, *nibbles = high + (type == Q5_K ? 32 : 0);
        uint32_t top = 0;
        for (int b = 0; b < 8; ++b) {
            const int scale = b < 4 ? scales[b] & 63 : (scales[b + 4] & 15) | scales[b - 4] >> 6 << 4;
            const int minimum = b < 4 ? scales[b + 4] & 63 : scales[b + 4] >> 4 | scales[b] >> 6 << 4;
            to.row[4 * supers + 8 * s + b] = uint8_t((scale & 15) | (minimum & 15) << 4);
            top |= uint32_t(scale >> 4 | minimum >> 4 << 2) << (4 * b);
            uint8_t codes[kBlock];
            for (int e = 0; e < kBlock; ++e) {
                const uint8_t byte = nibbles[b / 2 * 32 + e];
                codes[e] =
                    uint8_t((b % 2 ? byte >> 4 : byte & 15) | (type == Q5_K ? (high[e] >> b & 1) << 4 : 0));
            }
            to.put_nibbles(8 * s + b, codes);
            if (type == Q5_K) to.put_fifth_bits(8 * s + b, codes);
        }
        std::memcpy(to.row + 12 * supers + 4 * s, &top, 4);
    }
}

void pack_q6_k(const uint8_t* from, const Packed& to) {
    const int64_t supers = to.blocks / 8;
    for (int64_t s = 0; s < supers; ++s, from += block_size(Q6_K).bytes) {
        const uint8_t *low = from, *high = from + 128, *scales = from + 192;
        std::memcpy(to.row + 2 * s, from + 208, 2);
        for (int b = 0; b < 8; ++b) {
            to.row[2 * supers + 8 * s + b] = scales[2 * b];
            to.row[2 * supers + to.blocks + 8 * s + b] = scales[2 * b + 1];
            const int half = b / 4, quarter = b % 4;  // of 128 weights, and within it
            uint8_t codes[kBlock], top[2][4] = {};
            for (int e = 0; e < kBlock; ++e) {
                const uint8_t byte = low[half * 64 + quarter % 2 * 32 + e];
                codes[e] = quarter < 2 ? byte & 15 : byte >> 4;
                const int bits = high[half * 32 + e] >> (2 * quarter) & 3;
                uint8_t& unit = top[e / 16][e % 4];
                unit = uint8_t(unit | bits << (2 * (e / 4 % 4)));
            }
            to.put_nibbles(8 * s + b, codes);
            to.put(8 * s + b, 4, top[0]);
            to.put(8 * s + b, 5, top[1]);
        }
    }
}

}  // namespace

int64_t row_size(Type type, int64_t cols) {
    const BlockSize size = block_size(type);
    if (!size.weights)
        throw std::invalid_argument("block type " + std::to_string(int(type)) + " has no kernels");
    if (cols % size.weights)
        throw std::invalid_argument("a row of " + std::to_string(cols) +
                                    " weights is not a multiple of its block of " +
                                    std::to_string(size.weights));
    return row_bytes(type, cols);
}

void pack_row(Type type, const uint8_t* from, int64_t cols, uint8_t* to) {
    if (!is_quantised(type)) {
        std::memcpy(to, from, size_t(row_size(type, cols)));
        return;
    }
    const int64_t blocks = cols / kBlock, units = type == Q8_0                                   ? 8
                                                  : type == Q6_K                                 ? 6
                                                  : type == Q5_0 || type == Q5_1 || type == Q5_K ? 5
                                                                                                 : 4;
    const Packed packed{to, blocks, 4 * units, row_size(type, cols) - 4 * units * blocks};
    if (type == Q6_K)
        pack_q6_k(from, packed);
    else if (type == Q4_K || type == Q5_K)
        pack_k(type, from, packed);
    else
        pack_small(type, from, packed);
}

}  // namespace hc
