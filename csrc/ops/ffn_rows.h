// Where the FFN op's down rows lie.
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

}  // namespace
}  // namespace hc
