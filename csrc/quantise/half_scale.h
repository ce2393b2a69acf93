// Scales of blocks whose weights were brought to size: a largest size from 1 to 2, by a power of two. A
// search then meets neither overflow nor denormals, and scales are rounded to the float16 they become.
#pragma once
#include <initializer_list>

#include "quantise/blocks.h"
#include "quantise/lanes.h"

namespace hc {
namespace {

// The power of two not above the largest size; 0 where all weights are nearer to 0 than to any other float16.
inline float unit_of(const float* x, int n) {
    const uint32_t largest = largest_bits(x, n);
    return float_of(largest) > 0x1p-25f ? float_of(largest & kInfinite) : 0;
}

// A scale of weights that were divided by `unit`, rounded to the float16 that is nearest to what it is of the
// weights themselves, and neither 0 nor infinite.
struct HalfScale {
    static constexpr int kLargestHalf = 0x7bff;
    uint16_t half = 0;
    float value = 0;

    HalfScale() = default;
    HalfScale(float scale, float unit) {
        half = to_half(scale * unit);
        const int size = half & 0x7fff;
        if (scale != 0 && size == 0) half |= 1;
        if (size > kLargestHalf) half = uint16_t((half & 0x8000) | kLargestHalf);
        value = from_half(half) / unit;
    }
};

// What is left of the squares of a block's weights where it is all but one of those that the type holds
// exactly, such as a constant one. Then rounding the scale is what errs, and some more scales are tried.
constexpr double kNearlyExact = 3e-5;
constexpr int kMoreScales = 8;

// Sums over weights of their squares and of their products with the values that replace them, each times the
// column's importance.
struct Products {
    double squares = 0, products = 0;
};

// Multiplies a row's scales, float16 at these offsets of each block, by one factor, so that the new values
// have the product with the weights that the weights have with themselves. Fitted values are too small
// otherwise: by 3 % in Q2_K, and with them each layer's output.
template <int N>
void grow_scales(uint8_t* out, int64_t blocks, int64_t bytes, const int (&offsets)[N], const Products& sums) {
    constexpr double kLeast = 1 + 0x1p-8, kMost = 1.25;  // float16 loses less; rounding does no more
    if (!(sums.squares > kLeast * sums.products) || sums.squares > kMost * sums.products) return;
    const float factor = float(sums.squares / sums.products);
    for (int64_t block = 0; block < blocks; ++block)
        for (const int offset : offsets) {
            uint8_t* at = out + block * bytes + offset;
            const uint16_t grown = to_half(from_half(uint16_t(at[0] | at[1] << 8)) * factor);
            if (grown <= HalfScale::kLargestHalf) put_half(at, grown);
        }
}

// The eight runs of a group, brought to size.
template <int N> void load_group(Runs<N>& to, const float* x, const float* w, int group, float unit) {
    const float inverse = unit == 0 ? 0 : 1 / unit;
    float all[kLanes];
    for (float& each : all) each = inverse;
    const int first = group * N * kLanes;
    load_runs(to, x + first, w ? w + first : nullptr, kLanes, all);
}

template <int N> double energy_of(const Runs<N>& runs) {
    V squares = splat(0);
    for (int j = 0; j < N; ++j) squares += load(runs.w[j]) * load(runs.x[j]) * load(runs.x[j]);
    return sum_lanes(squares);
}

}  // namespace
}  // namespace hc
