// Decoded rows times tokens for an instruction that multiplies byte matrices (Arm's SMMLA): two rows of eight
// bytes with two tokens of eight. Its four lanes belong to one block, so vectors of words are transposed to
// blocks first. Each sum is the same as with byte dot products, in the same order.
#pragma once
#include "ops/arguments.h"
#include "simd/block_dot.h"

namespace hc {
namespace {

constexpr int kRowTile = 8, kTokenTile = 8;

// Pairs block b of a vector of blocks, of two rows or tokens: two words of the first, two of the second.
HC_INLINE void pair_words(const I (&first)[8], const I (&second)[8], I (&to)[4][4]) {
    for (int m = 0; m < 4; ++m)
        Vec::transpose4(first[2 * m], first[2 * m + 1], second[2 * m], second[2 * m + 1], to[m]);
}
// The same for one value per block, in the layout of the products of two rows with two tokens.
HC_INLINE void pair_rows(F first, F second, F (&to)[4]) { Vec::transpose4(first, first, second, second, to); }
template <class V> HC_INLINE void pair_tokens(V first, V second, V (&to)[4]) {
    Vec::transpose4(first, second, first, second, to);
}

// A group of some rows, by pairs.
template <class B> struct DecodedRows {
    static constexpr int pairs = kDecodedRows / 2, vectors = kLanes / Vec::width, halves = B::halves ? 2 : 1;
    I codes[pairs][vectors][4][4];  // [two words][block]
    F scale[pairs][vectors][halves][4];
    F minimum[B::has_minimum ? pairs : 1][vectors][halves][4];
    bool minima;

    // Decodes the group that starts at `block`; `count` is even.
    void decode(const RowOf<B>* rows, int count, int64_t blocks, int64_t block) {
        GroupScratch<B, 2> scratch;
        for (int i = 0; i < count / 2; ++i)
            for_lanes(blocks, block, [&](int lanes, int l, int n) HC_INLINE_LAMBDA {
                const Group<B> first = group_of<B>(rows[2 * i], blocks, block, lanes, l, scratch, 0),
                               second = group_of<B>(rows[2 * i + 1], blocks, block, lanes, l, scratch, 1);
                minima = first.has_minimum();
                decode_pair(first, second, l, n, i);
            });
    }

  private:
    static HC_INLINE void decode_words(const Group<B>& group, int l, int n, I (&word)[8]) {
        I unit[B::units];
        group.load(l, n, unit);
        unroll<0, 8>([&](auto k) HC_INLINE_LAMBDA {
            constexpr int P = decltype(k)::value % B::parts, W = decltype(k)::value / B::parts;
            word[P + W * B::parts] = B::template word<P, W>(unit);
        });
    }
    HC_INLINE void decode_pair(const Group<B>& first, const Group<B>& second, int l, int n, int i) {
        const int v = l / Vec::width;
        I word[2][8];
        decode_words(first, l, n, word[0]);
        decode_words(second, l, n, word[1]);
        pair_words(word[0], word[1], codes[i][v]);
        const Head a = first.head(l, n), b = second.head(l, n);
        pair_rows(a.scale, b.scale, scale[i][v][0]);
        if constexpr (B::halves) pair_rows(a.high_scale, b.high_scale, scale[i][v][1]);
        if constexpr (B::has_minimum) pair_rows(a.minimum, b.minimum, minimum[i][v][0]);
        if constexpr (B::has_minimum && B::halves)
            pair_rows(a.high_minimum, b.high_minimum, minimum[i][v][1]);
    }
};

// The blocks of a vector of two tokens.
template <class B> struct TokenPair {
    static constexpr int halves = B::halves ? 2 : 1;
    I codes[4][4];                 // [two words][block]
    I start[halves][4];            // start of integer sums
    F scale[4], total[halves][4];  // `total` times a minimum is added

    HC_INLINE void load(const Input& in, int first, int second, int64_t block, int v) {
        const int64_t at = block + v * Vec::width;
        const int token[2] = {first, second};
        I word[2][8], begin[2][halves];
        F factor[2], sum[2][halves];
        for (int i = 0; i < 2; ++i) {
            const int8_t* x = in.codes(token[i]) + block * kBlock + 4 * v * Vec::width;
            for (int w = 0; w < 8; ++w) word[i][w] = Vec::load_i(x + w * 4 * kLanes);
            for (int h = 0; h < halves; ++h) begin[i][h] = start_of<B>(in, token[i], at, h == 1);
            factor[i] = Vec::load(in.scales(token[i]) + at);
            I all = Vec::load_i(in.sums(token[i]) + at);
            if constexpr (B::halves) {
                const I low = Vec::load_i(in.low_sums(token[i]) + at);
                sum[i][1] = Vec::mul(factor[i], Vec::to_float(Vec::sub_i(all, low)));
                all = low;
            }
            sum[i][0] = Vec::mul(factor[i], Vec::to_float(all));
        }
        pair_words(word[0], word[1], codes);
        for (int h = 0; h < halves; ++h) pair_tokens(begin[0][h], begin[1][h], start[h]);
        pair_tokens(factor[0], factor[1], scale);
        if constexpr (B::has_minimum)
            for (int h = 0; h < halves; ++h) pair_tokens(sum[0][h], sum[1][h], total[h]);
    }
};

// Block b of vector v of a tile of rows, from pair i on, times P pairs of tokens, in dot_group's order.
template <class B, int P> HC_INLINE void add_block(const DecodedRows<B>& rows, const TokenPair<B> (&x)[P],
                                                   int i, int v, int b, F (*sums)[kDecodedRows / 2][4]) {
    constexpr int R = kRowTile / 2, H = B::halves ? 2 : 1;
    F sum[R][P];
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) sum[r][p] = sums[p][i + r][b];
    for (int h = 0; h < H; ++h) {
        I acc[R][P];
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < P; ++p) acc[r][p] = x[p].start[h][b];
        for (int m = h * 4 / H; m < (h + 1) * 4 / H; ++m)
            for (int r = 0; r < R; ++r)
                for (int p = 0; p < P; ++p)
                    acc[r][p] = Vec::multiply_pairs(acc[r][p], rows.codes[i + r][v][m][b], x[p].codes[m][b]);
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < P; ++p) {
                const F scale = Vec::mul(rows.scale[i + r][v][h][b], x[p].scale[b]);
                sum[r][p] = Vec::fma(Vec::to_float(acc[r][p]), scale, sum[r][p]);
            }
    }
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) {
            if constexpr (B::has_minimum)
                for (int h = 0; h < H && (H == 1 || rows.minima); ++h)
                    sum[r][p] = Vec::fma(rows.minimum[i + r][v][h][b], x[p].total[h][b], sum[r][p]);
            sums[p][i + r][b] = sum[r][p];
        }
}

