// Eight floats. Each operation is IEEE's on each lane separately, so that the bits do not depend on the
// instructions that the compiler chooses.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace hc {
namespace {

constexpr int kLanes = 8;

#if defined(__GNUC__) && !defined(HC_PLAIN_LANES)

using V = float __attribute__((vector_size(4 * kLanes)));
using Mask = int32_t __attribute__((vector_size(4 * kLanes)));
inline V select(Mask mask, V a, V b) { return mask ? a : b; }

#else

struct V {
    float at[kLanes];
    float operator[](int lane) const { return at[lane]; }
};
struct Mask {
    bool at[kLanes];
};
template <class R, class Fn> R each_lane(Fn fn) {
    R r;
    for (int i = 0; i < kLanes; ++i) r.at[i] = fn(i);
    return r;
}
#define HC_LANES(R, op)                                                 \
    inline R operator op(const V& a, const V& b) {                      \
        return each_lane<R>([&](int i) { return a.at[i] op b.at[i]; }); \
    }
HC_LANES(V, +)
HC_LANES(V, -)
HC_LANES(V, *)
HC_LANES(V, /)
HC_LANES(Mask, <)
HC_LANES(Mask, >)
#undef HC_LANES
inline V& operator+=(V& a, const V& b) { return a = a + b; }
inline V select(const Mask& mask, const V& a, const V& b) {
    return each_lane<V>([&](int i) { return mask.at[i] ? a.at[i] : b.at[i]; });
}

#endif

inline V load(const float* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
inline void store(float* to, V v) { std::memcpy(to, &v, sizeof v); }
inline V splat(float x) {
    const float all[kLanes] = {x, x, x, x, x, x, x, x};
    return load(all);
}
inline V smaller(V a, V b) { return select(a < b, a, b); }
inline V larger(V a, V b) { return select(a > b, a, b); }
inline V size_of(V a) { return larger(a, splat(0) - a); }
// a / b, or 0 if b is 0.
inline V ratio(V a, V b) { return select(size_of(b) > splat(0), a / b, splat(0)); }
// The nearest integer, ties to even, of values below 2^22: adding 1.5 * 2^23 leaves no bits for a fraction.
inline V round_lanes(V a) { return (a + splat(12582912.0f)) - splat(12582912.0f); }
inline V between(V a, V low, V high) { return smaller(larger(a, low), high); }

inline V root(V a) {
    float at[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) at[lane] = sqrtf(a[lane]);
    return load(at);
}

// Sums in the order of the lanes.
inline double sum_lanes(V v) {
    double sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += double(v[lane]);
    return sum;
}
inline float largest_lane(V v) {
    float most = v[0];
    for (int lane = 1; lane < kLanes; ++lane) most = v[lane] > most ? v[lane] : most;
    return most;
}

// Eight runs of N weights: weight j of run i is lane i of row j.
template <int N> struct Runs {
    alignas(32) float x[N][kLanes];
    alignas(32) float importance[N][kLanes];
    alignas(32) float w[N][kLanes];  // weight of its squared error
};

// Loads consecutive runs; missing ones are 0. Values are multiplied by `scale`. A squared error has the
// weight importance (`w`, if given) * (|weight| + root mean square of the run), as in llama.cpp's Q4_K. With
// equal weights of all errors, the fit shrinks large weights and so the products. This rule brings the
// model's distributions nearer to the float model's (docs/log.md).
template <int N> void load_runs(Runs<N>& to, const float* x, const float* w, int runs, const float* scale) {
    for (int j = 0; j < N; ++j) {
        store(to.x[j], splat(0));
        store(to.importance[j], splat(1));
    }
    for (int i = 0; i < runs; ++i)
        for (int j = 0; j < N; ++j) to.x[j][i] = x[i * N + j] * scale[i];
    for (int i = 0; w && i < runs; ++i)
        for (int j = 0; j < N; ++j) to.importance[j][i] = w[i * N + j];
    V squares = splat(0);
    for (int j = 0; j < N; ++j) squares += load(to.x[j]) * load(to.x[j]);
    const V size = root(squares * splat(1.0f / N));
    for (int j = 0; j < N; ++j) store(to.w[j], load(to.importance[j]) * (size + size_of(load(to.x[j]))));
}

}  // namespace
}  // namespace hc
