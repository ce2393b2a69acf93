// Activations, and the exponential they need.
#pragma once
#include "../block_dot.h"

namespace hc {
namespace {

// exp(x) to about 2 ulp: x = n ln 2 + r, |r| <= ln 2 / 2, a degree-6 polynomial for exp(r).
inline F exponential(F x) {
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
    p = Vec::fma(p, r, Vec::set1(1.0f));
    const F scale = Vec::as_float(Vec::shl<23>(Vec::add_i(n, Vec::set1_i(127))));
    return Vec::mul(p, scale);
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
    }
    return g;
}

// h = act(gate) * up; without up, act(gate). h may be gate. NaN stays NaN: max gives its second operand then.
inline void activate_rows(Activation kind, float threshold, const float* gate, const float* up, float* h,
                          int64_t n) {
    const F limit = Vec::set1(threshold);
    for (int64_t i = 0; i < n; i += Vec::width) {
        const int m = int(smaller<int64_t>(Vec::width, n - i));
        F v = activate(kind, Vec::load(gate + i, m), limit);
        if (up) {
            const F u = Vec::load(up + i, m);
            v = Vec::mul(v, kind == kDRelu ? Vec::max(Vec::zero(), u) : u);
        }
        Vec::store(h + i, v, m);
    }
}

}  // namespace
}  // namespace hc
