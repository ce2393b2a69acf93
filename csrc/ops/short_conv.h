// A causal convolution of a few columns, each channel separately.
#pragma once
#include <cstring>

#include "ops/states.h"

namespace hc {
namespace {

// to[j][i] = weight[i][j] for the channels of a piece.
inline void turn_taps(const float* weight, int64_t channels, int64_t taps, float* to) {
    int64_t i = 0;
    // Reads four of a channel's values at once: that must not go past the last channel.
    for (; taps <= 4 && i + Vec::width < channels; i += Vec::width) {
        F v[4];
        Vec::transpose4(weight + i * taps, taps, v);
        for (int64_t j = 0; j < taps; ++j) Vec::store(to + j * kConvChannels + i, v[j]);
    }
    for (; i < channels; ++i)
        for (int64_t j = 0; j < taps; ++j) to[j * kConvChannels + i] = weight[i * taps + j];
}

void short_conv(const ShortConv& c, const StateRows& rows, int64_t first, int64_t count, uint8_t* local) {
    const int64_t before = c.taps - 1;
    auto* taps = reinterpret_cast<float*>(local);
    float* old = taps + kMostTaps * kConvChannels;  // a copy: the state may change
    turn_taps(c.weight + first * c.taps, count, c.taps, taps);
    for (int64_t j = 0; j < before; ++j) {
        float* to = old + j * kConvChannels;
        if (rows.from)
            std::memcpy(to, rows.from + j * c.channels + first, size_t(count) * 4);
        else
            clear(to, count);
    }
    // Column t of the sequence's rows of this step; earlier columns have negative numbers.
    const auto column = [&](int64_t t) {
        return t < 0 ? old + (t + before) * kConvChannels : c.x + (rows.first + t) * c.channels + first;
    };
    for (int64_t t = 0; t < rows.count; ++t) {
        const float* seen[kMostTaps];
        for (int64_t j = 0; j < c.taps; ++j) seen[j] = column(t - before + j);
        float* out = c.out + (rows.first + t) * c.channels + first;
        for_vectors(count, [&](int64_t i, int m) HC_INLINE_LAMBDA {
            F y = c.bias ? load_part(c.bias + first + i, m) : Vec::zero();
            for (int64_t j = 0; j < c.taps; ++j)
                y = Vec::fma(load_part(taps + j * kConvChannels + i, m), load_part(seen[j] + i, m), y);
            store_part(out + i, c.silu ? activate(kSilu, y, Vec::zero()) : y, m);
        });
    }
    if (!rows.to) return;
    for (int64_t j = 0; j < before; ++j)
        std::memcpy(rows.to + j * c.channels + first, column(rows.count - before + j), size_t(count) * 4);
}

}  // namespace
}  // namespace hc
