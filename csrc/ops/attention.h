// Causal attention over the paged cache, in splits of kSplit positions merged in order (online softmax, arXiv
// 2205.14135), so that a row's result depends neither on the batch nor on the threads.
#pragma once
#include "ops/activation.h"

namespace hc {
namespace {

constexpr int kCacheTile = 4;                         // keys that are processed together, all of one page
constexpr int kValueHeads = Vec::width < 16 ? 2 : 4;  // whose values are summed together

// Positions [first, first + count) of one kv head, as one row of the batch sees them: from `unseen` on, which
// are less than a tile.
struct Split {
    int token, kv_head, first, count, unseen;
};

// The row of one position; those of the positions after it in its page follow.
inline const uint8_t* cache_rows(const Attention& a, const void* cache, const Batch& b, const Split& s,
                                 int position) {
    const int64_t page = b.pages[b.sequence[s.token] * b.pages_per_sequence + position / kPage];
    const int64_t row = (page * a.kv_heads + s.kv_head) * kPage + position % kPage;
    return (const uint8_t*)cache + row * row_bytes(a.cache_type, a.head_dim);
}

// kBlock values of a cached row from value i on, `at` a vector of them at a time; `rest` is what a row of
// another width ends with.
template <class P> struct CachedFloats {
    const uint8_t* values;
    static CachedFloats of(const uint8_t* row, int i) { return {row + i * P::bytes}; }
    F at(int l) const { return P::load(values, l); }
    static F rest(const uint8_t* row, int i, int n) { return P::load(row, i, n); }
};
struct CachedQ8_0 {
    const uint8_t* codes;
    F scale;
    static CachedQ8_0 of(const uint8_t* row, int i) {
        row += i / kBlock * (kBlock + 2);
        return {row + 2, Vec::set1_f16((const uint16_t*)row)};
    }
    F at(int l) const { return Vec::mul(scale, Vec::to_float(Vec::load_i8(codes + l, Vec::width))); }
    static F rest(const uint8_t*, int, int) { return Vec::zero(); }  // never: its rows are whole blocks
};

// scores[g * kSplit + t] = scale q[g] . rows[t] for G heads and R rows.
template <class C, int G, int R>
inline void dot_cached(const Attention& a, const float* q, const uint8_t* rows, float* scores) {
    const int n = a.head_dim;
    const int64_t bytes = row_bytes(a.cache_type, n);
    F sum[G][R];
    for (auto& of_head : sum)
        for (F& s : of_head) s = Vec::zero();
    int i = 0;
    for (; i + kBlock <= n; i += kBlock) {
        C block[R];
        for (int t = 0; t < R; ++t) block[t] = C::of(rows + t * bytes, i);
        for (int l = 0; l < kBlock; l += Vec::width)
            for (int t = 0; t < R; ++t) {
                const F k = block[t].at(l);
                for (int g = 0; g < G; ++g) sum[g][t] = Vec::fma(Vec::load(q + g * n + i + l), k, sum[g][t]);
            }
    }
    for (; i < n; i += Vec::width) {
        const int m = smaller(Vec::width, n - i);
        for (int t = 0; t < R; ++t)
            for (int g = 0; g < G; ++g)
                sum[g][t] = Vec::fma(Vec::load(q + g * n + i, m), C::rest(rows + t * bytes, i, m), sum[g][t]);
    }
    static_assert(G * R % 4 == 0, "sums are taken four at a time");
    for (int k = 0; k < G * R; k += 4) {
        F four[4];
        for (int l = 0; l < 4; ++l) four[l] = sum[(k + l) / R][(k + l) % R];
        float of[4];
        Vec::sum4(four, of);
        for (int l = 0; l < 4; ++l) scores[(k + l) / R * kSplit + (k + l) % R] = of[l] * a.scale;
    }
}

// acc[g * (head_dim + 2)] += w[g * kSplit + t] rows[t], in the order of t < count, for G heads; kBlock * B
// values from value i on, or the `rest` after the last block. The same of the rows at `next` is fetched,
// unless null.
template <class C, int G, int B> inline void add_blocks(const Attention& a, const float* w,
                                                        const uint8_t* rows, const uint8_t* next, int count,
                                                        int i, float* acc) {
    constexpr int N = kBlock / Vec::width;
    const int stride = a.head_dim + 2;
    const int64_t bytes = row_bytes(a.cache_type, a.head_dim), at = row_bytes(a.cache_type, i),
                  fetched = next ? row_bytes(a.cache_type, B * kBlock) : 0;
    F sum[G][B * N];
    for (int g = 0; g < G; ++g)
        for (int l = 0; l < B * N; ++l) sum[g][l] = Vec::load(acc + g * stride + i + l * Vec::width);
    for (int t = 0; t < count; ++t, rows += bytes) {
        for (int64_t o = 0; o < fetched; o += 64) Vec::prefetch_l2(next + t * bytes + at + o);
        F weight[G];
        for (int g = 0; g < G; ++g) weight[g] = Vec::set1(w[g * kSplit + t]);
        for (int k = 0; k < B; ++k) {
            const C block = C::of(rows, i + k * kBlock);
            for (int l = 0; l < N; ++l) {
                const F v = block.at(l * Vec::width);
                for (int g = 0; g < G; ++g) sum[g][k * N + l] = Vec::fma(weight[g], v, sum[g][k * N + l]);
            }
        }
    }
    for (int g = 0; g < G; ++g)
        for (int l = 0; l < B * N; ++l) Vec::store(acc + g * stride + i + l * Vec::width, sum[g][l]);
}
template <class C, int G> inline void add_cached(const Attention& a, const float* w, const uint8_t* rows,
                                                 const uint8_t* next, int count, float* acc) {
    constexpr int B = Vec::width < 16 ? 1 : G > 2 ? 2 : 4;  // as many sums as there are registers for
    const int n = a.head_dim, stride = n + 2;
    const int64_t bytes = row_bytes(a.cache_type, n);
    int i = 0;
    for (; i + B * kBlock <= n; i += B * kBlock) add_blocks<C, G, B>(a, w, rows, next, count, i, acc);
    if constexpr (B > 1)
        for (; i + kBlock <= n; i += kBlock) add_blocks<C, G, 1>(a, w, rows, next, count, i, acc);
    for (; i < n; i += Vec::width) {
        const int m = smaller(Vec::width, n - i);
        for (int g = 0; g < G; ++g) {
            F sum = Vec::load(acc + g * stride + i, m);
            for (int t = 0; t < count; ++t)
                sum = Vec::fma(Vec::set1(w[g * kSplit + t]), C::rest(rows + t * bytes, i, m), sum);
            Vec::store(acc + g * stride + i, sum, m);
        }
    }
}

// fn(Constant<count>, first) for heads g and on, most of them G together: what is read of the cache serves
// all.
template <int G, class Fn> inline void each_heads(int g, int group, Fn fn) {
    for (; g + G <= group; g += G) fn(Constant<G>{}, g);
    if constexpr (G > 1) each_heads<G / 2>(g, group, fn);
}

// use(j, rows) for positions first + j of a cache, kCacheTile at a time. Meanwhile the next page is fetched,
// and after the last one the first page of `after`.
template <class Use> inline void each_tile(const Attention& a, const void* cache, const void* after,
                                           const Batch& b, const Split& s, Use use) {
    const int64_t bytes = kCacheTile * row_bytes(a.cache_type, a.head_dim);
    for (int j = 0; j < s.count; j += kCacheTile) {
        const bool more = j + kPage < s.count;
        if (more || after) {
            const uint8_t* next =
                cache_rows(a, more ? cache : after, b, s, s.first + (more ? j + kPage : j % kPage));
            for (int64_t i = 0; i < bytes; i += 64) Vec::prefetch_l2(next + i);
        }
        use(j, cache_rows(a, cache, b, s, s.first + j));
    }
}

inline float largest_of(const float* scores, int count) {
    F largest = Vec::set1(scores[0]);
    int j = 0;
    for (; j + Vec::width <= count; j += Vec::width) largest = Vec::max(Vec::load(scores + j), largest);
    float m = Vec::max_of(largest);
    for (; j < count; ++j) m = larger(m, scores[j]);
    return m;
}

// Replaces scores by exponentials of their distance from the largest score m. `end` gets m and the sum.
inline void softmax_terms(float* scores, int count, float m, float* end) {
    F sum = Vec::zero();
    int j = 0;
    for (; j + Vec::width <= count; j += Vec::width) {
        const F e = exponential(Vec::sub(Vec::load(scores + j), Vec::set1(m)));
        Vec::store(scores + j, e);
        sum = Vec::add(sum, e);
    }
    if (const int n = count - j) {
        const F e = exponential(Vec::sub(Vec::load(scores + j, n), Vec::set1(m)));
        Vec::store(scores + j, e, n);
        sum = Vec::add(sum, Vec::load(scores + j, n));  // reloaded so that lanes past the end count as 0
    }
    end[0] = m;
    end[1] = Vec::sum(sum);
}
inline void softmax_terms(float* scores, int count, float* end) {
    softmax_terms(scores, count, largest_of(scores, count), end);
}

// One partial per head of the group: acc[head_dim], the largest score, the sum of exponentials.
template <class C>
inline void split_of(const Attention& a, const Batch& b, const Split& s, float* scores, float* partial) {
    const int n = a.head_dim, stride = n + 2, group = a.group();
    const int64_t bytes = row_bytes(a.cache_type, n);
    const float* q = a.q + (int64_t(s.token) * a.heads + s.kv_head * group) * n;
    each_tile(a, a.k_cache, a.v_cache, b, s, [&](int j, const uint8_t* rows) {
        each_heads<4>(0, group, [&](auto heads, int g) {
            constexpr int G = decltype(heads)::value;
            constexpr int R =
                G == 4 && Vec::width < 16 ? 2 : kCacheTile;  // as many sums as stay in registers
            for (int t = 0; t < kCacheTile; t += R)
                dot_cached<C, G, R>(a, q + g * n, rows + t * bytes, scores + g * kSplit + j + t);
        });
    });
    for (int g = 0; g < group; ++g) {
        float* seen = scores + g * kSplit + s.unseen;
        if (a.softcap > 0) softcap(a.softcap, seen, s.count - s.unseen);
        softmax_terms(seen, s.count - s.unseen, partial + g * stride + n);
        for (int d = 0; d < n; ++d) partial[g * stride + d] = 0;
    }
    for (int j = s.unseen; j < s.count;) {
        const int position = s.first + j, count = smaller(kPage - position % kPage, s.count - j);
        const uint8_t* next =
            j + count < s.count ? cache_rows(a, a.v_cache, b, s, position + count) : nullptr;
        const uint8_t* rows = cache_rows(a, a.v_cache, b, s, position);
        each_heads<kValueHeads>(0, group, [&](auto heads, int g) {
            add_cached<C, decltype(heads)::value>(a, scores + g * kSplit + j, rows, g ? nullptr : next, count,
                                                  partial + g * stride);
        });
        j += count;
    }
}

// Computes split number `split` of the positions that the row sees.
inline void split_into(const Attention& a, const Batch& b, int token, int kv_head, int split, float* scores,
                       float* partial) {
    const int position = b.positions[token], begin = (a.first_split(position) + split) * kSplit;
    const int seen = larger(begin, a.first_seen(position)), first = seen / kCacheTile * kCacheTile;
    const Split s{token, kv_head, first, smaller(begin + kSplit, position + 1) - first, seen - first};
    if (a.cache_type == F32) return split_of<CachedFloats<FloatF32>>(a, b, s, scores, partial);
    if (a.cache_type == F16) return split_of<CachedFloats<FloatF16>>(a, b, s, scores, partial);
    split_of<CachedQ8_0>(a, b, s, scores, partial);
}

inline float exp1(float x) {
    float v[Vec::width];
    Vec::store(v, exponential(Vec::set1(x)));
    return v[0];
}

// total <- total merged with part, of a head of n values; `end` has the part's largest score and its sum.
inline void merge_head(int n, const float* part, const float* end, float* total) {
    const float m = larger(total[n], end[0]);
    const float old = exp1(total[n] - m), now = exp1(end[0] - m);
    for (int d = 0; d < n; ++d) total[d] = total[d] * old + part[d] * now;
    total[n + 1] = total[n + 1] * old + end[1] * now;
    total[n] = m;
}

// The same for every head of the group.
inline void merge(const Attention& a, const float* part, float* total) {
    for (int g = 0; g < a.group(); ++g, part += a.head_dim + 2, total += a.head_dim + 2)
        merge_head(a.head_dim, part, part + a.head_dim, total);
}

// total <- total merged with the head's sink: a score that takes its share of the sum and has no value.
inline void merge_sink(const Attention& a, float sink, float* total) {
    const float m = larger(total[a.head_dim], sink);
    const float old = exp1(total[a.head_dim] - m);
    for (int d = 0; d < a.head_dim; ++d) total[d] *= old;
    total[a.head_dim + 1] = total[a.head_dim + 1] * old + exp1(sink - m);
}

inline void finish(const Attention& a, int token, int kv_head, float* total) {
    const int head = kv_head * a.group();
    float* out = a.out + (int64_t(token) * a.heads + head) * a.head_dim;
    for (int g = 0; g < a.group() && a.sinks; ++g)
        merge_sink(a, a.sinks[head + g], total + g * (a.head_dim + 2));
    for (int g = 0; g < a.group(); ++g, total += a.head_dim + 2)
        for (int d = 0; d < a.head_dim; ++d) out[g * a.head_dim + d] = total[d] / total[a.head_dim + 1];
}

inline float* partial_of(const Attention& a, int token, int kv_head, int split) {
    return a.partial + ((int64_t(token) * a.kv_heads + kv_head) * a.max_splits + split) * a.partial_floats();
}

void attention_split(const Attention& a, const Batch& b, int token, int kv_head, int split, uint8_t* local) {
    if (split < a.splits(b.positions[token]))
        split_into(a, b, token, kv_head, split, (float*)local, partial_of(a, token, kv_head, split));
}

void attention_merge(const Attention& a, const Batch& b, int token, int kv_head) {
    float* total = partial_of(a, token, kv_head, 0);
    for (int s = 1; s < a.splits(b.positions[token]); ++s) merge(a, partial_of(a, token, kv_head, s), total);
    finish(a, token, kv_head, total);
}

// All splits of one row in one piece.
void attention_row(const Attention& a, const Batch& b, int token, int kv_head, uint8_t* local) {
    float* scores = (float*)local;
    float* total = scores + a.group() * kSplit;
    float* part = total + a.partial_floats();
    for (int s = 0; s < a.splits(b.positions[token]); ++s) {
        split_into(a, b, token, kv_head, s, scores, s ? part : total);
        if (s) merge(a, part, total);
    }
    finish(a, token, kv_head, total);
}

}  // namespace
}  // namespace hc
