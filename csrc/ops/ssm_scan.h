// Mamba-2's scan, a head at a time. Rows of a state are independent: some of them stay in L1 for all tokens
// of a chunk.
#pragma once
#include "ops/states.h"

namespace hc {
namespace {

// The steps of a chunk's tokens, and the factors by which they keep the state.
inline void scan_steps(const SsmScan& s, int64_t row, int64_t tokens, int64_t head, float* step,
                       float* keep) {
    for (int64_t t = 0; t < tokens; ++t) step[t] = s.dt[(row + t) * s.heads + head];
    const F bias = Vec::set1(s.dt_bias[head]), a = Vec::set1(s.a[head]);
    for_vectors(tokens, [&](int64_t t, int m) HC_INLINE_LAMBDA {
        const F v = softplus(Vec::add(load_part(step + t, m), bias));
        store_part(step + t, v, m);
        store_part(keep + t, decayed(Vec::mul(v, a)), m);
    });
}

// One token on R rows of the state: `from` and `to` are the first of them (the same or two).
template <int R> HC_INLINE void scan_step(const SsmScan& s, const float* from, float* to, const float* x,
                                          const float* b, float step, float keep, float d, float* out,
                                          NextState* next) {
    const float* c = b + s.groups * s.size;
    F in[R], sum[R];
    for (int r = 0; r < R; ++r) {
        in[r] = Vec::set1(step * x[r]);
        sum[r] = Vec::zero();
    }
    const F left = Vec::set1(keep);
    for_vectors(s.size, [&](int64_t i, int m) HC_INLINE_LAMBDA {
        const F b_part = load_part(b + i, m), c_part = load_part(c + i, m);
        for (int r = 0; r < R; ++r) {
            const int64_t at = r * s.size + i;
            const F v = Vec::fma(in[r], b_part, Vec::mul(left, load_part(from + at, m)));
            store_part(to + at, v, m);
            sum[r] = Vec::fma(v, c_part, sum[r]);
        }
        if (next) next->fetch();
    });
    float total[R];
    if constexpr (R == 4)
        Vec::sum4(sum, total);
    else
        total[0] = Vec::sum(sum[0]);
    for (int r = 0; r < R; ++r) out[r] = total[r] + d * x[r];
}

// A chunk's tokens on these rows.
template <int R> HC_NOINLINE void scan_rows(const SsmScan& s, int64_t row, int64_t tokens, int64_t head,
                                            int64_t at, const float* from, float* to, const float* step,
                                            const float* keep, NextState* next) {
    const int64_t group = head / (s.heads / s.groups), offset = head * s.width + at;
    for (int64_t t = 0; t < tokens; ++t) {
        const float* mixed = s.mixed + (row + t) * s.mixed_width();
        const float* b = mixed + s.heads * s.width + group * s.size;
        float* out = s.out + (row + t) * s.heads * s.width + offset;
        if (t == 0)
            scan_step<R>(s, from, to, mixed + offset, b, step[t], keep[t], s.d[head], out, next);
        else
            scan_step<R>(s, to, to, mixed + offset, b, step[t], keep[t], s.d[head], out, nullptr);
    }
}

void ssm_scan(const SsmScan& s, const StateRows& rows, int64_t head, uint8_t* local) {
    auto* scratch = reinterpret_cast<float*>(local);
    float *step = scratch, *keep = step + kScanTokens;
    const int64_t size = s.state();
    const float* from = rows.from ? rows.from + head * size : nullptr;
    float* to = rows.to ? rows.to + head * size : keep + kScanTokens;
    const bool has_next = head + 1 < s.heads;
    NextState next(has_next && from ? from + size : nullptr, has_next && rows.to ? to + size : nullptr, size,
                   larger<int64_t>(1, size / (4 * Vec::width)));
    if (!from) {
        clear(to, size);
        from = to;
    }
    for (int64_t t = 0; t < rows.count; t += kScanTokens) {
        const int64_t n = smaller<int64_t>(kScanTokens, rows.count - t), row = rows.first + t;
        scan_steps(s, row, n, head, step, keep);
        NextState* coming = t == 0 ? &next : nullptr;
        int64_t at = 0;
        for (; at + 4 <= s.width; at += 4)
            scan_rows<4>(s, row, n, head, at, from + at * s.size, to + at * s.size, step, keep, coming);
        for (; at < s.width; ++at)
            scan_rows<1>(s, row, n, head, at, from + at * s.size, to + at * s.size, step, keep, coming);
        from = to;
    }
}

}  // namespace
}  // namespace hc
