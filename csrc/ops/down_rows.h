// The FFN op's down rows: their position, and their sum.
#pragma once
#include "ops/arguments.h"
#include "simd/stream.h"

namespace hc {

constexpr int kChunk = 32;  // maximum neurons whose up rows are read before their down rows are added

// y += c[k] * down[neurons[k]], in ascending order; in panels, the neurons of one run. `count` is 1 to
// kChunk.
void HC_SHARED(add_down)(const Ffn&, const int32_t* neurons, const float* c, int count, float* y, Stream&);

namespace {

// Start of a neuron's panel; its row of down, or of codes in the panel.
inline const uint8_t* panel_of(const Ffn& f, int64_t neuron) {
    return f.down.base + neuron / f.panels.neurons * f.panels.bytes();
}
inline const uint8_t* down_row(const Ffn& f, int64_t neuron) {
    if (!f.panels.neurons) return f.down.row(neuron);
    return panel_of(f, neuron) + f.panels.header + neuron % f.panels.neurons * f.panels.row;
}

}  // namespace
}  // namespace hc
