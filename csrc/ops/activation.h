// Activations, and the exponential they need.
#pragma once
#include "simd/block_types.h"

namespace hc {
namespace {

// exp(x) = scale (1 + less), to about 2 ulp: x = n ln 2 + r, scale = 2^n, |r| <= ln 2 / 2, less = r slope
// with a polynomial for (exp(r) - 1) / r.
struct Exponential {
    F scale, slope, r;
};
inline Exponential exponential_parts(F x) {
    // The constants come first: min and max return their second operand for NaN, so NaN stays NaN.
    const F clamped = Vec::min(Vec::set1(88.0f), Vec::max(Vec::set1(-87.0f), x));
    const I n = Vec::to_int(Vec::mul(clamped, Vec::set1(1.44269504f)));
    const F nf = Vec::to_float(n);
    F r = Vec::fma(nf, Vec::set1(-0.693145752f), clamped);
    r = Vec::fma(nf, Vec::set1(-1.42860677e-6f), r);
    F p = Vec::set1(1.0f / 720);
    p = Vec::fma(p, r, Vec::set1(1.0f / 120));
    p = Vec::fma(p, r, Vec::set1(1.0f / 24));
    p = Vec::fma(p, r, Vec::set1(1.0f / 6));
    p = Vec::fma(p, r, Vec::set1(0.5f));
    p = Vec::fma(p, r, Vec::set1(1.0f));
    return {Vec::as_float(Vec::shl<23>(Vec::add_i(n, Vec::set1_i(127)))), p, r};
}

inline F exponential(F x) {
    const Exponential e = exponential_parts(x);
    return Vec::mul(Vec::fma(e.slope, e.r, Vec::set1(1.0f)), e.scale);
}

// m / (m + 2) with m = exp(2x) - 1, which is accurate for small x.
inline F hyperbolic_tangent(F x) {
    const Exponential e = exponential_parts(Vec::add(x, x));
    const F m = Vec::fma(e.scale, Vec::mul(e.slope, e.r), Vec::sub(e.scale, Vec::set1(1.0f)));
    return Vec::div(m, Vec::add(m, Vec::set1(2.0f)));
}

// Gemma 2's softcap of scores and logits: cap tanh(x / cap).
inline void softcap(float cap, float* x, int64_t n) {
    const F most = Vec::set1(cap);
    for (int64_t i = 0; i < n; i += Vec::width) {
        const int m = int(smaller<int64_t>(Vec::width, n - i));
        const F part = Vec::div(Vec::load(x + i, m), most);
        Vec::store(x + i, Vec::mul(most, hyperbolic_tangent(part)), m);
    }
}

// P(X > a) of a standard normal X, a >= 0: exp(-a^2 / 2) t p(t) with t = 1 / (1 + 0.3 a). The polynomial was
// fitted for this function, to a relative error of 2e-7.
inline F normal_tail(F a) {
    const F one = Vec::set1(1.0f), t = Vec::div(one, Vec::fma(Vec::set1(0.300520382f), a, one));
    F p = Vec::set1(0.0348133482f);
    p = Vec::fma(p, t, Vec::set1(-0.152753532f));
    p = Vec::fma(p, t, Vec::set1(0.19728601f));
    p = Vec::fma(p, t, Vec::set1(-0.0456975065f));
    p = Vec::fma(p, t, Vec::set1(0.124455482f));
    p = Vec::fma(p, t, Vec::set1(0.101271093f));
    p = Vec::fma(p, t, Vec::set1(0.120776556f));
    p = Vec::fma(p, t, Vec::set1(0.11984843f));
    return Vec::mul(Vec::mul(p, t), exponential(Vec::mul(Vec::mul(a, a), Vec::set1(-0.5f))));
}

inline F activate(Activation kind, F g, F threshold) {
    const F one = Vec::set1(1.0f);
    switch (kind) {
        case kRelu:
        case kDRelu: return Vec::greater(g, threshold, g);
        case kRelu2: {
            const F v = Vec::greater(g, threshold, g);
            return Vec::mul(v, v);
        }
        case kSilu: return Vec::div(g, Vec::add(one, exponential(Vec::sub(Vec::zero(), g))));
        case kGelu: {  // 0.5 g (1 + tanh(u)) = g / (1 + exp(-2 u)), u = sqrt(2 / pi) (g + 0.044715 g^3)
            const F g2 = Vec::mul(g, g);
            const F u =
                Vec::mul(Vec::mul(Vec::set1(-1.59576912f), g), Vec::fma(Vec::set1(0.044715f), g2, one));
            return Vec::div(g, Vec::add(one, exponential(u)));
        }
        case kGeluErf: {  // g P(X <= g) = max(g, 0) - |g| P(X > |g|); beyond 16 the tail is 0
            const F a = Vec::min(Vec::set1(16.0f), Vec::abs(g));
            return Vec::sub(Vec::max(Vec::zero(), g), Vec::mul(a, normal_tail(a)));
        }
        case kSwigluOai: break;  // needs gate and up together: clamped_swiglu
    }
    return g;
}

// gpt-oss: h = x sigmoid(alpha x) (y + 1) with x = min(gate, limit), y = up clamped to +-limit. NaN stays
// NaN.
inline void clamped_swiglu(float limit, float alpha, const float* gate, const float* up, float* h,
                           int64_t n) {
    const F one = Vec::set1(1.0f), most = Vec::set1(limit), least = Vec::set1(-limit);
    const F slope = Vec::set1(-alpha);
    for (int64_t i = 0; i < n; i += Vec::width) {
        const int m = int(smaller<int64_t>(Vec::width, n - i));
        const F x = Vec::min(most, Vec::load(gate + i, m));
        const F y = Vec::max(least, Vec::min(most, Vec::load(up + i, m)));
        const F swish = Vec::div(x, Vec::add(one, exponential(Vec::mul(slope, x))));
        Vec::store(h + i, Vec::mul(swish, Vec::add(y, one)), m);
    }
}

// h = act(gate) * up, or act(gate) without up. h may be gate. NaN stays NaN: max returns its second operand
// then.
inline void activate_rows(const Ffn& f, const float* gate, const float* up, float* h, int64_t n) {
    const Activation kind = f.activation;
    if (kind == kSwigluOai) return clamped_swiglu(f.limit, f.alpha, gate, up, h, n);
    const F threshold = Vec::set1(f.threshold);
    for (int64_t i = 0; i < n; i += Vec::width) {
        const int m = int(smaller<int64_t>(Vec::width, n - i));
        F v = activate(kind, Vec::load(gate + i, m), threshold);
        if (up) {
            const F u = Vec::load(up + i, m);
            v = Vec::mul(v, kind == kDRelu ? Vec::max(Vec::zero(), u) : u);
        }
        Vec::store(h + i, v, m);
    }
}

}  // namespace
}  // namespace hc
