// Norms, rotary positions and the small element-wise ops.
#pragma once
#include <cmath>

#include "simd/block_dot.h"

namespace hc {
namespace {

void norm(const NormArgs& a, const float* x, float* out) {
    const int64_t n = a.dim;
    F total = Vec::zero();
    float mean = 0;
    if (a.centre) {
        for (int64_t i = 0; i < n; i += Vec::width)
            total = Vec::add(total, Vec::load(x + i, int(smaller<int64_t>(Vec::width, n - i))));
        mean = Vec::sum(total) / float(n);
    }
    F squares = Vec::zero();
    for (int64_t i = 0; i < n; i += Vec::width) {
        const int m = int(smaller<int64_t>(Vec::width, n - i));
        const F v = Vec::load(x + i, m);
        F d = v;
        if (a.centre) {
            Vec::store(out + i, Vec::sub(v, Vec::set1(mean)), m);
            d = Vec::load(out + i, m);  // lanes past the end are 0
        }
        squares = Vec::fma(d, d, squares);
    }
    const F scale = Vec::set1(1.0f / sqrtf(Vec::sum(squares) / float(n) + a.eps));
    const float* from = a.centre ? out : x;
    for (int64_t i = 0; i < n; i += Vec::width) {
        const int m = int(smaller<int64_t>(Vec::width, n - i));
        F v = Vec::mul(Vec::load(from + i, m), scale);
        if (a.weight) v = Vec::mul(v, Vec::load(a.weight + i, m));
        if (a.bias) v = Vec::add(v, Vec::load(a.bias + i, m));
        Vec::store(out + i, v, m);
    }
}

void rope(const RopeArgs& a, float* head, int position) {
    const float *cos = a.cos + position * a.half, *sin = a.sin + position * a.half;
    const int64_t step = a.interleaved ? 2 : 1, far = a.interleaved ? 1 : a.half;
    int64_t i = 0;
    for (; !a.interleaved && i + Vec::width <= a.half; i += Vec::width) {
        const F c = Vec::load(cos + i), s = Vec::load(sin + i), x = Vec::load(head + i),
                y = Vec::load(head + far + i);
        Vec::store(head + i, Vec::sub(Vec::mul(x, c), Vec::mul(y, s)));
        Vec::store(head + far + i, Vec::add(Vec::mul(x, s), Vec::mul(y, c)));
    }
    for (; i < a.half; ++i) {
        float *p = head + i * step, *q = p + far;
        const float x = *p, y = *q;
        *p = x * cos[i] - y * sin[i];
        *q = x * sin[i] + y * cos[i];
    }
}

// Values with a factor of 0 are not read, so that NaN does not stay in cleared values.
void add(float* x, const float* y, int64_t n, float keep, float scale) {
    const F k = Vec::set1(keep), s = Vec::set1(scale);
    for (int64_t i = 0; i < n; i += Vec::width) {
        const int m = int(smaller<int64_t>(Vec::width, n - i));
        const F kept = keep != 0 ? Vec::mul(k, Vec::load(x + i, m)) : Vec::zero();
        const F added = scale != 0 ? Vec::mul(s, Vec::load(y + i, m)) : Vec::zero();
        Vec::store(x + i, Vec::add(kept, added), m);
    }
}

void relu(float* x, int64_t n) {
    for (int64_t i = 0; i < n; i += Vec::width) {
        const int m = int(smaller<int64_t>(Vec::width, n - i));
        Vec::store(x + i, Vec::max(Vec::zero(), Vec::load(x + i, m)), m);  // NaN stays NaN
    }
}

double read(const uint8_t* data, size_t bytes) {
    I sum[4] = {Vec::zero_i(), Vec::zero_i(), Vec::zero_i(), Vec::zero_i()};
    constexpr size_t step = sizeof(I);
    for (size_t i = 0; i + 4 * step <= bytes; i += 4 * step)
        for (int k = 0; k < 4; ++k) sum[k] = Vec::bit_xor(sum[k], Vec::load_i(data + i + size_t(k) * step));
    return Vec::sum(Vec::to_float(Vec::bit_xor(Vec::bit_xor(sum[0], sum[1]), Vec::bit_xor(sum[2], sum[3]))));
}

}  // namespace
}  // namespace hc
