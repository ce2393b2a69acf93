// RWKV-7's recurrence, a head at a time. As in the gated delta rule, columns of a state are independent: some
// of them stay in L1 for all tokens of a chunk. A vector holds neighbouring columns of a row.
#pragma once
#include <cmath>

#include "ops/states.h"

namespace hc {
namespace {

// A token's inputs of the recurrence, prepared.
struct WkvToken {
    float *keep, *read, *take;   // decays; the unit key, and that times minus the rate
    float *key, *query, *value;  // k, r and v
    float* bonus;
};

inline WkvToken wkv_token(const Wkv& w, float* scratch, int64_t token) {
    const int64_t row = state_row(w.dim);
    float* at = scratch + token * (kWkvVectors * row + kStateRow);
    return {at, at + row, at + 2 * row, at + 3 * row, at + 4 * row, at + 5 * row, at + 6 * row};
}

inline void make_ready(const Wkv& w, int64_t row, int64_t head, const WkvToken& to) {
    const int64_t n = w.dim, all = w.heads * n, at = row * all + head * n;
    const float *unit = w.vectors + head * n, *pull = unit + all, *extra = pull + all;
    const F one = Vec::set1(1.0f), slowest = Vec::set1(-0.606530660f);  // -exp(-1/2)
    F squares = Vec::zero(), bonus = Vec::zero();
    for_vectors(n, [&](int64_t i, int m) HC_INLINE_LAMBDA {
        const F u = Vec::mul(load_part(w.k + at + i, m), load_part(unit + i, m));
        squares = Vec::fma(u, u, squares);
        store_part(to.read + i, u, m);
    });
    const F factor = Vec::set1(1.0f / larger(1e-12f, sqrtf(Vec::sum(squares))));
    for_vectors(n, [&](int64_t i, int m) HC_INLINE_LAMBDA {
        const F rate = logistic(load_part(w.rate + at + i, m));
        const F u = Vec::mul(load_part(to.read + i, m), factor);
        const F pulled = Vec::fma(Vec::sub(rate, one), load_part(pull + i, m), one);
        const F key = Vec::mul(load_part(w.k + at + i, m), pulled), r = load_part(w.r + at + i, m);
        F v = load_part(w.v + at + i, m);
        if (w.share) {
            const F change = Vec::sub(load_part(w.first + at + i, m), v);
            v = Vec::fma(change, logistic(load_part(w.share + at + i, m)), v);
        }
        bonus = Vec::fma(Vec::mul(r, key), load_part(extra + i, m), bonus);
        store_part(to.keep + i, decayed(Vec::mul(slowest, logistic(load_part(w.decay + at + i, m)))), m);
        store_part(to.read + i, u, m);
        store_part(to.take + i, Vec::mul(Vec::sub(Vec::zero(), rate), u), m);
        store_part(to.key + i, key, m);
        store_part(to.query + i, r, m);
        store_part(to.value + i, v, m);
    });
    *to.bonus = Vec::sum(bonus);
}

// One token on N vectors of columns, the last of m values. `from` and `to` are the state (the same or two); v
// and out belong to the row. Each row prefetches a share of the next state.
template <int N> HC_INLINE void wkv_step(const Wkv& w, const WkvToken& token, const float* from, float* to,
                                         const float* v, float* out, int m, NextState* next) {
    const int64_t n = w.dim;
    if constexpr (N > 1) m = Vec::width;
    F seen[N], value[N], sum[N];
    for (int k = 0; k < N; ++k) seen[k] = Vec::zero();
    for (int64_t i = 0; i < n; ++i) {
        const F read = Vec::set1(token.read[i]);
        for (int k = 0; k < N; ++k)
            seen[k] = Vec::fma(read, load_part(from + i * n + k * Vec::width, m), seen[k]);
        if (next) next->fetch();
    }
    for (int k = 0; k < N; ++k) {
        value[k] = load_part(v + k * Vec::width, m);
        sum[k] = Vec::zero();
    }
    for (int64_t i = 0; i < n; ++i) {
        const F keep = Vec::set1(token.keep[i]), take = Vec::set1(token.take[i]);
        const F key = Vec::set1(token.key[i]), query = Vec::set1(token.query[i]);
        for (int k = 0; k < N; ++k) {
            const int64_t at = i * n + k * Vec::width;
            F s = Vec::fma(take, seen[k], Vec::mul(keep, load_part(from + at, m)));
            s = Vec::fma(key, value[k], s);
            store_part(to + at, s, m);
            sum[k] = Vec::fma(query, s, sum[k]);
        }
    }
    for (int k = 0; k < N; ++k) store_part(out + k * Vec::width, sum[k], m);
}

// A chunk's tokens on these columns; `row` is the first token's row of the step.
template <int N> HC_NOINLINE void wkv_columns(const Wkv& w, float* scratch, int64_t row, int64_t tokens,
                                              int64_t head, const float* from, float* to, int64_t at, int m,
                                              NextState* next) {
    for (int64_t t = 0; t < tokens; ++t) {
        const WkvToken token = wkv_token(w, scratch, t);
        float* out = w.out + ((row + t) * w.heads + head) * w.dim + at;
        if (t == 0)
            wkv_step<N>(w, token, from + at, to + at, token.value + at, out, m, next);
        else
            wkv_step<N>(w, token, to + at, to + at, token.value + at, out, m, nullptr);
    }
}

// out = norm(out) over the head, and the bonus times v.
inline void wkv_end(const Wkv& w, int64_t row, int64_t head, const WkvToken& token) {
    const int64_t n = w.dim, all = w.heads * n;
    float* out = w.out + row * all + head * n;
    const float *weight = w.vectors + 3 * all + head * n, *bias = weight + all;
    F sum = Vec::zero(), squares = Vec::zero();
    for_vectors(n, [&](int64_t i, int m) HC_INLINE_LAMBDA { sum = Vec::add(sum, load_part(out + i, m)); });
    const F mean = Vec::set1(Vec::sum(sum) / float(n));
    for_vectors(n, [&](int64_t i, int m)
                       HC_INLINE_LAMBDA { store_part(out + i, Vec::sub(load_part(out + i, m), mean), m); });
    // Loaded again, lanes beyond the last value are 0.
    for_vectors(n, [&](int64_t i, int m) HC_INLINE_LAMBDA {
        const F v = load_part(out + i, m);
        squares = Vec::fma(v, v, squares);
    });
    const F factor = Vec::set1(1.0f / sqrtf(Vec::sum(squares) / float(n) + w.eps));
    const F bonus = Vec::set1(*token.bonus);
    for_vectors(n, [&](int64_t i, int m) HC_INLINE_LAMBDA {
        const F normed = Vec::mul(load_part(out + i, m), factor);
        const F scaled = Vec::fma(normed, load_part(weight + i, m), load_part(bias + i, m));
        store_part(out + i, Vec::fma(bonus, load_part(token.value + i, m), scaled), m);
    });
}

void wkv7(const Wkv& w, const StateRows& rows, int64_t head, uint8_t* local) {
    constexpr int kVectors = 4, kColumns = kVectors * Vec::width;
    auto* scratch = reinterpret_cast<float*>(local);
    const int64_t size = w.state(), token = kWkvVectors * state_row(w.dim) + kStateRow;
    const float* from = rows.from ? rows.from + head * size : nullptr;
    float* to = rows.to ? rows.to + head * size : scratch + kDeltaTokens * token;
    const bool has_next = head + 1 < w.heads;
    const int64_t blocks = (w.dim + kColumns - 1) / kColumns;
    NextState next(has_next && from ? from + size : nullptr, has_next && rows.to ? to + size : nullptr, size,
                   blocks * w.dim);
    if (!from) {
        clear(to, size);
        from = to;
    }
    for (int64_t t = 0; t < rows.count; t += kDeltaTokens) {
        const int64_t n = smaller<int64_t>(kDeltaTokens, rows.count - t), row = rows.first + t;
        for (int64_t i = 0; i < n; ++i) make_ready(w, row + i, head, wkv_token(w, scratch, i));
        NextState* coming = t == 0 ? &next : nullptr;
        int64_t at = 0;
        for (; at + kColumns <= w.dim; at += kColumns)
            wkv_columns<kVectors>(w, scratch, row, n, head, from, to, at, Vec::width, coming);
        for (; at < w.dim; at += Vec::width) {
            const int m = int(smaller<int64_t>(Vec::width, w.dim - at));
            wkv_columns<1>(w, scratch, row, n, head, from, to, at, m, coming);
        }
        for (int64_t i = 0; i < n; ++i) wkv_end(w, row + i, head, wkv_token(w, scratch, i));
        from = to;
    }
}

}  // namespace
}  // namespace hc
