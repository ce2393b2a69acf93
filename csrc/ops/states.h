// Shared by the ops that keep a state: decays, and the softplus for steps and decays.
#pragma once
#include "ops/activation.h"
#include "ops/state_arguments.h"

namespace hc {
namespace {

inline F load_part(const float* p, int n) { return n == Vec::width ? Vec::load(p) : Vec::load(p, n); }
inline void store_part(float* p, F v, int n) { n == Vec::width ? Vec::store(p, v) : Vec::store(p, v, n); }

// Calls fn(i, n) for the vectors of n values; for whole vectors n is a constant.
template <class Fn> HC_INLINE void for_vectors(int64_t n, Fn&& fn) {
    int64_t i = 0;
    for (; i + Vec::width <= n; i += Vec::width) fn(i, Vec::width);
    if (i < n) fn(i, int(n - i));
}

// exp(x) of x <= 0. Returns 0 below -87, not the small number of exponential(): a state would become
// denormal, which is slow on processors. NaN stays NaN.
inline F decayed(F x) {
    const F y = exponential(x);
    return Vec::sub(y, Vec::greater(Vec::set1(-87.0f), x, y));
}

// log(1 + t), 0 <= t <= 1, as 2 atanh(s) with s = t / (2 + t). The polynomial was fitted for this function,
// to a relative error of 4e-9.
inline F log_of_one_and(F t) {
    const F s = Vec::div(t, Vec::add(Vec::set1(2.0f), t)), z = Vec::mul(s, s);
    F p = Vec::set1(0.140873283f);
    p = Vec::fma(p, z, Vec::set1(0.13980709f));
    p = Vec::fma(p, z, Vec::set1(0.200124264f));
    p = Vec::fma(p, z, Vec::set1(0.333331585f));
    p = Vec::fma(p, z, Vec::set1(1.0f));
    return Vec::mul(Vec::add(s, s), p);
}

// NaN stays NaN: max returns its second operand then.
inline F softplus(F x) {
    return Vec::add(Vec::max(Vec::zero(), x),
                    log_of_one_and(exponential(Vec::sub(Vec::zero(), Vec::abs(x)))));
}

inline F logistic(F x) {
    const F one = Vec::set1(1.0f);
    return Vec::div(one, Vec::add(one, exponential(Vec::sub(Vec::zero(), x))));
}

// The first lane: computed as a vector, a single number has the same bits as among others.
inline float lane(F v) {
    float all[Vec::width];
    Vec::store(all, v);
    return all[0];
}

inline void clear(float* p, int64_t n) {
    for_vectors(n, [&](int64_t i, int m) HC_INLINE_LAMBDA { store_part(p + i, Vec::zero(), m); });
}

// Brings the state that a thread most likely reads next into L2, a share at a time, during its computation.
struct NextState {
    const float *from, *to;  // either may be null
    int64_t left, share;     // lines
    NextState(const float* from, const float* to, int64_t floats, int64_t steps)
        : from(from), to(to == from ? nullptr : to), left(floats / 16), share(left / steps + 1) {}
    HC_INLINE void fetch() {
        for (int64_t i = 0; i < share && left > 0; ++i, --left) {
            if (from) Vec::prefetch_l2((from += 16) - 16);
            if (to) Vec::prefetch_l2((to += 16) - 16);
        }
    }
};

void decay(const Decay& d, const float* x, float* out) {
    const int64_t head_channels = d.channels / d.heads;
    const auto part = [&](int64_t at, int64_t n, F factor) HC_INLINE_LAMBDA {
        for_vectors(n, [&](int64_t i, int m) HC_INLINE_LAMBDA {
            const F sum = Vec::add(load_part(x + at + i, m), load_part(d.bias + at + i, m));
            const F scale = head_channels == 1 ? load_part(d.factor + at + i, m) : factor;
            store_part(out + at + i, Vec::mul(scale, softplus(sum)), m);
        });
    };
    if (head_channels == 1) return part(0, d.channels, Vec::zero());
    for (int64_t h = 0; h < d.heads; ++h) part(h * head_channels, head_channels, Vec::set1(d.factor[h]));
}

void multiply(Gate kind, const float* x, const float* gate, float* out, int64_t n) {
    for_vectors(n, [&](int64_t i, int m) HC_INLINE_LAMBDA {
        F g = load_part(gate + i, m);
        if (kind == kSiluGate) g = activate(kSilu, g, Vec::zero());
        if (kind == kSigmoidGate) g = logistic(g);
        if (kind == kReluGate) g = Vec::max(Vec::zero(), g);  // NaN stays NaN
        if (kind == kTanhGate) g = hyperbolic_tangent(g);
        store_part(out + i, x ? Vec::mul(load_part(x + i, m), g) : g, m);
    });
}

}  // namespace
}  // namespace hc
