// Layouts of codes in blocks.
#pragma once
#include <cstdint>
#include <cstring>

#include "quantise/half.h"
#include "quantise/writers.h"

namespace hc {
namespace {

constexpr int kSmall = 32;
constexpr int kLarge = 256;

// Throws if a row holds a NaN or an infinity.
inline void check_finite(const char* type, const float* x, int64_t n, float bound) {
    const uint32_t largest = largest_bits(x, n);
    if (largest >= kInfinite) refuse_scale(type, float_of(largest), bound);
}

// The scale as float16; refuses an infinite one.
inline uint16_t half_scale(const char* type, float scale) {
    if (!(float_of(size_bits(scale)) < kHalfBound)) refuse_scale(type, scale, kHalfBound);
    return to_half(scale);
}

// Codes 0..31 of 32 weights: the lower four bits of the first 16 go to the low halves of 16 bytes, the fifth
// bits of all to the four bytes before them.
inline void put_codes(uint8_t* out, const int* codes, int bits) {
    for (int i = 0; i < 16; ++i) out[i] = uint8_t((codes[i] & 15) | codes[i + 16] << 4);
    if (bits == 4) return;
    uint32_t fifths = 0;
    for (int i = 0; i < kSmall; ++i) fifths |= uint32_t(codes[i] >> 4) << i;
    for (int k = 0; k < 4; ++k) out[k - 4] = uint8_t(fifths >> 8 * k);
}

// Two bits of each code, from `shift` on: byte i of each half of a block has the bits of weights i, 32 + i,
// ....
inline void put_pairs(uint8_t* out, const uint8_t* codes, int shift) {
    for (int half = 0; half < 2; ++half, codes += 128, out += 32)
        for (int i = 0; i < 32; ++i) {
            const int low = (codes[i] >> shift & 3) | (codes[32 + i] >> shift & 3) << 2;
            out[i] = uint8_t(low | (codes[64 + i] >> shift & 3) << 4 | (codes[96 + i] >> shift & 3) << 6);
        }
}

// One bit of each code: bit k of byte i belongs to weight 32 * k + i.
inline void put_bits(uint8_t* out, const uint8_t* codes, int shift) {
    std::memset(out, 0, 32);
    for (int k = 0; k < 8; ++k)
        for (int i = 0; i < 32; ++i) out[i] = uint8_t(out[i] | (codes[32 * k + i] >> shift & 1) << k);
}

// Four bits of each code: of each two runs of `width`, the first goes to the low halves.
inline void put_nibbles(uint8_t* out, const uint8_t* codes, int width) {
    for (int at = 0; at < 128; at += width, codes += 2 * width)
        for (int i = 0; i < width; ++i) out[at + i] = uint8_t((codes[i] & 15) | (codes[width + i] & 15) << 4);
}

}  // namespace
}  // namespace hc
