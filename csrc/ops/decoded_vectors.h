// Decoded rows times tokens, with a byte dot product in each lane: an implementation for row_tiles.h.
#pragma once
#include "ops/arguments.h"
#include "simd/block_dot.h"

namespace hc {
namespace {

constexpr int kRowTile = Vec::decoded_rows, kTokenTile = Vec::decoded_tokens;

// A group of some rows: dot_group's data of each vector in order, with a tile's rows adjacent.
template <class B> struct DecodedRows {
    static constexpr int R = kRowTile, tiles = kDecodedRows / R, vectors = kLanes / Vec::width;
    I codes[tiles][vectors][8][R];
    F scale[tiles][vectors][R];
    F high_scale[B::halves ? tiles : 1][vectors][R], minimum[B::has_minimum ? tiles : 1][vectors][R];
    F high_minimum[B::has_minimum && B::halves ? tiles : 1][vectors][R];
    bool minima;

    // Decodes the group that starts at `block`.
    void decode(const RowOf<B>* rows, int count, int64_t blocks, int64_t block) {
        GroupScratch<B, 1> scratch;
        for (int i = 0; i < count; ++i)
            for_lanes(blocks, block, [&](int lanes, int l, int n) HC_INLINE_LAMBDA {
                const Group<B> group = group_of<B>(rows[i], blocks, block, lanes, l, scratch);
                minima = group.has_minimum();
                decode_vector(group, l, n, i / R, i % R);
            });
    }

  private:
    HC_INLINE void decode_vector(const Group<B>& group, int l, int n, int i, int r) {
        const int v = l / Vec::width;
        I unit[B::units];
        group.load(l, n, unit);
        unroll<0, 8>([&](auto k) HC_INLINE_LAMBDA {
            constexpr int P = decltype(k)::value % B::parts, W = decltype(k)::value / B::parts;
            codes[i][v][P + W * B::parts][r] =
                Vec::template dot_code<B::signed_codes>(B::template word<P, W>(unit));
        });
        const Head head = group.head(l, n);
        scale[i][v][r] = head.scale;
        if constexpr (B::halves) high_scale[i][v][r] = head.high_scale;
        if constexpr (B::has_minimum) minimum[i][v][r] = head.minimum;
        if constexpr (B::has_minimum && B::halves) high_minimum[i][v][r] = head.high_minimum;
    }
};

// The vectors of the group at `block`: some tiles of rows times T tokens from t0 on, in dot_group's order.
// Adds to sums[t][tile][r]. One call for all tiles: two vectors a call would cost a quarter more.
template <class B, int T> HC_NOINLINE void add_decoded(const DecodedRows<B>& decoded, int tiles,
                                                       const Input& input, int t0, int64_t block, int vectors,
                                                       F (*sums)[kDecodedRows / kRowTile][kRowTile]) {
    constexpr int R = kRowTile, H = B::halves ? 2 : 1, words = 8 / H;
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
                if constexpr (B::has_minimum && !B::halves) {
                    const F total = Vec::mul(dx[t], Vec::to_float(Vec::load_i(in.sums(t0 + t) + at)));
                    for (int r = 0; r < R; ++r)
                        sum[r][t] = Vec::fma(decoded.minimum[i][v][r], total, sum[r][t]);
                }
                if constexpr (B::has_minimum && B::halves)
                    for (int r = 0; r < R && decoded.minima; ++r) {
                        const Head head{dx[t], dx[t], decoded.minimum[i][v][r],
                                        decoded.high_minimum[i][v][r]};
                        sum[r][t] = add_minima<B>(sum[r][t], head, dx[t], in, t0 + t, at);
                    }
                for (int r = 0; r < R; ++r) sums[t][i][r] = sum[r][t];
            }
        }
    }
}

// Sums of rows times tokens over groups of columns.
template <class B> struct DecodedSums {
    F sum[kMostDecoded][kDecodedRows / kRowTile][kRowTile];

    void clear(int tokens) {
        for (int t = 0; t < tokens; ++t)
            for (auto& of_tile : sum[t])
                for (F& one : of_tile) one = Vec::zero();
    }
    // Tokens [t, t + n), at most a tile, counted from t0; `tiles` of rows.
    void add(const DecodedRows<B>& rows, int tiles, const Input& in, int t0, int t, int n, int64_t block,
             int vectors) {
        if (n == kTokenTile)
            return add_decoded<B, kTokenTile>(rows, tiles, in, t0 + t, block, vectors, sum + t);
        for (; n > 0; ++t, --n) add_decoded<B, 1>(rows, tiles, in, t0 + t, block, vectors, sum + t);
    }
    template <class Put> void put(int count, int tokens, Put&& put) const {
        for (int i = 0; i < count / kRowTile; ++i)
            for (int t = 0; t < tokens; ++t)
                for (int r = 0; r < kRowTile; ++r) put(i * kRowTile + r, t, Vec::sum(sum[t][i][r]));
    }
};

}  // namespace
}  // namespace hc
