// The FFN op up to the neurons' outputs, by rows: for prompt rows, and for all rows if down is a dot product.
#pragma once
#include "ops/activation.h"
#include "ops/linear.h"

namespace hc {
namespace {

// hidden = act(gate) * up for rows [first, first + count) and tokens [t0, t1): neuron by neuron for the sums
// of prompt rows, token by token if down is a dot product.
void ffn_hidden(const Ffn& f, int64_t first, int64_t count, int t0, int t1, uint8_t* local) {
    const Rows& gate = f.first();
    const float* bias = f.gate.base ? f.gate_bias : f.up_bias;
    const int64_t row_step = f.by_output ? 1 : f.hidden_tokens, token_step = f.by_output ? f.neurons() : 1;
    float* up = (float*)local;  // one tile, in the order of hidden
    const int most = f.x.tiled ? kTiledUpTile : kUpTile;
    const int64_t up_row = f.by_output ? 1 : most, up_token = f.by_output ? count : 1;
    uint8_t* rest = local + kUpTileBytes;
    for (int t = t0; t < t1; t += most) {
        const int end = smaller(t + most, t1);
        float* h = f.hidden + first * row_step + t * token_step;
        if (f.gates) {
            for (int i = t; i < end; ++i)
                for (int64_t k = 0; k < count; ++k)
                    h[k * row_step + (i - t) * token_step] = f.gates[i * f.neurons() + first + k];
        } else {
            Stream ahead = stream_of(gate, first, count);
            dots(gate, nullptr, first, count, f.x, t, end, ahead, {h, row_step, token_step, bias}, rest);
        }
        if (f.gated()) {
            Stream up_stream = stream_of(f.up, first, count);
            dots(f.up, nullptr, first, count, f.x, t, end, up_stream, {up, up_row, up_token, f.up_bias},
                 rest);
        }
        const int64_t runs = f.by_output ? end - t : count, length = f.by_output ? count : end - t;
        for (int64_t i = 0; i < runs; ++i, h += f.by_output ? token_step : row_step)
            activate_rows(f, h, f.gated() ? up + i * (f.by_output ? up_token : up_row) : nullptr, h, length);
    }
}

}  // namespace
}  // namespace hc
