// Attention of a block of prompt rows: neighbours of one sequence, with all heads of a kv head. Each key and
// value is decoded once; a row's sums are bit-identical to those of attention_row.
#pragma once
#include "ops/attention.h"

namespace hc {
namespace {

// Keys that score_tile processes together: a panel. A page holds whole panels.
constexpr int kKeyVectors = Vec::attend_keys;
constexpr int kPanel = kKeyVectors * Vec::width;
static_assert(kPage % kPanel == 0, "a page holds whole panels");
constexpr int kRun = 64;  // positions whose values stay in L1 for all rows, a few columns at a time
static_assert(kSplit % kRun == 0, "a split holds whole runs");
constexpr int kSumLevels = Vec::width == 16 ? 3 : Vec::width == 8 ? 2 : 1;  // of a tree of pairs of lanes
static_assert(Vec::width == 2 << kSumLevels, "lanes are the leaves of a binary tree");

// The same sums as Vec::sum gives of a dot's lanes, with a position in each lane instead: what would have
// been a lane is a sum of its own, and these are added in the tree of Vec::sum. `steps` is head_dim / width.
// A panel's rows are stored in the order of use: all rows of the tree's first leaf, then the next one's.
template <int R> HC_NOINLINE void score_tile(const float* q, int64_t q_stride, const float* panel, int steps,
                                             float scale, float* scores) {
    constexpr int N = kKeyVectors;
    const auto leaf_of = [&](int leaf, F(&sum)[R][N]) HC_INLINE_LAMBDA {
        const float* x = q + Vec::sum_order(leaf);
        for (auto& of_row : sum)
            for (F& s : of_row) s = Vec::zero();
        for (int i = 0; i < steps; ++i, x += Vec::width, panel += kPanel) {
            F k[N];
            for (int n = 0; n < N; ++n) k[n] = Vec::load(panel + n * Vec::width);
            for (int r = 0; r < R; ++r) {
                const F v = Vec::set1(x[r * q_stride]);
                for (int n = 0; n < N; ++n) sum[r][n] = Vec::fma(v, k[n], sum[r][n]);
            }
        }
    };
    F level[kSumLevels + 1][R][N];
    for (int pair = 0; pair < Vec::width / 2; ++pair) {
        F sum[R][N], right[R][N];
        leaf_of(2 * pair, sum);
        leaf_of(2 * pair + 1, right);
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n) sum[r][n] = Vec::add(sum[r][n], right[r][n]);
        int at = 0;
        for (; pair >> at & 1; ++at)
            for (int r = 0; r < R; ++r)
                for (int n = 0; n < N; ++n) sum[r][n] = Vec::add(level[at][r][n], sum[r][n]);
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n) level[at][r][n] = sum[r][n];
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n)
            Vec::store(scores + r * kScoreStride + n * Vec::width,
                       Vec::mul(level[kSumLevels][r][n], Vec::set1(scale)));
}

