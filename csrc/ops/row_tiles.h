// Rows of a quantised type times many tokens: the codes of some rows are decoded once for all of them, a
// group of columns at a time, which stays in L1 while the tokens pass.
#pragma once
#include "../block_dot.h"

namespace hc {
namespace {

// Rows first, first + 1, ..., or those that a list names.
struct SomeRows {
    Rows rows;
    const int32_t* list;
    int64_t first, count;
    int64_t number(int64_t r) const { return list ? list[r] : first + r; }
    const uint8_t* row(int64_t r) const { return rows.row(number(r)); }
    // Where rows end that are known to follow, at most `n` after the last: most likely the same thread's next
    // piece.
    int64_t known(int64_t n) const { return list ? count : smaller(count + n, rows.count - first); }
};

// Bytes [from, to) of rows [next, end), which will be read soon; brought into L2 a share at a time.
struct Coming {
    const SomeRows& rows;
    int64_t next, end, from = 0, to = row_bytes(rows.rows.type, rows.rows.cols), at = from;
    // What must come with each of so many steps, in whole lines.
    int64_t share(int64_t steps) const {
        return next < end ? ((end - next) * (to - from) / larger<int64_t>(steps, 1) + 63) / 64 * 64 : 0;
    }
    HC_INLINE void fetch(int64_t share) {
        while (share > 0 && next < end) {
            const uint8_t* row = rows.row(next);
            const int64_t stop = smaller(at + share, to);
            share -= stop - at;
            for (; at < stop; at += 64) Vec::prefetch_l2(row + at);
            if (at < to) return;
            at = from;
            ++next;
        }
    }
};

// Fewer tokens are not worth it; the least pay where products are quick and decoding is not.
template <class B> constexpr int least_decoded() { return B::code_bits <= 4 ? 8 : B::parts == 4 ? 12 : 16; }
constexpr int kMostDecoded = 64;  // tokens at once, whose sums stay in L2
static_assert(kDecodedRows % Vec::decoded_rows == 0, "whole tiles");

// A group of some rows: what dot_group makes of each vector in turn, a tile's rows side by side.
template <class B> struct DecodedRows {
    static constexpr int R = Vec::decoded_rows, tiles = kDecodedRows / R, vectors = kLanes / Vec::width;
    I codes[tiles][vectors][8][R];
    F scale[tiles][vectors][R];
    F high_scale[B::halves ? tiles : 1][vectors][R], minimum[B::has_minimum ? tiles : 1][vectors][R];

    // Of the group that starts at `block`.
    void decode(const uint8_t* const* rows, int count, int64_t blocks, int64_t block) {
        for (int i = 0; i < count; ++i)
            for_lanes(blocks, block, [&](int lanes, int l, int n) HC_INLINE_LAMBDA {
                decode_vector({rows[i], blocks, block + l, n}, lanes, l, i / R, i % R);
            });
    }

  private:
    HC_INLINE void decode_vector(const Lanes& s, int lanes, int l, int i, int r) {
        const int v = l / Vec::width;
        I unit[B::units];
        load_units<B>(s.row + codes_of<B>(s.blocks, s.at - l) + 4 * l, lanes, s.n, unit);
        unroll<0, 8>([&](auto k) HC_INLINE_LAMBDA {
            constexpr int P = decltype(k)::value % B::parts, W = decltype(k)::value / B::parts;
            codes[i][v][P + W * B::parts][r] =
                Vec::template dot_code<B::signed_codes>(B::template word<P, W>(unit));
        });
        const Head head = B::head(s);
        scale[i][v][r] = head.scale;
        if constexpr (B::halves) high_scale[i][v][r] = head.high_scale;
        if constexpr (B::has_minimum) minimum[i][v][r] = head.minimum;
    }
};

// The vectors of a group, which starts at `block`, of some tiles of rows times T tokens from t0 on, in
// dot_group's order. Added to sums[t][tile][r]. One call for all tiles: two vectors a call cost a quarter
// more.
template <class B, int T>
HC_NOINLINE void add_decoded(const DecodedRows<B>& decoded, int tiles, const Input& input, int t0,
                             int64_t block, int vectors,
                             F (*sums)[kDecodedRows / Vec::decoded_rows][Vec::decoded_rows]) {
    constexpr int R = Vec::decoded_rows, H = B::halves ? 2 : 1, words = 8 / H;
    constexpr int M = smaller(Vec::words_at_once(B::code_bits), words);
    const Input in = input;
    for (int v = 0; v < vectors; ++v) {
        const int64_t at = block + v * Vec::width;
        const int8_t* x[T];
        F dx[T];
        for (int t = 0; t < T; ++t) {
            x[t] = in.codes(t0 + t) + block * kBlock + 4 * v * Vec::width;
            dx[t] = Vec::load(in.scales(t0 + t) + at);
        }
        for (int i = 0; i < tiles; ++i) {
            F sum[R][T];
            for (int t = 0; t < T; ++t)
                for (int r = 0; r < R; ++r) sum[r][t] = sums[t][i][r];
            unroll<0, H>([&](auto half) HC_INLINE_LAMBDA {
                constexpr int h = decltype(half)::value;
                I acc[R][T];
                for (int t = 0; t < T; ++t) {
                    const I start = start_of<B>(in, t0 + t, at, h == 1);
                    for (int r = 0; r < R; ++r) acc[r][t] = start;
                }
                unroll<0, words / M>([&](auto run) HC_INLINE_LAMBDA {
                    typename Vec::Dots dots[R][T];
                    for (int t = 0; t < T; ++t)
                        for (int r = 0; r < R; ++r) dots[r][t] = Vec::dot_begin(acc[r][t]);
                    unroll<0, M>([&](auto m) HC_INLINE_LAMBDA {
                        constexpr int w = h * words + decltype(run)::value * M + decltype(m)::value;
                        for (int t = 0; t < T; ++t) {
                            const I own = Vec::load_i(x[t] + w * 4 * kLanes);
                            for (int r = 0; r < R; ++r) {
                                dots[r][t] = Vec::template dot_add<B::signed_codes>(
                                    dots[r][t], decoded.codes[i][v][w][r], own);
                                HC_IN_ORDER(dots[r][t]);
                            }
                        }
                    });
                    for (int t = 0; t < T; ++t)
                        for (int r = 0; r < R; ++r) acc[r][t] = Vec::dot_end(acc[r][t], dots[r][t]);
                });
                const F* scale = h ? decoded.high_scale[B::halves ? i : 0][v] : decoded.scale[i][v];
                for (int t = 0; t < T; ++t)
                    for (int r = 0; r < R; ++r)
                        sum[r][t] = Vec::fma(Vec::to_float(acc[r][t]), Vec::mul(scale[r], dx[t]), sum[r][t]);
            });
            for (int t = 0; t < T; ++t) {
                if constexpr (B::has_minimum) {
                    const F total = Vec::mul(dx[t], Vec::to_float(Vec::load_i(in.sums(t0 + t) + at)));
                    for (int r = 0; r < R; ++r)
                        sum[r][t] = Vec::fma(decoded.minimum[i][v][r], total, sum[r][t]);
                }
                for (int r = 0; r < R; ++r) sums[t][i][r] = sum[r][t];
            }
        }
    }
}

// put(row, token, dot) for `count` rows, some tiles of them, at most kDecodedRows, and at most kMostDecoded
// tokens from t0 on.
template <class B, class Put> HC_NOINLINE void dots_decoded(const uint8_t* const* rows, int count,
                                                            const Input& in, int t0, int tokens,
                                                            Coming coming, Put&& put) {
    constexpr int R = Vec::decoded_rows, T = Vec::decoded_tokens;
    const int64_t blocks = in.cols / kBlock;
    const int64_t steps = (blocks + kLanes - 1) / kLanes * larger(tokens / T, 1);
    const int64_t share = coming.share(steps);
    DecodedRows<B> decoded;
    F sums[kMostDecoded][kDecodedRows / R][R];
    for (int t = 0; t < tokens; ++t)
        for (auto& of_tile : sums[t])
            for (F& sum : of_tile) sum = Vec::zero();
    for (int64_t block = 0; block < blocks; block += kLanes) {
        decoded.decode(rows, count, blocks, block);
        const int vectors = int(smaller<int64_t>(kLanes, blocks - block) + Vec::width - 1) / Vec::width;
        int t = 0;
        for (; t + T <= tokens; t += T) {
            coming.fetch(share);
            add_decoded<B, T>(decoded, count / R, in, t0 + t, block, vectors, sums + t);
        }
        for (; t < tokens; ++t) add_decoded<B, 1>(decoded, count / R, in, t0 + t, block, vectors, sums + t);
    }
    for (int i = 0; i < count / R; ++i)
        for (int t = 0; t < tokens; ++t)
            for (int r = 0; r < R; ++r) put(i * R + r, t, Vec::sum(sums[t][i][r]));
}

}  // namespace
}  // namespace hc
