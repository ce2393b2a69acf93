// State of a recorded FFN op for experts; program_experts.cpp records it.
#pragma once
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "program/program_parts.h"

namespace hc {

// The rows of one expert in a layer's weights.
inline Rows rows_of(const Rows& all, int64_t first, int64_t count) {
    Rows rows = all;
    if (rows.base) rows.base += first * rows.stride;
    if (rows.factors) rows.factors += first;
    rows.count = count;
    return rows;
}

inline const float* at(const float* values, int64_t i) { return values ? values + i : nullptr; }

// The rows of an input from row t on.
inline Input from_row(Input in, int64_t t) {
    in.x = at(in.x, t * in.stride);
    if (in.quantised) in.quantised += t * Input::token_bytes(in.cols);
    if (in.tiled) in.tiled = in.tiled_row(t);
    return in;
}

// Inputs of pairs whose rows are not adjacent, copied so that they are: first the pairs of one routing, then
// those of another.
struct Gathered {
    Input from, to;
    float* floats = nullptr;  // of `to`, if kernels read floats
    bool codes = false;       // kernels read quantised codes
    bool tiles = false;       // tiles read rows of this step

    // Uses `memory` for the floats of `to`.
    void take(uint8_t* memory) { to.x = floats = reinterpret_cast<float*>(memory); }
    void copy(int token, int64_t pair) const {
        if (floats) std::memcpy(floats + pair * to.stride, from.x + token * from.stride, size_t(to.cols) * 4);
        const auto bytes = Input::token_bytes(to.cols);
        if (tiles) std::memcpy(to.tiled_row(pair), from.tiled_row(token), size_t(to.tiled_bytes()));
        if (codes) std::memcpy(to.quantised + pair * bytes, from.quantised + token * bytes, size_t(bytes));
    }
    void copy(const Routing& routing, int pair, int64_t before) const {
        if (!routing.part_of(pair).neighbours) copy(routing.token(pair), before + pair);
    }
    // The input of a part; `before` pairs precede the routing's pairs.
    Input of(const Routing::Part& part, int64_t before) const {
        return part.neighbours ? from_row(from, part.token) : from_row(to, before + part.begin);
    }
};

// One FFN op for experts: the layer, the routing, and scratch. Decode rows, prompt rows and all rows have
// separate routings; an op uses the first two or the last.
struct ExpertsOp {
    Ffn layer;  // rows of all experts
    std::shared_ptr<const Experts> experts;
    std::shared_ptr<LoadBatches> load_batches;  // null: all experts are in memory
    Masks active_gates;                         // by_gates(), decode rows: neurons whose gates may be active
    std::vector<float> thresholds;              // for `active_gates`, of an expert's neurons
    std::vector<uint64_t> wanted;               // by_rows(): neurons that a step needs, of all experts
    Routing decode, prompt;
    Cut decode_cut, prompt_cut;
    Gathered input;
    std::vector<std::array<int8_t, kMaxDecodeRows + 1>> levels;  // Ffn::levels of each expert
    std::vector<int64_t> down_rows;                              // by output: first row of each expert
    float* sums = nullptr;                                       // [pairs, D]: output of each pair's expert
    Input hidden;                                                // by output: [pairs, neurons]
    int64_t most_leaves = 0, most_neurons = 0;

    ExpertsOp(const Ffn& f, std::shared_ptr<const Experts> e, std::shared_ptr<LoadBatches> w, int64_t rows,
              int64_t decode_rows)
        : layer(f),
          experts(std::move(e)),
          load_batches(std::move(w)),
          decode(*experts, decode_rows),
          prompt(*experts, rows),
          decode_cut(size_t(experts->count())),
          prompt_cut(size_t(experts->count())) {
        most_neurons = experts->most_neurons();
    }

