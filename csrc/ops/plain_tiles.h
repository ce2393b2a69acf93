// Plain rows times many tokens: what a tile of sums takes up lies in the order in which it is added, so that
// the sums stay in registers for a long run of columns.
#pragma once
#include <cstring>

#include "row_tiles.h"

namespace hc {
namespace {

constexpr int kArrangedTiles = kArrangedRows / Vec::plain_rows;
static_assert(kArrangedRows % Vec::plain_rows == 0, "whole tiles");
constexpr int kMostArranged = 64;  // tokens whose sums wait at once

// dot_plain's sums are of every A-th vector of columns from the a-th on: those of a = 0 come first, then
// those of a = 1. Columns after the last whole step stay where they are.
void arrange(const Input& in, int token) {
    constexpr int A = Vec::accumulators;
    const int64_t steps = in.cols / (A * Vec::width);
    const float* from = in.x + token * in.stride;
    float* to = in.arranged_row(token);
    for (int a = 0; a < A; ++a)
        for (int64_t k = 0; k < steps; ++k, to += Vec::width)
            Vec::store(to, Vec::load(from + (k * A + a) * Vec::width));
}

// The same of a tile of rows, for `steps` steps of columns from `at` on: [a][step][row], a vector each.
template <class P> void arrange_rows(const uint8_t* const* rows, int64_t at, int64_t steps, uint8_t* to) {
    constexpr int A = Vec::accumulators, R = Vec::plain_rows, bytes = Vec::width * P::bytes;
    for (int64_t k = 0; k < steps; ++k)
        for (int a = 0; a < A; ++a)
            for (int r = 0; r < R; ++r)
                std::memcpy(to + ((a * steps + k) * R + r) * bytes,
                            rows[r] + at * P::bytes + (k * A + a) * bytes, bytes);
}

template <class P, int R, int T> HC_NOINLINE void add_arranged(const uint8_t* w, const float* x,
                                                               int64_t stride, int64_t steps, bool begun,
                                                               F (&sums)[R][T]) {
    F sum[R][T];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) sum[r][t] = begun ? sums[r][t] : Vec::zero();
    for (int64_t k = 0; k < steps; ++k) {
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

// put(row, token, dot) for some tiles of rows, kArrangedTiles at most, and tokens [t0, t1) in whole tiles.
// Rows that are longer than fits are read a slice at a time, for some tokens whose sums wait in memory
// meanwhile.
template <class P, class Put> HC_NOINLINE void dots_arranged(const uint8_t* const* rows, int tiles,
                                                             const Input& in, int t0, int t1, Coming coming,
                                                             uint8_t* local, Put&& put) {
    constexpr int A = Vec::accumulators, R = Vec::plain_rows, T = Vec::plain_tile, step = A * Vec::width;
    constexpr int64_t most = kPlainPiece / (kArrangedRows * step * P::bytes);
    const int64_t all = in.cols / step, stride = Input::arranged_stride(in.cols);
    const int64_t slices = (all + most - 1) / most;
    const int64_t share = coming.share(slices * ((t1 - t0) / T));
    const int together = slices > 1 ? kMostArranged : t1 - t0;
    auto* sums = (PlainSums<R, T>(*)[kArrangedTiles])local;
    constexpr int64_t sums_bytes = sizeof(PlainSums<R, T>[kMostArranged / T][kArrangedTiles]);
    static_assert(sums_bytes + kPlainPiece <= kDotScratch, "sums and rows must fit");
    uint8_t* arranged = local + sums_bytes;
    for (int first = t0; first < t1; first += together)
        for (int64_t at = 0; at == 0 || at < all; at += most) {
            const int64_t steps = smaller(most, all - at), run = steps * R * Vec::width * P::bytes;
            for (int i = 0; i < tiles; ++i)
                arrange_rows<P>(rows + i * R, at * step, steps, arranged + i * A * run);
            for (int t = first; t < smaller(first + together, t1); t += T) {
                auto& of_tile = sums[slices > 1 ? (t - first) / T : 0];
                coming.fetch(share);
                for (int a = 0; a < A; ++a)
                    for (int i = 0; i < tiles; ++i)
                        add_arranged<P, R, T>(arranged + (i * A + a) * run,
                                              in.arranged_row(t) + (a * all + at) * Vec::width, stride, steps,
                                              at > 0, of_tile[i][a]);
                if (at + steps < all) continue;
                for (int i = 0; i < tiles; ++i) {
                    float dot[R][T];
                    finish_plain<P, R, T>(rows + i * R, in, t, of_tile[i], dot);
                    for (int r = 0; r < R; ++r)
                        for (int j = 0; j < T; ++j) put(i * R + r, t + j, dot[r][j]);
                }
            }
        }
}

}  // namespace
}  // namespace hc