// acc[r * stride] += w[r * kScoreStride + t] values[t * v_stride] in the order of t < count, for R rows and N
// vectors.
template <int R, int N> HC_NOINLINE void add_values(const float* w, const float* values, int64_t v_stride,
                                                    int count, float* acc, int64_t stride) {
    F sum[R][N];
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) sum[r][n] = Vec::load(acc + r * stride + n * Vec::width);
    for (int t = 0; t < count; ++t, values += v_stride) {
        F v[N];
        for (int n = 0; n < N; ++n) v[n] = Vec::load(values + n * Vec::width);
        for (int r = 0; r < R; ++r) {
            const F x = Vec::set1(w[r * kScoreStride + t]);
            for (int n = 0; n < N; ++n) sum[r][n] = Vec::fma(x, v[n], sum[r][n]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) Vec::store(acc + r * stride + n * Vec::width, sum[r][n]);
}

// fn(Constant<count>, first) for vectors [v, end), most of them in groups of N.
template <int N, class Fn> inline void each_vectors(int v, int end, Fn fn) {
    for (; v + N <= end; v += N) fn(Constant<N>{}, v);
    if constexpr (N > 1) each_vectors<N / 2>(v, end, fn);
}

// fn(Constant<count>, first) for rows [row, end), most of them in tiles of R.
template <int R, class Fn> inline void each_rows(int row, int end, Fn fn) {
    for (; row + R <= end; row += R) fn(Constant<R>{}, row);
    if constexpr (R > 1) each_rows<(R > 2 ? 2 : 1)>(row, end, fn);
}

// The cached row as floats, and zeros up to a whole vector.
template <class C> inline void decode_cached(const uint8_t* row, int n, float* to) {
    int i = 0;
    for (; i + kBlock <= n; i += kBlock) {
        const C block = C::of(row, i);
        for (int l = 0; l < kBlock; l += Vec::width) Vec::store(to + i + l, block.at(l));
    }
    for (; i < n; i += Vec::width) Vec::store(to + i, C::rest(row, i, smaller(Vec::width, n - i)));
}

// Rows of one sequence at neighbouring positions.
struct QueryBlock {
    const Attention& a;
    const Batch& b;
    int token, count, kv_head;
    int n, steps;  // head_dim; its vectors
    int64_t padded, stride;
    float *queries, *total, *keys, *values, *scores, *part, *page;  // see attention_block_scratch
    int first, active, from[kScoreRows], to[kScoreRows];            // see take_rows

    QueryBlock(const Attention& args, const Batch& batch, int first_token, int tokens, int head,
               uint8_t* local)
        : a(args),
          b(batch),
          token(first_token),
          count(tokens),
          kv_head(head),
          n(args.head_dim),
          steps((args.head_dim + Vec::width - 1) / Vec::width),
          padded(int64_t(steps) * Vec::width),
          stride(padded + kRowPad) {
        const auto take = [&](int64_t floats) {
            float* at = (float*)local;
            local += (floats + 15) / 16 * 64;
            return at;
        };
        queries = take(rows() * padded);
        total = take(rows() * (n + 2));
        keys = take(kSplit * padded);
        values = take(kSplit * stride);
        scores = take(kScoreRows * kScoreStride);
        part = take(kScoreRows * stride);
        page = take(kPage * padded);
    }
    int rows() const { return count * a.group(); }
    int position(int row) const { return b.positions[token] + row / a.group(); }

    void copy_queries() {
        for (int r = 0; r < rows(); ++r) {
            const int64_t t = token + r / a.group(), head = kv_head * a.group() + r % a.group();
            const float* from = a.q + (t * a.heads + head) * n;
            for (int i = 0; i < n; i += Vec::width)
                Vec::store(queries + r * padded + i, Vec::load(from + i, smaller(Vec::width, n - i)));
        }
    }

    // Keys of a page, transposed: of each panel the rows in score_tile's order.
    void transpose_page(float* to) const {
        for (int first = 0; first < kPage; first += kPanel, to += kPanel * padded)
            for (int v = 0; v < kKeyVectors; ++v)
                for (int d = 0; d < padded; d += 4) {
                    F column[4];
                    Vec::transpose4(page + (first + v * Vec::width) * padded + d, padded, column);
                    for (int j = 0; j < 4; ++j) {
                        const int64_t at =
                            Vec::sum_order((d + j) % Vec::width) * steps + (d + j) / Vec::width;
                        Vec::store(to + at * kPanel + v * Vec::width, column[j]);
                    }
                }
    }

    // Pages [first, end) of a split.
    template <class C> void decode_pages(int begin, int first, int end) const {
        const int64_t bytes = row_bytes(a.cache_type, n);
        const Split any{token, kv_head, 0, 0, 0};
        for (int at = first * kPage; at < end * kPage; at += kPage) {
            const uint8_t* k = cache_rows(a, a.k_cache, b, any, begin + at);
            const uint8_t* v = cache_rows(a, a.v_cache, b, any, begin + at);
            const bool more = at + kPage < end * kPage;
            const uint8_t* next = more ? cache_rows(a, a.k_cache, b, any, begin + at + kPage) : nullptr;
            const auto decode = [&](const uint8_t* from, const uint8_t* after, float* to, int64_t to_stride) {
                for (int t = 0; t < kPage; ++t) {
                    for (int64_t i = 0; after && i < bytes; i += 64) Vec::prefetch_l2(after + t * bytes + i);
                    decode_cached<C>(from + t * bytes, n, to + t * to_stride);
                }
            };
            decode(k, v, page, padded);
            transpose_page(keys + at * padded);
            decode(v, next, values + at * stride, stride);
        }
    }
    void decode_split(int begin, int from, int to) const {
        const int first = from / kPage, end = (to + kPage - 1) / kPage;
        if (a.cache_type == F32) return decode_pages<CachedFloats<FloatF32>>(begin, first, end);
        if (a.cache_type == F16) return decode_pages<CachedFloats<FloatF16>>(begin, first, end);
        decode_pages<CachedQ8_0>(begin, first, end);
    }

    // The positions of the split beginning there that a row sees: [from_of, to_of).
    int from_of(int row, int begin) const { return larger(a.first_seen(position(row)) - begin, 0); }
    int to_of(int row, int begin) const { return smaller(position(row) + 1 - begin, kSplit); }

    // Rows [first, first + active) are worked on together; their numbers below count from `first`.
    void take_rows(int row, int end, int begin) {
        first = row;
        active = smaller(kScoreRows, end - row);
        for (int r = 0; r < active; ++r) {
            from[r] = from_of(row + r, begin);
            to[r] = to_of(row + r, begin);
        }
    }
    void score_rows() const {
        for (int at = from[0] / kPanel * kPanel; at < to[active - 1]; at += kPanel)
            each_rows<Vec::attend_rows>(0, active, [&](auto some, int row) {
                constexpr int R = decltype(some)::value;
                if (at < to[row + R - 1] && at + kPanel > from[row])
                    score_tile<R>(queries + (first + row) * padded, padded, keys + at * padded, steps,
                                  a.scale, scores + row * kScoreStride + at);
            });
    }
    void softmax_rows() const {
        float largest[kScoreRows];
        const auto terms = [&](int row) { return scores + row * kScoreStride + from[row]; };
        for (int row = 0; row < active; ++row) {
            if (a.softcap > 0) softcap(a.softcap, terms(row), to[row] - from[row]);
            largest[row] = largest_of(terms(row), to[row] - from[row]);
        }
        for (int row = 0; row < active; ++row) {
            float* sums = part + row * stride;
            softmax_terms(terms(row), to[row] - from[row], largest[row], sums + padded);
            for (int d = 0; d < padded; d += Vec::width) Vec::store(sums + d, Vec::zero());
        }
    }
    // Adds those values of positions [at, at + kRun) that rows [row, row + R) see, of N vectors from column d
    // on. Positions that all rows see are added together; before and after, each row adds its own.
    template <int R, int N> void add_run(int row, int at, int d) const {
        const auto add = [&](auto some, int r, int start, int stop) {
            if (start < stop)
                add_values<decltype(some)::value, N>(scores + r * kScoreStride + start,
                                                     values + start * stride + d, stride, stop - start,
                                                     part + r * stride + d, stride);
        };
        const int end = at + kRun, start = smaller(end, larger(at, from[row + R - 1])),
                  stop = larger(start, smaller(end, to[row]));
        for (int r = row; r < row + R; ++r) add(Constant<1>{}, r, larger(at, from[r]), smaller(start, to[r]));
        add(Constant<R>{}, row, start, stop);
        for (int r = row; r < row + R; ++r) add(Constant<1>{}, r, larger(stop, from[r]), smaller(end, to[r]));
    }
    void add_rows() const {
        for (int at = from[0] / kRun * kRun; at < to[active - 1]; at += kRun)
            each_vectors<Vec::attend_values>(0, steps, [&](auto vectors, int v) {
                each_rows<Vec::attend_rows>(0, active, [&](auto some, int row) {
                    add_run<decltype(some)::value, decltype(vectors)::value>(row, at, v * Vec::width);
                });
            });
    }
    void merge_rows(int split) const {
        for (int row = 0; row < active; ++row) {
            const float* own = part + row * stride;
            float* all = total + (first + row) * (n + 2);
            if (split > a.first_split(position(first + row))) {
                merge_head(n, own, own + padded, all);
                continue;
            }
            for (int d = 0; d < n; ++d) all[d] = own[d];
            for (int d = 0; d < 2; ++d) all[n + d] = own[padded + d];
        }
    }

    void run() {
        copy_queries();
        const int last = position(rows() - 1) / kSplit;
        for (int split = a.first_split(position(0)); split <= last; ++split) {
            const int begin = split * kSplit;
            int row = 0, end = rows();  // of the rows that see it
            while (position(row) < begin) row += a.group();
            while (end > row && a.first_split(position(end - 1)) > split) end -= a.group();
            if (row == end) continue;
            decode_split(begin, from_of(row, begin), to_of(end - 1, begin));
            for (; row < end; row += kScoreRows) {
                take_rows(row, end, begin);
                score_rows();
                softmax_rows();
                add_rows();
                merge_rows(split);
            }
        }
        for (int t = 0; t < count; ++t) finish(a, token + t, kv_head, total + t * a.partial_floats());
    }
};

// Prompt rows [token, end): each run of neighbours is a block.
void attention_block(const Attention& a, const Batch& b, int token, int end, int kv_head, uint8_t* local) {
    while (token < end) {
        int next = token + 1;
        while (next < end && b.sequence[next] == b.sequence[token] &&
               b.positions[next] == b.positions[next - 1] + 1)
            ++next;
        if ((next - token) * a.group() < kLeastBlockRows)
            for (; token < next; ++token) attention_row(a, b, token, kv_head, local);
        else
            QueryBlock(a, b, token, next - token, kv_head, local).run();
        token = next;
    }
}

}  // namespace
}  // namespace hc
