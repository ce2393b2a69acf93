#include "vulkan/open_rows.h"

#include <algorithm>
#include <cstring>

namespace hc::vulkan {

namespace {

constexpr int64_t kChunks = 32;  // maximum, of a row
constexpr int kOfSuper = 8;      // blocks of 32 weights that share scales

uint64_t word_at(const uint8_t* at) {
    uint64_t word;
    std::memcpy(&word, at, sizeof word);
    return word;
}

float half_at(const uint8_t* at) {
    const uint32_t half = uint32_t(at[0]) | uint32_t(at[1]) << 8;
    const uint32_t exponent = half >> 10 & 31, fraction = half & 1023;
    uint32_t bits = (half & 0x8000) << 16;
    if (exponent == 0) {
        const float small = float(fraction) * 0x1p-24f;
        uint32_t own;
        std::memcpy(&own, &small, sizeof own);
        bits |= own;
    } else {
        bits |= (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
    }
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Order of a row's blocks in memory: RowLayout.order of packing.py.
struct Order {
    int64_t chunk, chunks, last;
    explicit Order(int64_t blocks) {
        chunk = (blocks + kChunks - 1) / kChunks;
        chunks = (blocks + chunk - 1) / chunk;
        last = blocks - (chunks - 1) * chunk;
    }
    int64_t place(int64_t block) const {
        const int64_t i = block % chunk;
        return i * chunks - std::max<int64_t>(i - last, 0) + block / chunk;
    }
};

// 2 bits of each of 8 weights, from the 32 bytes at `from`; each byte has fields of four blocks.
uint64_t two_bits(const uint8_t* from, int block, int half) {
    return word_at(from + block / 4 * 32 + 8 * half) >> 2 * (block % 4) & 0x0303030303030303;
}

struct Q2K {
    static constexpr int bytes = 84;
    static void block(const uint8_t* super, int b, uint8_t* codes, uint8_t* scales) {
        for (int i = 0; i < 2; ++i) {
            const uint64_t word = two_bits(super + 16, b, i) | two_bits(super + 16, b, i + 2) << 4;
            std::memcpy(codes + 8 * i, &word, sizeof word);
        }
        std::memcpy(scales, super + 80, 4);
        for (int i = 0; i < 2; ++i) {
            scales[4 + i] = super[2 * b + i] & 15;
            scales[6 + i] = super[2 * b + i] >> 4;
        }
    }
};

struct Q3K {
    static constexpr int bytes = 110;
    static void block(const uint8_t* super, int b, uint8_t* codes, uint8_t* scales) {
        // Codes from -4 to 3; the table's numbers begin with -8.
        const auto numbers = [&](int i) {
            const uint64_t high = word_at(super + 8 * i) >> b & 0x0101010101010101;
            return (two_bits(super + 32, b, i) | high << 2) + 0x0404040404040404;
        };
        for (int i = 0; i < 2; ++i) {
            const uint64_t word = numbers(i) | numbers(i + 2) << 4;
            std::memcpy(codes + 8 * i, &word, sizeof word);
        }
        const float d = half_at(super + 108);
        for (int i = 0; i < 2; ++i) {
            const int s = 2 * b + i;
            const int low = super[96 + s % 8] >> 4 * (s / 8) & 15,
                      high = super[104 + s % 4] >> 2 * (s / 4) & 3;
            const float scale = d * float((low | high << 4) - 32);
            std::memcpy(scales + 4 * i, &scale, sizeof scale);
        }
    }
};

struct IQ4XS {
    static constexpr int bytes = 136;
    static void block(const uint8_t* super, int b, uint8_t* codes, uint8_t* scales) {
        std::memcpy(codes, super + 8 + 16 * b, 16);
        const int low = super[4 + b / 2] >> 4 * (b % 2) & 15, high = super[2 + b / 4] >> 2 * (b % 4) & 3;
        const float scale = half_at(super) * float((low | high << 4) - 32);
        for (int i = 0; i < 2; ++i) std::memcpy(scales + 4 * i, &scale, sizeof scale);
    }
};

template <class Type>
void open(const uint8_t* data, int64_t rows, int64_t blocks, uint8_t* codes, uint8_t* scales) {
    const Order order(blocks);
    for (int64_t row = 0; row < rows; ++row, codes += 16 * blocks, scales += 8 * blocks)
        for (int64_t super = 0; super < blocks / kOfSuper; ++super, data += Type::bytes)
            for (int b = 0; b < kOfSuper; ++b) {
                const int64_t place = order.place(kOfSuper * super + b);
                Type::block(data, b, codes + 16 * place, scales + 8 * place);
            }
}

}  // namespace

void open_rows(OpenedType type, const uint8_t* data, int64_t rows, int64_t blocks, uint8_t* codes,
               uint8_t* scales) {
    switch (type) {
        case OpenedType::kQ2K: return open<Q2K>(data, rows, blocks, codes, scales);
        case OpenedType::kQ3K: return open<Q3K>(data, rows, blocks, codes, scales);
        case OpenedType::kIQ4XS: return open<IQ4XS>(data, rows, blocks, codes, scales);
    }
}

int64_t bytes_of_256(OpenedType type) {
    switch (type) {
        case OpenedType::kQ2K: return Q2K::bytes;
        case OpenedType::kQ3K: return Q3K::bytes;
        case OpenedType::kIQ4XS: return IQ4XS::bytes;
    }
    return 0;
}

}  // namespace hc::vulkan
