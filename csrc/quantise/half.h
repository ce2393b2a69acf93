// float16 in integer arithmetic: the same bits on every processor.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace hc {
namespace {

inline uint32_t bits_of(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, sizeof bits);
    return bits;
}
inline float float_of(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
}

// For finite values, a larger magnitude has larger size_bits.
constexpr uint32_t kInfinite = 0x7f800000;
inline uint32_t size_bits(float f) { return bits_of(f) & 0x7fffffff; }
inline uint32_t largest_bits(const float* x, int64_t n) {
    uint32_t most = 0;
    for (int64_t i = 0; i < n; ++i) most = size_bits(x[i]) > most ? size_bits(x[i]) : most;
    return most;
}

// Rounds to nearest, ties to even; 65520 and more become infinite, a NaN stays NaN.
inline uint16_t to_half(float f) {
    const uint32_t bits = bits_of(f), size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    if (size > 0x7f800000) {
        const uint32_t payload = size >> 13 & 0x3ff;
        return uint16_t(sign | 0x7c00 | (payload ? payload : 1));
    }
    if (size >= 0x477ff000) return uint16_t(sign | 0x7c00);
    if (size < 0x38800000)  // a denormal: in the sum with 0.5, the last bit is 2^-24
        return uint16_t(sign | (bits_of(float_of(size) + 0.5f) - 0x3f000000));
    const uint32_t rebased = size - 0x38000000;
    return uint16_t(sign | (rebased + 0xfff + (rebased >> 13 & 1)) >> 13);
}

// Only for finite values.
inline float from_half(uint16_t half) {
    const uint32_t size = half & 0x7fff;
    const float value = size < 0x400 ? float(size) * 0x1p-24f : float_of((size << 13) + 0x38000000);
    return half & 0x8000 ? -value : value;
}

inline void put_half(uint8_t* at, uint16_t half) {
    at[0] = uint8_t(half);
    at[1] = uint8_t(half >> 8);
}

}  // namespace
}  // namespace hc
