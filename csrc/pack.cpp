#include "pack.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace hc {

int64_t row_size(Type type, int64_t cols) {
    if (is_quantised(type) && cols % kBlock)
        throw std::invalid_argument("a quantised row must be a multiple of 32 weights wide, not " +
                                    std::to_string(cols));
    switch (type) {
        case F32: return cols * 4;
        case F16:
        case BF16: return cols * 2;
        case Q8_0: return cols / kBlock * 34;
        case Q4_0: return cols / kBlock * 18;
    }
    throw std::invalid_argument("block type " + std::to_string(int(type)) + " has no kernels");
}

void pack_row(Type type, const uint8_t* from, int64_t cols, uint8_t* to) {
    if (!is_quantised(type)) {
        std::memcpy(to, from, size_t(row_size(type, cols)));
        return;
    }
    const int64_t blocks = cols / kBlock, block_bytes = row_size(type, kBlock), codes = block_bytes - 2;
    for (int64_t b = 0; b < blocks; ++b) {
        const uint8_t* block = from + b * block_bytes;
        const int64_t group = b / kLanes * kLanes, lanes = blocks - group < kLanes ? blocks - group : kLanes;
        std::memcpy(to + b * 2, block, 2);
        uint8_t* lane = to + blocks * 2 + group * codes + (b - group) * 4;
        for (int64_t word = 0; word < codes / 4; ++word)
            std::memcpy(lane + word * 4 * lanes, block + 2 + word * 4, 4);
    }
}

}  // namespace hc
