// Shared by the packing of rows and of panels: layouts of file blocks, and moves of nibbles and scales.
#pragma once
#include <type_traits>

#include "pack/bytes16.h"
#include "simd/types.h"

namespace hc {
namespace {

// Layout of a file's block, and the number of units of its codes (TypeBase in block_types.h).
struct Layout {
    int units;
    int scale;  // bytes of the scale
    int scale_at;
    int minimum;  // bytes of the minimum, which follows the scale
    int codes;    // offset of nibbles or bytes
    int high;     // offset of the codes' higher bits
};

constexpr Layout layout_of(Type type) {
    switch (type) {
        case Q4_0: return {4, 2, 0, 0, 2, 0};
        case Q4_1: return {4, 2, 0, 2, 4, 0};
        case Q5_0: return {5, 2, 0, 0, 6, 2};
        case Q5_1: return {5, 2, 0, 2, 8, 4};
        case Q8_0: return {8, 2, 0, 0, 2, 0};
        case Q4_K: return {4, 2, 0, 2, 16, 0};
        case Q5_K: return {5, 2, 0, 2, 48, 16};
        case Q6_K: return {6, 2, 208, 0, 0, 128};
        case IQ4_NL: return {4, 2, 0, 0, 2, 0};
        case MXFP4: return {4, 1, 0, 0, 1, 0};
        default: return {};
    }
}

constexpr bool is_super(Type type) { return type == Q4_K || type == Q5_K || type == Q6_K; }

inline uint32_t word_at(const uint8_t* p) {
    uint32_t word;
    std::memcpy(&word, p, 4);
    return word;
}
inline void put_word(uint8_t* p, uint32_t word) { std::memcpy(p, &word, 4); }

// Codes of sixteen weights from a as low nibbles, and of the sixteen weights 16 further on from b as high
// nibbles. low_nibbles takes the low nibbles of the file's bytes, high_nibbles the high ones.
inline Bytes16 low_nibbles(Bytes16 a, Bytes16 b) { return (a & fill(0x0f)) | (shl<4>(b) & fill(0xf0)); }
inline Bytes16 high_nibbles(Bytes16 a, Bytes16 b) { return (shr<4>(a) & fill(0x0f)) | (b & fill(0xf0)); }

// Scales and minima of 6 bits in the kernels' layout: a byte of low nibbles for each run of 32 weights, and a
// nibble with the high bits of both.
struct KScales {
    uint32_t low[2];
    uint32_t high;
};
inline KScales k_scales(const uint8_t* packed) {
    const uint32_t scales = word_at(packed), minima = word_at(packed + 4), mixed = word_at(packed + 8);
    const uint32_t low = (scales & 0x0f0f0f0f) | (minima & 0x0f0f0f0f) << 4;
    const auto gathered = [](uint32_t bytes) {
        const uint32_t pairs = (bytes | bytes >> 4) & 0x00ff00ff;
        return (pairs | pairs >> 8) & 0xffff;
    };
    const uint32_t first = (scales >> 4 & 0x03030303) | (minima >> 2 & 0x0c0c0c0c);
    const uint32_t second = (scales >> 6 & 0x03030303) | (minima >> 4 & 0x0c0c0c0c);
    return {{low, mixed}, gathered(first) | gathered(second) << 16};
}

// Calls fn with the type as a constant: fn(std::integral_constant<Type, ...>).
template <class Fn> void with_constant(Type type, Fn&& fn) {
    switch (type) {
        case Q4_0: return fn(std::integral_constant<Type, Q4_0>{});
        case Q4_1: return fn(std::integral_constant<Type, Q4_1>{});
        case Q5_0: return fn(std::integral_constant<Type, Q5_0>{});
        case Q5_1: return fn(std::integral_constant<Type, Q5_1>{});
        case Q8_0: return fn(std::integral_constant<Type, Q8_0>{});
        case Q4_K: return fn(std::integral_constant<Type, Q4_K>{});
        case Q5_K: return fn(std::integral_constant<Type, Q5_K>{});
        case Q6_K: return fn(std::integral_constant<Type, Q6_K>{});
        case IQ4_NL: return fn(std::integral_constant<Type, IQ4_NL>{});
        case MXFP4: return fn(std::integral_constant<Type, MXFP4>{});
        default: return;
    }
}

}  // namespace
}  // namespace hc
