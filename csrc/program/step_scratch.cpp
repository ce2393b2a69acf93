#include "program/step_scratch.h"

#include "program/program_parts.h"

namespace hc {

namespace {

Rows rows_of(const StepShape& s, int64_t count, int64_t cols) {
    Rows rows;
    rows.count = count;
    rows.cols = cols;
    rows.type = cols % kBlock || s.math == kSplitMath ? F32 : Q8_0;
    return rows;
}

Ffn ffn_of(const StepShape& s, int64_t neurons, int64_t experts, int64_t chosen) {
    Ffn f{};
    f.up = rows_of(s, neurons * experts, s.dim);
    f.down = s.by_output ? rows_of(s, s.dim * experts, neurons) : rows_of(s, neurons * experts, s.dim);
    f.by_output = s.by_output;
    f.max_leaves = int(ceil_div(kMaxLeaves, chosen));
    return f;
}

}  // namespace

size_t step_scratch_bytes(const Kernels& kernels, const StepShape& s) {
    Batch batch{};
    batch.pages_per_sequence = s.pages_per_sequence;
    Program p(kernels, std::make_shared<Pool>(1), batch, {s.tokens, 1, s.logits}, s.math);
    Attention a{};
    a.heads = int(s.heads);
    a.kv_heads = int(s.kv_heads);
    a.head_dim = int(s.head_dim);
    p.attention(a, 1);
    for (const int64_t cols : {s.dim, s.heads * s.head_dim})
        for (const RowsOf rows : {kTokens, kLogits}) p.linear(nullptr, {Product{rows_of(s, 1, cols)}}, rows);
    if (s.experts == 1) {
        p.ffn(ffn_of(s, s.neurons, 1, 1), nullptr);
        return p.scratch_bytes();
    }
    p.router(nullptr, rows_of(s, s.experts, s.dim), nullptr, Router{}, nullptr, nullptr, nullptr);
    std::vector<int64_t> ends;
    for (int64_t e = 1; e <= s.experts; ++e) ends.push_back(e * s.neurons);
    const Ffn ffn = ffn_of(s, s.neurons, s.experts, s.chosen);
    p.ffn(ffn, nullptr, std::make_shared<Experts>(ends, s.chosen));
    if (s.shared) p.ffn(ffn_of(s, s.shared, 1, 1), nullptr);
    return p.scratch_bytes();
}

}  // namespace hc
