// The gated delta rule, a head at a time. Columns of a state are independent: some of them stay in L1 for all
// tokens of a chunk. A vector holds neighbouring columns of a row, so no sum goes across a vector.
#pragma once
#include <cmath>

#include "ops/states.h"

namespace hc {
namespace {

// A token's inputs of the rule, prepared.
struct DeltaToken {
    float *keep, *read, *key, *query;  // exp(decay), that times k, k and q
    float* beta;
};

inline DeltaToken delta_token(const GatedDelta& g, float* scratch, int64_t token) {
    const int64_t row = state_row(g.key_dim);
    float* at = scratch + token * (kDeltaVectors * row + kStateRow);
    return {at, at + row, at + 2 * row, at + 3 * row, at + 4 * row};
}

// to = x * scale / sqrt(sum of x^2 + eps)
inline void to_unit(const float* x, int64_t n, float eps, float scale, float* to) {
    F squares = Vec::zero();
    for_vectors(n, [&](int64_t i, int m) HC_INLINE_LAMBDA {
        const F v = load_part(x + i, m);
        squares = Vec::fma(v, v, squares);
    });
    const F factor = Vec::set1(scale / sqrtf(Vec::sum(squares) + eps));
    for_vectors(n, [&](int64_t i, int m)
                       HC_INLINE_LAMBDA { store_part(to + i, Vec::mul(load_part(x + i, m), factor), m); });
}

inline void make_ready(const GatedDelta& g, int64_t row, int64_t head, float scale, const DeltaToken& to) {
    const int64_t n = g.key_dim;
    const float* q = g.mixed + row * g.width() + g.key_head(head) * n;
    to_unit(q, n, g.eps, scale, to.query);
    to_unit(q + g.keys * n, n, g.eps, 1.0f, to.key);
    const int64_t at = row * g.heads + head;
    const F whole = g.per_channel ? Vec::zero() : decayed(Vec::set1(g.decay[at]));
    for_vectors(n, [&](int64_t i, int m) HC_INLINE_LAMBDA {
        const F keep = g.per_channel ? decayed(load_part(g.decay + at * n + i, m)) : whole;
        store_part(to.keep + i, keep, m);
        store_part(to.read + i, Vec::mul(keep, load_part(to.key + i, m)), m);
    });
    *to.beta = lane(logistic(Vec::set1(g.beta[at])));
}

// One token on N vectors of columns, the last of m values. `from` and `to` are the state (the same or two); v
// and out belong to the row. Each row prefetches a share of the next state.
template <int N> HC_INLINE void delta_step(const GatedDelta& g, const DeltaToken& token, const float* from,
                                           float* to, const float* v, float* out, int m, NextState* next) {
    const int64_t stride = g.value_dim, n = g.key_dim;
    if constexpr (N > 1) m = Vec::width;
    F sum[N], delta[N];
    for (int k = 0; k < N; ++k) sum[k] = Vec::zero();
    for (int64_t i = 0; i < n; ++i) {
        const F read = Vec::set1(token.read[i]);
        for (int k = 0; k < N; ++k)
            sum[k] = Vec::fma(read, load_part(from + i * stride + k * Vec::width, m), sum[k]);
        if (next) next->fetch();
    }
    const F beta = Vec::set1(*token.beta);
    for (int k = 0; k < N; ++k) {
        delta[k] = Vec::mul(beta, Vec::sub(load_part(v + k * Vec::width, m), sum[k]));
        sum[k] = Vec::zero();
    }
    for (int64_t i = 0; i < n; ++i) {
        const F keep = Vec::set1(token.keep[i]), key = Vec::set1(token.key[i]);
        const F query = Vec::set1(token.query[i]);
        for (int k = 0; k < N; ++k) {
            const int64_t at = i * stride + k * Vec::width;
            const F s = Vec::fma(key, delta[k], Vec::mul(keep, load_part(from + at, m)));
            store_part(to + at, s, m);
            sum[k] = Vec::fma(query, s, sum[k]);
        }
    }
    for (int k = 0; k < N; ++k) store_part(out + k * Vec::width, sum[k], m);
}

// A chunk's tokens on these columns; `row` is the first token's row of the step.
template <int N> HC_NOINLINE void delta_columns(const GatedDelta& g, float* scratch, int64_t row,
                                                int64_t tokens, int64_t head, const float* from, float* to,
                                                int64_t at, int m, NextState* next) {
    const int64_t values = 2 * g.keys * g.key_dim + head * g.value_dim + at;
    for (int64_t t = 0; t < tokens; ++t) {
        const float* v = g.mixed + (row + t) * g.width() + values;
        float* out = g.out + ((row + t) * g.heads + head) * g.value_dim + at;
        const DeltaToken token = delta_token(g, scratch, t);
        if (t == 0)
            delta_step<N>(g, token, from + at, to + at, v, out, m, next);
        else
            delta_step<N>(g, token, to + at, to + at, v, out, m, nullptr);
    }
}

void gated_delta(const GatedDelta& g, const StateRows& rows, int64_t head, uint8_t* local) {
    constexpr int kVectors = 4, kColumns = kVectors * Vec::width;
    auto* scratch = reinterpret_cast<float*>(local);
    const int64_t size = g.state(), token = kDeltaVectors * state_row(g.key_dim) + kStateRow;
    const float* from = rows.from ? rows.from + head * size : nullptr;
    float* to = rows.to ? rows.to + head * size : scratch + kDeltaTokens * token;
    const bool has_next = head + 1 < g.heads;
    const int64_t blocks = (g.value_dim + kColumns - 1) / kColumns;
    NextState next(has_next && from ? from + size : nullptr, has_next && rows.to ? to + size : nullptr, size,
                   blocks * g.key_dim);
    if (!from) {
        clear(to, size);
        from = to;
    }
    const float scale = 1.0f / sqrtf(float(g.key_dim));
    for (int64_t t = 0; t < rows.count; t += kDeltaTokens) {
        const int64_t n = smaller<int64_t>(kDeltaTokens, rows.count - t), row = rows.first + t;
        for (int64_t i = 0; i < n; ++i) make_ready(g, row + i, head, scale, delta_token(g, scratch, i));
        NextState* coming = t == 0 ? &next : nullptr;
        int64_t at = 0;
        for (; at + kColumns <= g.value_dim; at += kColumns)
            delta_columns<kVectors>(g, scratch, row, n, head, from, to, at, Vec::width, coming);
        for (; at < g.value_dim; at += Vec::width) {
            const int m = int(smaller<int64_t>(Vec::width, g.value_dim - at));
            delta_columns<1>(g, scratch, row, n, head, from, to, at, m, coming);
        }
        from = to;
    }
}

}  // namespace
}  // namespace hc
