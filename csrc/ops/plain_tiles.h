// Plain rows times many tokens: the operands of a tile of sums are stored in the order of their addition, so
// that the sums stay in registers for a long run of columns.
#pragma once
#include <cstring>

#include "ops/row_tiles.h"

namespace hc {
namespace {

constexpr int kArrangedTiles = kArrangedRows / Vec::plain_rows;
static_assert(kArrangedRows % Vec::plain_rows == 0, "whole tiles");
constexpr int kMostArranged = 64;  // tokens whose sums are kept at once, plus fewer than a tile
// A core has some 20 lines in flight: with few tokens the next rows are fetched a few lines at a time.
constexpr int kManyArranged = 32, kFetchSteps = 128 / Vec::width;

// dot_plain has sums of every A-th vector of columns from the a-th on: first the columns of a = 0, then of a
// = 1. Columns after the last whole step are not moved.
inline void arrange(const Input& in, int token) {
    constexpr int A = Vec::accumulators;
    const int64_t steps = in.cols / (A * Vec::width);
    const float* from = in.x + token * in.stride;
    float* to = in.arranged_row(token);
    for (int a = 0; a < A; ++a)
        for (int64_t k = 0; k < steps; ++k, to += Vec::width)
            Vec::store(to, Vec::load(from + (k * A + a) * Vec::width));
}

// The same for a tile of rows, for `steps` steps of columns from `at` on: [a][step][row], a vector each.
template <class P> void arrange_rows(const uint8_t* const* rows, int64_t at, int64_t steps, uint8_t* to) {
    constexpr int A = Vec::accumulators, R = Vec::plain_rows, bytes = Vec::width * P::bytes;
    for (int64_t k = 0; k < steps; ++k)
        for (int a = 0; a < A; ++a)
            for (int r = 0; r < R; ++r)
                std::memcpy(to + ((a * steps + k) * R + r) * bytes,
                            rows[r] + at * P::bytes + (k * A + a) * bytes, bytes);
}

// Fetches `share` bytes of the next rows every `every` steps, and in each step a vector of `soon`, a token's
// columns that are multiplied soon: all tokens of a prompt together are larger than L2.
template <class P, int R, int T> HC_NOINLINE void add_arranged(const uint8_t* w, const float* x,
                                                               int64_t stride, int64_t steps, bool begun,
                                                               Coming& coming, int64_t share, int64_t every,
                                                               const float* soon, F (&sums)[R][T]) {
    F sum[R][T];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) sum[r][t] = begun ? sums[r][t] : Vec::zero();
    for (int64_t k = 0, due = 0; k < steps; ++k) {
        if (k == due) {
            coming.fetch(share);
            due += every;
        }
        Vec::prefetch_l2(soon + k * Vec::width);
        F row[R];
        for (int r = 0; r < R; ++r) row[r] = P::load(w, (k * R + r) * Vec::width);
        for (int t = 0; t < T; ++t) {
            const F token = Vec::load(x + t * stride + k * Vec::width);
            for (int r = 0; r < R; ++r) sum[r][t] = Vec::fma(row[r], token, sum[r][t]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) sums[r][t] = sum[r][t];
}

// Calls put(row, token, dot) for rows [first, first + count), whole tiles and at most kArrangedRows, and
// tokens [t0, t1). Rows that are too long are read a slice at a time, for some tokens whose sums are kept in
// memory meanwhile. Each slice prefetches the next one: of the same rows, or of the next rows.
template <class P, class Put> HC_NOINLINE void dots_arranged(const SomeRows& some, int64_t first, int count,
                                                             const Input& in, int t0, int t1, uint8_t* local,
                                                             Put&& put) {
    constexpr int A = Vec::accumulators, R = Vec::plain_rows, T = Vec::plain_tile, step = A * Vec::width;
    constexpr int64_t step_bytes = step * P::bytes, most = kPlainPiece / (kArrangedRows * step_bytes);
    const int64_t all = in.cols / step, stride = Input::arranged_stride(in.cols), next = first + count;
    const int tiles = count / R, together = all > most ? kMostArranged : t1 - t0;
    const uint8_t* rows[kArrangedRows];
    for (int r = 0; r < count; ++r) rows[r] = some.row(first + r);
    auto* sums = (PlainSums<R, T>(*)[kArrangedTiles])local;
    constexpr int64_t sums_bytes = sizeof(PlainSums<R, T>[kMostArranged / T + 1][kArrangedTiles]);
    static_assert(sums_bytes + kPlainPiece <= kDotScratch, "sums and rows must fit");
    uint8_t* arranged = local + sums_bytes;
    for (int group = t0, end = t0; group < t1; group = end) {
        end = t1 - group < together + T ? t1 : group + together;
        for (int64_t at = 0; at == 0 || at < all; at += most) {
            const int64_t steps = smaller(most, all - at), run = steps * R * Vec::width * P::bytes;
            for (int i = 0; i < tiles; ++i)
                arrange_rows<P>(rows + i * R, at * step, steps, arranged + i * A * run);
            const bool same = at + most < all || end < t1;
            const int64_t from = at + most < all ? at + most : 0;
            Coming coming{some, same ? first : next,
                          same ? next : smaller(next + kArrangedRows, some.known(kArrangedRows)),
                          from * step_bytes, smaller(from + most, all) * step_bytes};
            const int64_t every = end - group < kManyArranged ? kFetchSteps : steps;
            const int64_t fetches = (steps + every - 1) / larger<int64_t>(every, 1) * A * tiles;
            const int64_t share = coming.share(fetches * ((end - group + T - 1) / T));
            const auto tile = [&](auto token_count, int t) HC_INLINE_LAMBDA {
                constexpr int K = decltype(token_count)::value;
                auto* of_tile = sums[all > most ? (t - group) / T : 0];
                const float* x = in.arranged_row(t) + at * Vec::width;
                const float* next_x = t + K < end ? in.arranged_row(t + K) + at * Vec::width : x;
                for (int a = 0; a < A; ++a) {
                    const float *of_a = x + a * all * Vec::width,
                                *soon = a + 1 < A ? of_a + all * Vec::width : next_x;
                    for (int i = 0; i < tiles; ++i)
                        add_arranged<P, R, K>(arranged + (i * A + a) * run, of_a, stride, steps, at > 0,
                                              coming, share, every, soon + i % K * stride,
                                              reinterpret_cast<PlainSums<R, K>&>(of_tile[i])[a]);
                }
                if (at + steps < all) return;
                for (int i = 0; i < tiles; ++i) {
                    float dot[R][K];
                    finish_plain<P, R, K>(rows + i * R, in, t, reinterpret_cast<PlainSums<R, K>&>(of_tile[i]),
                                          dot);
                    for (int r = 0; r < R; ++r)
                        for (int j = 0; j < K; ++j) put(i * R + r, t + j, dot[r][j]);
                }
            };
            int t = group;
            for (; t + T <= end; t += T) tile(Constant<T>{}, t);
            unroll<1, T>([&](auto left) HC_INLINE_LAMBDA {
                if (end - t == decltype(left)::value) tile(left, t);
            });
        }
    }
}

}  // namespace
}  // namespace hc
