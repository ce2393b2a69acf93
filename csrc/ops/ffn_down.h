// Adds the down rows of some neurons to a token's sums.
#pragma once
#include "ops/down_rows.h"
#include "simd/block_dot.h"

namespace hc {
namespace {

void add_down(const Ffn& f, const int32_t* neurons, const float* c, int count, float* y, Stream& ahead) {
    with_type(f.down.type, [&](auto type) {
        using B = decltype(type);
        RowOf<B> rows[kChunk];
        for (int k = 0; k < count; ++k) rows[k] = row_of<B>(f.down, neurons[k], down_row(f, neurons[k]));
        if constexpr (B::quantised && !B::opened)
            if (f.panels.neurons) {
                const int run = int(neurons[0] % f.panels.neurons) / scale_run(f.down.type);
                return panel_axpy<B>({panel_of(f, neurons[0]), run, rows, c, count, f.down.cols / kBlock}, y,
                                     ahead);
            }
        int k = 0;
#ifndef HC_ISA_FALLBACK
        for (; k + 4 <= count; k += 4) axpy<B, 4>(rows + k, c + k, f.down.cols, y, ahead);
        for (; k + 2 <= count; k += 2) axpy<B, 2>(rows + k, c + k, f.down.cols, y, ahead);
#endif
        for (; k < count; ++k) axpy<B, 1>(rows + k, c + k, f.down.cols, y, ahead);
    });
}

}  // namespace
}  // namespace hc
