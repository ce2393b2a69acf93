// Causal attention over the paged cache, in splits of kSplit positions merged in order (online softmax, arXiv
// 2205.14135), so that a row's result depends neither on the batch nor on the threads.
#pragma once
#include "activation.h"

namespace hc {
namespace {

// One row of the cache. C is the struct of the cache's type.
template <class C> inline const uint8_t* cache_row(const Attention& a, const void* cache, const Batch& b,
                                                   int token, int kv_head, int position) {
    const int64_t page = b.pages[b.sequence[token] * b.pages_per_sequence + position / kPage];
    const int64_t row = (page * a.kv_heads + kv_head) * kPage + position % kPage;
    return (const uint8_t*)cache + row * a.head_dim * C::bytes;
}

template <class C> inline float dot_cached(const float* q, const uint8_t* k, int n) {
    F sum = Vec::zero();
    int i = 0;
    for (; i + Vec::width <= n; i += Vec::width) sum = Vec::fma(Vec::load(q + i), C::load(k, i), sum);
    if (i < n) sum = Vec::fma(Vec::load(q + i, n - i), C::load(k, i, n - i), sum);
    return Vec::sum(sum);
}

// acc = sum over positions of p[position] * V, four vectors of the head at a time.
template <class C> inline void add_values(const Attention& a, const Batch& b, int token, int kv_head,
                                          int first, int count, const float* p, float* acc) {
    constexpr int N = 4;
    for (int d = 0; d < a.head_dim; d += N * Vec::width) {
        F sum[N];
        int n[N];
        for (int i = 0; i < N; ++i) {
            n[i] = larger(0, smaller(Vec::width, a.head_dim - d - i * Vec::width));
            sum[i] = Vec::zero();
        }
        for (int j = 0; j < count; ++j) {
            const uint8_t* v = cache_row<C>(a, a.v_cache, b, token, kv_head, first + j);
            const F w = Vec::set1(p[j]);
            for (int i = 0; i < N; ++i)
                if (n[i] == Vec::width)
                    sum[i] = Vec::fma(w, C::load(v, d + i * Vec::width), sum[i]);
                else if (n[i])
                    sum[i] = Vec::fma(w, C::load(v, d + i * Vec::width, n[i]), sum[i]);
        }
        for (int i = 0; i < N; ++i)
            if (n[i]) Vec::store(acc + d + i * Vec::width, sum[i], n[i]);
    }
}

// One partial per head of the group: acc[head_dim], the largest score, the sum of exponentials.
template <class C> inline void split_of(const Attention& a, const Batch& b, int token, int kv_head, int split,
                                        float* scores, float* partial) {
    const int first = split * kSplit, count = smaller(kSplit, b.positions[token] + 1 - first);
    const float* q = a.q + (int64_t(token) * a.heads + kv_head * a.group()) * a.head_dim;
    for (int j = 0; j < count; ++j) {
        const uint8_t* k = cache_row<C>(a, a.k_cache, b, token, kv_head, first + j);
        for (int g = 0; g < a.group(); ++g)
            scores[g * kSplit + j] = dot_cached<C>(q + g * a.head_dim, k, a.head_dim) * a.scale;
    }
    for (int g = 0; g < a.group(); ++g) {
        float *s = scores + g * kSplit, *acc = partial + g * (a.head_dim + 2);
        float m = s[0];
        for (int j = 1; j < count; ++j) m = larger(m, s[j]);
        F sum = Vec::zero();
        for (int j = 0; j < count; j += Vec::width) {
            const int n = smaller(Vec::width, count - j);
            const F e = exponential(Vec::sub(Vec::load(s + j, n), Vec::set1(m)));
            Vec::store(s + j, e, n);
            sum = Vec::add(sum, Vec::load(s + j, n));  // reloaded so that lanes past the end count as 0
        }
        add_values<C>(a, b, token, kv_head, first, count, s, acc);
        acc[a.head_dim] = m;
        acc[a.head_dim + 1] = Vec::sum(sum);
    }
}

inline void split_into(const Attention& a, const Batch& b, int token, int kv_head, int split, float* scores,
                       float* partial) {
    if (a.cache_type == F32)
        split_of<FloatF32>(a, b, token, kv_head, split, scores, partial);
    else
        split_of<FloatF16>(a, b, token, kv_head, split, scores, partial);
}

inline float exp1(float x) {
    float v[Vec::width];
    Vec::store(v, exponential(Vec::set1(x)));
    return v[0];
}

// total <- total merged with part, for every head of the group.
inline void merge(const Attention& a, const float* part, float* total) {
    for (int g = 0; g < a.group(); ++g, part += a.head_dim + 2, total += a.head_dim + 2) {
        const float m = larger(total[a.head_dim], part[a.head_dim]);
        const float old = exp1(total[a.head_dim] - m), now = exp1(part[a.head_dim] - m);
        for (int d = 0; d < a.head_dim; ++d) total[d] = total[d] * old + part[d] * now;
        total[a.head_dim + 1] = total[a.head_dim + 1] * old + part[a.head_dim + 1] * now;
        total[a.head_dim] = m;
    }
}

inline void finish(const Attention& a, int token, int kv_head, const float* total) {
    float* out = a.out + (int64_t(token) * a.heads + kv_head * a.group()) * a.head_dim;
    for (int g = 0; g < a.group(); ++g, total += a.head_dim + 2)
        for (int d = 0; d < a.head_dim; ++d) out[g * a.head_dim + d] = total[d] / total[a.head_dim + 1];
}

inline int splits_of(const Batch& b, int token) { return b.positions[token] / kSplit + 1; }

inline float* partial_of(const Attention& a, int token, int kv_head, int split) {
    return a.partial + ((int64_t(token) * a.kv_heads + kv_head) * a.max_splits + split) * a.partial_floats();
}

void attention_split(const Attention& a, const Batch& b, int token, int kv_head, int split, uint8_t* local) {
    if (split < splits_of(b, token))
        split_into(a, b, token, kv_head, split, (float*)local, partial_of(a, token, kv_head, split));
}

void attention_merge(const Attention& a, const Batch& b, int token, int kv_head) {
    float* total = partial_of(a, token, kv_head, 0);
    for (int s = 1; s < splits_of(b, token); ++s) merge(a, partial_of(a, token, kv_head, s), total);
    finish(a, token, kv_head, total);
}

// All splits of one row in one piece: prompt rows are many enough to share out as they are.
void attention_row(const Attention& a, const Batch& b, int token, int kv_head, uint8_t* local) {
    float* scores = (float*)local;
    float* total = scores + a.group() * kSplit;
    float* part = total + a.partial_floats();
    for (int s = 0; s < splits_of(b, token); ++s) {
        split_into(a, b, token, kv_head, s, scores, s ? part : total);
        if (s) merge(a, part, total);
    }
    finish(a, token, kv_head, total);
}

}  // namespace
}  // namespace hc
