// Scales of blocks whose weights are normalised by a power of two to a largest magnitude from 1 to 2. So a
// search meets neither overflow nor denormals. Scales are rounded to float16.
#pragma once
#include <initializer_list>

#include "quantise/blocks.h"
#include "quantise/lanes.h"

namespace hc {
namespace {

// The power of two not above the largest magnitude; 0 if every weight rounds to 0 in float16.
inline float unit_of(const float* x, int n) {
    const uint32_t largest = largest_bits(x, n);
    return float_of(largest) > 0x1p-25f ? float_of(largest & kInfinite) : 0;
}

// A scale of weights that were divided by `unit`, rounded to the nearest float16 of the original scale, but
// neither to 0 nor to infinity.
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

// Error relative to the sum of squares below which a block is almost exactly representable, such as a
// constant one. Then only the rounding of the scale errs, and more scales are tried.
constexpr double kNearlyExact = 3e-5;
constexpr int kMoreScales = 8;

// Sums over weights of their squares, and of their products with the quantised values; both times the
// column's importance.
struct Products {
    double squares = 0, products = 0;
};

// Multiplies a row's scales (float16 at these offsets of each block) by one factor. Then the inner product of
// new values and weights equals the weights' squared norm. Without it fitted values are too small, by 3 % in
// Q2_K, and so is each layer's output.
template <int N>
void grow_scales(uint8_t* out, int64_t blocks, int64_t bytes, const int (&offsets)[N], const Products& sums) {
    constexpr double kLeast = 1 + 0x1p-8,
                     kMost = 1.25;  // float16 cannot represent less; rounding causes no more
    if (!(sums.squares > kLeast * sums.products) || sums.squares > kMost * sums.products) return;
    const float factor = float(sums.squares / sums.products);
    for (int64_t block = 0; block < blocks; ++block)
        for (const int offset : offsets) {
            uint8_t* at = out + block * bytes + offset;
            const uint16_t grown = to_half(from_half(uint16_t(at[0] | at[1] << 8)) * factor);
            if (grown <= HalfScale::kLargestHalf) put_half(at, grown);
        }
}

// Loads the eight runs of a group, normalised.
template <int N> void load_group(Runs<N>& to, const float* x, const float* w, int group, float unit) {
    const float inverse = unit == 0 ? 0 : 1 / unit;
    float inverses[kLanes];
    for (float& value : inverses) value = inverse;
    const int first = group * N * kLanes;
    load_runs(to, x + first, w ? w + first : nullptr, kLanes, inverses);
}

template <int N> double energy_of(const Runs<N>& runs) {
    V squares = splat(0);
    for (int j = 0; j < N; ++j) squares += load(runs.w[j]) * load(runs.x[j]) * load(runs.x[j]);
    return sum_lanes(squares);
}

}  // namespace
}  // namespace hc
