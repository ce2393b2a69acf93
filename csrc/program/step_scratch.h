// How much scratch the ops of a step share.
#pragma once
#include <cstddef>
#include <cstdint>

namespace hc {

// The numbers that it depends on, for a model whose layers are alike.
struct StepShape {
    int64_t tokens, logits, pages_per_sequence;  // of a step
    int64_t dim, heads, kv_heads, head_dim;
    int64_t neurons, experts, chosen;  // neurons of a layer, or of each of its experts
    int64_t shared;                    // neurons of the shared expert
    bool by_output;                    // down is a dot over all neurons
};

// The ops themselves say it: each is recorded, on weights and buffers that do not exist. Weights are taken
// for quantised where their rows are whole blocks.
size_t step_scratch_bytes(const StepShape&);

}  // namespace hc