    bool is_decode(const Routing& routing) const { return &routing == &decode; }
    // Pairs before the pairs of a routing.
    int64_t before(const Routing& routing) const { return is_decode(routing) ? 0 : decode.pairs(); }
    float* sum(const Routing& routing, int pair) const {
        return sums + (before(routing) + pair) * layer.dim();
    }
    const float* down_bias(int64_t expert) const { return at(layer.down_bias, expert * layer.dim()); }
    int64_t neurons(const Routing::Part& part) const { return experts->neurons(part.expert); }
    // Returns true if the steps of the current batch compute this part.
    bool in_load_batch(const Routing::Part& part) const {
        return !load_batches || load_batches->in_load_batch(part.expert);
    }
    bool is_load_batch(int64_t load_batch) const {
        return !load_batches || load_batches->load_batch() == load_batch;
    }
    int64_t most_load_batches() const { return load_batches ? load_batches->most_load_batches() : 1; }
    // by_rows(): reads load rows of neurons. by_gates(): for decode rows, only of neurons whose gates may be
    // active.
    bool by_rows() const { return load_batches && load_batches->unit() != LoadBatches::kExperts; }
    bool by_gates() const {
        return load_batches && load_batches->unit() == LoadBatches::kFiring && layer.skip &&
               can_skip(layer.activation);
    }
    // A part's words of masks of decode rows.
    Masks of_part(const Masks& masks, const Routing::Part& part) const {
        return {masks.words + experts->words[size_t(part.expert)], masks.stride, decode.tokens(part)};
    }
    void find_wanted();
    std::vector<int32_t> named() const;
    Ffn expert(int64_t number) const;
    Ffn view(const Routing&, const Routing::Part&) const;
    Input hidden_of(const Routing::Part&) const;
};

// The FFN of one expert, without rows.
inline Ffn ExpertsOp::expert(int64_t number) const {
    Ffn f = layer;
    const int64_t first = experts->first(number), n = experts->neurons(number), dim = layer.dim();
    const int64_t slot = load_batches ? load_batches->slot(number) : number;
    const int64_t row = load_batches ? slot * n : first;  // with `load_batches`, experts are equal in size
    f.gate = rows_of(layer.gate, row, n);
    f.up = rows_of(layer.up, row, n);
    f.gate_bias = at(layer.gate_bias, first);
    f.up_bias = at(layer.up_bias, first);
    f.down_bias = down_bias(number);
    if (layer.by_output)
        f.down = rows_of(layer.down, down_rows[size_t(slot)], dim);
    else if (layer.panels.neurons) {
        f.down.base += row / layer.panels.neurons * layer.panels.bytes();
        f.down.count = n;
    } else
        f.down = rows_of(layer.down, row, n);
    if (f.mask) f.mask.words += experts->words[size_t(number)];
    if (f.active) f.active.words += experts->words[size_t(number)];
    f.accumulate = false;
    return f;
}

// The experts of a step's rows, ascending.
inline std::vector<int32_t> ExpertsOp::named() const {
    std::vector<int32_t> all;
    for (const Routing* routing : {&decode, &prompt})
        for (const Routing::Part& part : routing->parts())
            if (neurons(part)) all.push_back(int32_t(part.expert));
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    return all;
}

// Finds the neurons that a step's rows need. For decode rows: the neurons in their mask and, if gates are in
// memory, whose gates may be active.
inline void ExpertsOp::find_wanted() {
    std::fill(wanted.begin(), wanted.end(), 0);
    for (const Routing* routing : {&decode, &prompt})
        for (const Routing::Part& part : routing->parts()) {
            uint64_t* to = wanted.data() + experts->words[size_t(part.expert)];
            const int64_t words = ceil_div(neurons(part), 64);
            if (!is_decode(*routing) || !(by_gates() || layer.mask)) {
                std::fill(to, to + words, ~uint64_t(0));
                continue;
            }
            const Masks mask = of_part(by_gates() ? active_gates : layer.mask, part);
            for (int t = 0; t < part.rows(); ++t)
                for (int64_t word = 0; word < words; ++word) {
                    if (by_gates() && layer.mask) mask.row(t)[word] &= of_part(layer.mask, part).row(t)[word];
                    to[word] |= mask.row(t)[word];
                }
        }
}

// The FFN of one part's pairs.
inline Ffn ExpertsOp::view(const Routing& routing, const Routing::Part& part) const {
    Ffn f = expert(part.expert);
    f.x = input.of(part, before(routing));
    f.mask.tokens = f.active.tokens = routing.tokens(part);
    f.out = sum(routing, part.begin);
    if (layer.by_output) {
        f.hidden += part.begin * most_neurons;
    } else if (is_decode(routing)) {
        if (by_gates()) f.mask = of_part(active_gates, part);
        std::copy(levels[size_t(part.expert)].begin(), levels[size_t(part.expert)].end(), f.levels);
        f.partial += part.begin * most_leaves * sums_of(layer.dim());
        f.added += routing.number(part) * most_leaves;
        f.piece_stats += routing.number(part) * most_leaves;
    } else {
        f.hidden += part.begin * most_neurons;
        f.hidden_tokens = part.rows();
    }
    return f;
}

inline Input ExpertsOp::hidden_of(const Routing::Part& part) const {
    Input in = from_row(hidden, part.begin);
    in.cols = in.stride = neurons(part);
    return in;
}

}  // namespace hc
