// What decode and prompt rows of the FFN op share: where down rows lie, and how sums leave.
#pragma once
#include "ops/activation.h"
#include "ops/linear.h"

namespace hc {
namespace {

// Where the panel of a neuron begins, and its row of down or of codes there.
inline const uint8_t* panel_of(const Ffn& f, int64_t neuron) {
    return f.down.base + neuron / f.panels.neurons * f.panels.bytes();
}
inline const uint8_t* down_row(const Ffn& f, int64_t neuron) {
    if (!f.panels.neurons) return f.down.row(neuron);
    return panel_of(f, neuron) + f.panels.header + neuron % f.panels.neurons * f.panels.row;
}

// One group of a token's sums, as axpy leaves them, to the output.
inline void write_out(const Ffn& f, int64_t group, const float* sum, float* out) {
    const int64_t n = smaller<int64_t>(kGroup, f.dim() - group * kGroup);
    float plain[kGroup];
    with_type(f.down.type, [&](auto type) {
        using B = decltype(type);
        if constexpr (B::quantised) {
            if (f.panels.neurons)
                unpack_group<TypeBase>(sum, plain, f.down.cols, group);
            else
                unpack_group<B>(sum, plain, f.down.cols, group);
            sum = plain;
        }
    });
    for (int64_t i = 0; i < n; ++i) {
        const float v = f.down_bias ? sum[i] + f.down_bias[group * kGroup + i] : sum[i];
        out[i] = f.accumulate ? out[i] + v : v;
    }
}

}  // namespace
}  // namespace hc
