#include "pack.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace hc {

namespace {

int units_of(Type type) {
    switch (type) {
        case Q8_0: return 8;
        case Q6_K: return 6;
        case Q5_0:
        case Q5_1:
        case Q5_K: return 5;
        default: return 4;
    }
}

// One block of a file: its codes in order, and what its header holds.
struct FileBlock {
    uint8_t codes[256];
    uint8_t d[2], m[2];  // scale and minimum, or those of a super-block
    uint8_t scales[16], minima[8];
};

// Types of 32 weights: scale, minimum, fifth bits, nibbles or bytes.
void read_small(Type type, const uint8_t* from, FileBlock& to) {
    const int64_t scale = type == MXFP4 ? 1 : 2;
    std::memcpy(to.d, from, size_t(scale));
    from += scale;
    if (type == Q4_1 || type == Q5_1) std::memcpy(to.m, from, 2), from += 2;
    if (type == Q8_0) {
        std::memcpy(to.codes, from, kBlock);
        return;
    }
    uint32_t fifth = 0;
    if (units_of(type) == 5) std::memcpy(&fifth, from, 4), from += 4;
    for (int e = 0; e < kBlock; ++e) {
        const int nibble = e < 16 ? from[e] & 15 : from[e - 16] >> 4;
        to.codes[e] = uint8_t(nibble | (fifth >> e & 1) << 4);
    }
}

// Q4_K and Q5_K: d, dmin, twelve bytes of 6-bit scales and minima, high bits (Q5_K), nibbles.
void read_k(Type type, const uint8_t* from, FileBlock& to) {
    std::memcpy(to.d, from, 2);
    std::memcpy(to.m, from + 2, 2);
    const uint8_t *scales = from + 4, *high = from + 16, *nibbles = high + (type == Q5_K ? 32 : 0);
    for (int b = 0; b < 8; ++b) {
        to.scales[b] = uint8_t(b < 4 ? scales[b] & 63 : (scales[b + 4] & 15) | scales[b - 4] >> 6 << 4);
        to.minima[b] = uint8_t(b < 4 ? scales[b + 4] & 63 : scales[b + 4] >> 4 | scales[b] >> 6 << 4);
        for (int e = 0; e < kBlock; ++e) {
            const uint8_t byte = nibbles[b / 2 * 32 + e];
            const int fifth = type == Q5_K ? (high[e] >> b & 1) << 4 : 0;
            to.codes[b * kBlock + e] = uint8_t((b % 2 ? byte >> 4 : byte & 15) | fifth);
        }
    }
}

void read_q6_k(const uint8_t* from, FileBlock& to) {
    const uint8_t *low = from, *high = from + 128;
    std::memcpy(to.scales, from + 192, 16);
    std::memcpy(to.d, from + 208, 2);
    for (int e = 0; e < 256; ++e) {
        const int half = e / 128, quarter = e % 128 / kBlock, i = e % kBlock;
        const uint8_t byte = low[half * 64 + quarter % 2 * 32 + i];
        const int top = high[half * 32 + i] >> (2 * quarter) & 3;
        to.codes[e] = uint8_t((quarter < 2 ? byte & 15 : byte >> 4) | top << 4);
    }
}

void read_block(Type type, const uint8_t* from, FileBlock& to) {
    if (type == Q6_K) return read_q6_k(from, to);
    if (type == Q4_K || type == Q5_K) return read_k(type, from, to);
    read_small(type, from, to);
}

// 32 codes as the units of one lane: see TypeBase in block_types.h.
void make_units(Type type, const uint8_t* codes, uint8_t (&unit)[8][4]) {
    if (type == Q8_0) {
        std::memcpy(unit, codes, kBlock);
        return;
    }
    for (int e = 0; e < 16; ++e) unit[e / 4][e % 4] = uint8_t((codes[e] & 15) | codes[16 + e] << 4);
    std::memset(unit[4], 0, 8);
    for (int e = 0; e < kBlock; ++e) {
        const int high = codes[e] >> 4, word = e / 4;
        uint8_t& to = units_of(type) == 6 ? unit[4 + word / 4][e % 4] : unit[4][e % 4];
        to = uint8_t(to | high << (units_of(type) == 6 ? word % 4 * 2 : word));
    }
}

// Lane `b` of a row of `blocks` lanes in groups of kLanes; the last group may hold fewer.
void put_codes(Type type, const uint8_t* codes, uint8_t* row, int64_t blocks, int64_t b) {
    uint8_t unit[8][4];
    make_units(type, codes, unit);
    const int64_t group = b / kLanes * kLanes, left = blocks - group;
    const int64_t lanes = left < kLanes ? left : kLanes;
    const int units = units_of(type);
    uint8_t* lane = row + group * 4 * units + (b - group) * 4;
    for (int u = 0; u < units; ++u) std::memcpy(lane + u * lanes * 4, unit[u], 4);
}

bool has_minimum(Type type) { return type == Q4_1 || type == Q5_1 || type == Q4_K || type == Q5_K; }

// What headers of rows and of panels begin with: scales, then minima, of `count` file blocks.
void put_scales(Type type, const FileBlock& block, uint8_t* header, int64_t count, int64_t i) {
    const int64_t size = type == MXFP4 ? 1 : 2;
    std::memcpy(header + i * size, block.d, size_t(size));
    if (has_minimum(type)) std::memcpy(header + (count + i) * 2, block.m, 2);
}

// What follows them in a row of a K type; super-block `s` of `supers`.
void put_row_scales(Type type, const FileBlock& block, uint8_t* row, int64_t supers, int64_t s) {
    const int64_t blocks = 8 * supers;
    uint32_t top = 0;
    for (int b = 0; b < 8; ++b) {
        if (type == Q6_K) {
            row[2 * supers + 8 * s + b] = block.scales[2 * b];
            row[2 * supers + blocks + 8 * s + b] = block.scales[2 * b + 1];
            continue;
        }
        row[4 * supers + 8 * s + b] = uint8_t((block.scales[b] & 15) | block.minima[b] << 4);
        top |= uint32_t(block.scales[b] >> 4 | block.minima[b] >> 4 << 2) << (4 * b);
    }
    if (type != Q6_K) std::memcpy(row + 12 * supers + 4 * s, &top, 4);
}

// What follows them in a panel of a K type, output `i` of `count`: for each 16 (Q6_K) or 32 neurons a byte;
// else their low nibbles, and for each 64 neurons a byte with the high bits of both.
void put_panel_scales(Type type, const FileBlock& block, uint8_t* header, int64_t count, int64_t i) {
    if (type == Q6_K) {
        for (int b = 0; b < 16; ++b) header[(2 + b) * count + i] = block.scales[b];
        return;
    }
    for (int b = 0; b < 8; ++b) {
        header[(4 + b) * count + i] = uint8_t((block.scales[b] & 15) | block.minima[b] << 4);
        const int top = block.scales[b] >> 4 | block.minima[b] >> 4 << 2;
        uint8_t& high = header[(12 + b / 2) * count + i];
        high = uint8_t(b % 2 ? high | top << 4 : top);
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
    const BlockSize size = block_size(type);
    const int64_t blocks = cols / kBlock, count = cols / size.weights, per_block = size.weights / kBlock;
    uint8_t* codes = to + row_size(type, cols) - 4 * units_of(type) * blocks;
    FileBlock block;
    for (int64_t i = 0; i < count; ++i, from += size.bytes) {
        read_block(type, from, block);
        put_scales(type, block, to, count, i);
        if (per_block > 1) put_row_scales(type, block, to, count, i);
        for (int64_t b = 0; b < per_block; ++b)
            put_codes(type, block.codes + b * kBlock, codes, blocks, i * per_block + b);
    }
}

Panels panels_of(Type type, int64_t dim) {
    if (!is_quantised(type)) throw std::invalid_argument("panels are for quantised types");
    const BlockSize size = block_size(type);
    const int64_t outputs = (dim + kBlock - 1) / kBlock * kBlock, code_bits = units_of(type);
    return {size.weights, outputs * (size.bytes - size.weights / 8 * code_bits), outputs / 8 * code_bits};
}

void pack_panel(Type type, const uint8_t* from, int64_t stride, int64_t dim, uint8_t* to) {
    const Panels panels = panels_of(type, dim);
    const int64_t blocks = (dim + kBlock - 1) / kBlock, outputs = blocks * kBlock;
    std::vector<uint8_t> codes(size_t(panels.neurons * outputs));  // [neuron, output]
    FileBlock block;
    for (int64_t d = 0; d < dim; ++d, from += stride) {
        read_block(type, from, block);
        for (int64_t k = 0; k < panels.neurons; ++k) codes[size_t(k * outputs + d)] = block.codes[k];
        const int64_t group = d / kGroup * kGroup, left = blocks - group / kBlock;
        const int64_t lanes = left < kLanes ? left : kLanes;
        const int64_t i = group + d % kBlock * lanes + d % kGroup / kBlock;  // the order in which codes lie
        put_scales(type, block, to, outputs, i);
        if (panels.neurons > kBlock) put_panel_scales(type, block, to, outputs, i);
    }
    for (int64_t k = 0; k < panels.neurons; ++k)
        for (int64_t b = 0; b < blocks; ++b)
            put_codes(type, codes.data() + k * outputs + b * kBlock, to + panels.header + k * panels.row,
                      blocks, b);
}

}  // namespace hc