// The vectors of the group at `block`: some tiles of rows times P pairs of tokens from t0 on, up to token
// `last`. If a pair lacks its second token, the first replaces it.
template <class B, int P> HC_NOINLINE void add_decoded(const DecodedRows<B>& rows, int tiles,
                                                       const Input& input, int t0, int last, int64_t block,
                                                       int vectors, F (*sums)[kDecodedRows / 2][4]) {
    const Input in = input;
    for (int v = 0; v < vectors; ++v) {
        TokenPair<B> x[P];
        for (int p = 0; p < P; ++p) x[p].load(in, t0 + 2 * p, smaller(t0 + 2 * p + 1, last), block, v);
        for (int i = 0; i < tiles * kRowTile / 2; i += kRowTile / 2)
            for (int b = 0; b < 4; ++b) add_block<B, P>(rows, x, i, v, b, sums);
    }
}

// Sums of rows times tokens over groups of columns: of pairs of rows and of tokens, for each block of a
// vector.
template <class B> struct DecodedSums {
    F sum[kMostDecoded / 2][kDecodedRows / 2][4];

    void clear(int tokens) {
        for (int p = 0; p < (tokens + 1) / 2; ++p)
            for (auto& of_rows : sum[p])
                for (F& one : of_rows) one = Vec::zero();
    }
    // Tokens [t, t + n), at most a tile, counted from t0; `tiles` of rows.
    void add(const DecodedRows<B>& rows, int tiles, const Input& in, int t0, int t, int n, int64_t block,
             int vectors) {
        const int last = t0 + t + n - 1;
        if (n == kTokenTile)
            return add_decoded<B, kTokenTile / 2>(rows, tiles, in, t0 + t, last, block, vectors, sum + t / 2);
        for (; n > 0; t += 2, n -= 2)
            add_decoded<B, 1>(rows, tiles, in, t0 + t, last, block, vectors, sum + t / 2);
    }
    // Adds a vector's lanes in the order of Vec::sum.
    template <class Put> void put(int count, int tokens, Put&& put) const {
        for (int i = 0; i < count / 2; ++i)
            for (int t = 0; t < tokens; t += 2) {
                const F* s = sum[t / 2][i];
                float dot[4];
                Vec::store(dot, Vec::add(Vec::add(s[0], s[1]), Vec::add(s[2], s[3])));
                for (int k = 0; k < 4; ++k)
                    if (t + k % 2 < tokens) put(2 * i + k / 2, t + k % 2, dot[k]);
            }
    }
};

}  // namespace
}  // namespace hc
