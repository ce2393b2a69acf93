// Quantised rows times many tokens by tiles of bytes. An instruction computes the dot products of one block,
// 16 rows with 16 tokens. They are added in the order of a vector's lanes, so a row has the bits of decoding.
#pragma once
#include "ops/row_tiles.h"
#include "simd/tiles.h"

namespace hc {
namespace {

// Place of a block in the order of tiles: all blocks of a vector's first lane, then all of the next lane.
HC_INLINE int64_t place_of(int64_t block, int64_t blocks) {
    return block % Vec::width * ((blocks + Vec::width - 1) / Vec::width) + block / Vec::width;
}

// For each block b < lanes of a group: stores the words of 16 rows together, at to(b).
template <class To> HC_INLINE void store_rows(const float (*rows)[kLanes], int lanes, To&& to) {
    for (int b = 0; b < lanes; b += 4)
        for (int r = 0; r < kTile; r += Vec::width) {
            F words[4];
            Vec::transpose4(&rows[r][b], kLanes, words);
            for (int i = 0; i < 4 && b + i < lanes; ++i) Vec::store(to(b + i) + r, words[i]);
        }
}

// 16 decoded rows. Each block has codes as signed bytes without an offset, then scales and minima.
template <class B> struct ByteRows {
    static constexpr int scales = B::halves ? 2 : 1, minima = B::has_minimum ? scales : 0;
    static constexpr int block_floats = kTile * (kBlock / 4 + scales + minima);
    float* at;
    int64_t blocks;
    bool has_minimum = false;

    static int64_t bytes(int64_t cols) {
        return padded(cols) / kBlock * block_floats * int64_t(sizeof(float));
    }
    HC_INLINE float* block(int64_t place) const { return at + place * block_floats; }

    void decode(const RowOf<B>* rows, int count) {
        alignas(64) float words[kBlock / 4 + scales + minima][kTile][kLanes] = {};
        GroupScratch<B, 1> scratch;
        for (int64_t first = 0; first < blocks; first += kLanes) {
            for (int r = 0; r < count; ++r)
                for_lanes(blocks, first, [&](int lanes, int l, int n) HC_INLINE_LAMBDA {
                    const Group<B> group = group_of<B>(rows[r], blocks, first, lanes, l, scratch);
                    has_minimum = group.has_minimum();
                    I unit[B::units];
                    group.load(l, n, unit);
                    unroll<0, kBlock / 4>([&](auto k) HC_INLINE_LAMBDA {
                        constexpr int P = decltype(k)::value % B::parts, W = decltype(k)::value / B::parts;
                        const I codes = signed_codes(B::template word<P, W>(unit));
                        Vec::store(words[P + W * B::parts][r] + l, Vec::as_float(codes));
                    });
                    const Head head = group.head(l, n);
                    float (*factor)[kTile][kLanes] = words + kBlock / 4;
                    Vec::store(factor[0][r] + l, head.scale);
                    if constexpr (B::halves) Vec::store(factor[1][r] + l, head.high_scale);
                    if constexpr (B::has_minimum) Vec::store(factor[scales][r] + l, head.minimum);
                    if constexpr (B::has_minimum && B::halves)
                        Vec::store(factor[scales + 1][r] + l, head.high_minimum);
                });
            const int lanes = int(smaller<int64_t>(kLanes, blocks - first));
            for (int w = 0; w < block_floats / kTile; ++w)
                store_rows(words[w], lanes, [&](int b) HC_INLINE_LAMBDA {
                    return block(place_of(first + b, blocks)) + w * kTile;
                });
        }
    }

  private:
    // Subtracts the offset from each byte; no byte borrows from its neighbour.
    static HC_INLINE I signed_codes(I codes) {
        if constexpr (B::signed_codes || B::offset == 0) return codes;
        const I high = Vec::set1_i(int(0x80808080)), offset = Vec::set1_i(B::offset * 0x01010101);
        return Vec::bit_xor(Vec::sub_i(Vec::bit_xor(codes, high), offset), high);
    }
};

// Adds one lane's blocks for tokens [first, first + tokens), in dot_group's order. With fewer than 16 tokens
// the last one's scales fill the tile.
template <class B> HC_NOINLINE void sum_lane(const ByteRows<B>& rows, const Input& in, int first, int tokens,
                                             int lane, float (&to)[kTile][kTile]) {
    constexpr int H = ByteRows<B>::scales, V = kTile / Vec::width;
    F sum[kTile * V];  // in registers: every index is a constant
    unroll<0, kTile * V>([&](auto i) HC_INLINE_LAMBDA { sum[decltype(i)::value] = Vec::zero(); });
    const float* scales[kTile];
    const int32_t *sums[kTile], *low_sums[kTile];
    for (int t = 0; t < kTile; ++t) {
        const int token = first + smaller(t, tokens - 1);
        scales[t] = in.scales(token);
        sums[t] = in.sums(token);
        low_sums[t] = in.low_sums(token);
    }
    const uint8_t* x = in.tiled_row(first);
    const int64_t stride = in.tiled_bytes(), blocks = rows.blocks;  // tiles' stores may alias `in` and `rows`
    int64_t place = place_of(lane, blocks);
    for (int64_t b = lane; b < blocks; b += Vec::width, ++place) {
        const float* block = rows.block(place);
        const float* factors = block + kTile * kBlock / 4;
        alignas(64) int32_t dots[H][kTile][kTile];
        unroll<0, H>([&](auto half) HC_INLINE_LAMBDA {
            constexpr int h = decltype(half)::value, bytes = kBlock / H;
            Tiles::multiply<bytes>(x + place * kBlock + h * bytes, stride,
                                   (const uint8_t*)block + h * bytes * kTile, dots[h]);
        });
        unroll<0, V>([&](auto vector) HC_INLINE_LAMBDA {
            constexpr int v = decltype(vector)::value;
            F scale[H], minimum[H];
            for (int h = 0; h < H; ++h) {
                scale[h] = Vec::load(factors + h * kTile + v * Vec::width);
                if constexpr (B::has_minimum)
                    minimum[h] = Vec::load(factors + (H + h) * kTile + v * Vec::width);
            }
            unroll<0, kTile>([&](auto token) HC_INLINE_LAMBDA {
                constexpr int t = decltype(token)::value;
                const float dx = scales[t][b];
                F& s = sum[t * V + v];
                for (int h = 0; h < H; ++h) {
                    const F dot = Vec::to_float(Vec::load_i(dots[h][t] + v * Vec::width));
                    s = Vec::fma(dot, Vec::mul(scale[h], Vec::set1(dx)), s);
                }
                if constexpr (B::has_minimum)
                    if (!B::halves || rows.has_minimum) {
                        const int32_t low = B::halves ? low_sums[t][b] : sums[t][b];
                        s = Vec::fma(minimum[0], Vec::set1(dx * float(low)), s);
                        if constexpr (B::halves)
                            s = Vec::fma(minimum[1], Vec::set1(dx * float(sums[t][b] - low)), s);
                    }
            });
        });
    }
    unroll<0, kTile * V>([&](auto i) HC_INLINE_LAMBDA {
        constexpr int at = decltype(i)::value;
        Vec::store(to[0] + at * Vec::width, sum[at]);
    });
}

// Adds the sums of a token's lanes in the order of Vec::sum: the dot products of 16 rows.
HC_INLINE void sum_lanes(const float (*lanes)[kTile][kTile], int token, float (&to)[kTile]) {
    for (int v = 0; v < kTile; v += Vec::width) {
        F leaf[Vec::width];
        for (int k = 0; k < Vec::width; ++k) leaf[k] = Vec::load(lanes[Vec::sum_order(k)][token] + v);
        for (int step = 1; step < Vec::width; step *= 2)
            for (int k = 0; k < Vec::width; k += 2 * step) leaf[k] = Vec::add(leaf[k], leaf[k + step]);
        Vec::store(to + v, leaf[0]);
    }
}

template <class B> void tile_dots_of_bytes(const SomeRows& some, const Input& in, int t0, int t1,
                                           const Sink& sink, float* local) {
    Tiles::configure(B::halves ? kBlock / 2 : kBlock);
    ByteRows<B> decoded{local, in.cols / kBlock};
    const int64_t known = some.known(kTile);
    for (int64_t first = 0; first < some.count; first += kTile) {
        const int count = int(smaller<int64_t>(kTile, some.count - first));
        RowOf<B> rows[kTile];
        for (int r = 0; r < count; ++r) rows[r] = row_of<B>(some.rows, some.number(first + r));
        decoded.decode(rows, count);
        Coming coming{some, first + count, smaller(first + count + kTile, known)};
        const int64_t share = coming.share((t1 - t0 + kTile - 1) / kTile * Vec::width);
        for (int t = t0; t < t1; t += kTile) {
            const int tokens = smaller(kTile, t1 - t);
            alignas(64) float lanes[Vec::width][kTile][kTile];
            for (int lane = 0; lane < Vec::width; ++lane) {
                coming.fetch(share);
                sum_lane<B>(decoded, in, t, tokens, lane, lanes[lane]);
            }
            for (int i = 0; i < tokens; ++i) {
                float dots[kTile];
                sum_lanes(lanes, i, dots);
                for (int r = 0; r < count; ++r)
                    sink.put(first + r, t - t0 + i, some.number(first + r), dots[r]);
            }
        }
    }
    Tiles::release();
}

}  // namespace
}  // namespace hc
