// Rows times prompt tokens by tiles of BF16 numbers: hotcold.kernels.numpy_tiles has the order of sums, which
// neither the number of tokens nor their place in a tile changes.
#pragma once
#include "ops/row_tiles.h"
#include "ops/tile_bytes.h"
#include "simd/tiles.h"

namespace hc {
namespace {

// Rows, columns and tokens that are multiplied at a time: a slice of rows stays in L1, its sums in L2.
constexpr int64_t kSlice = 1024;
constexpr int kTileRows = 2 * kTile, kTileTokens = 512;
constexpr int64_t kSliceFloats = kTileRows * kSlice / 2;  // of halves

HC_INLINE uint32_t bits_of(float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    return bits;
}
// The nearest BF16 number, ties to even.
HC_INLINE uint32_t to_bf16(float v) {
    const uint32_t bits = bits_of(v);
    return (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
// The difference of a float and its high half: 0 where that is not finite.
HC_INLINE float rest_of(float v, uint32_t high) {
    const uint32_t bits = high << 16;
    float of;
    std::memcpy(&of, &bits, 4);
    return (high & 0x7f80) == 0x7f80 ? 0.0f : v - of;
}

// Puts a token's codes and halves into the order in which tiles load them.
void tile_input(const Input& in, int token) {
    uint8_t* to = in.tiled_row(token);
    const int64_t blocks = in.cols / kBlock;
    if (in.quantised && in.math != kFastMath)
        for (int64_t b = 0; b < blocks; ++b) {
            const int8_t* from = in.codes(token) + b / kLanes * kGroup + b % kLanes * 4;
            for (int w = 0; w < kBlock / 4; ++w)
                std::memcpy(to + place_of(b, blocks) * kBlock + 4 * w, from + w * 4 * kLanes, 4);
        }
    if (in.math == kSameMath) return;
    const float* x = in.x + token * in.stride;
    auto *high = (uint16_t*)(to + in.halves()), *low = high + padded(in.cols);
    for (int64_t i = 0; i < in.cols; ++i) {
        const uint32_t of = to_bf16(x[i]);
        high[i] = uint16_t(of);
        low[i] = uint16_t(to_bf16(rest_of(x[i], of)));
    }
    for (int64_t i = in.cols; i % kBlock; ++i) high[i] = low[i] = 0;
}

// A slice of rows: of each 16 rows, chunk by chunk, pairs of columns of 16 rows side by side.
struct HalfRows {
    float *high, *low;
    int64_t chunks;

    HC_INLINE float* pair(float* part, int row, int64_t chunk, int p) const {
        return part + ((row / kTile * chunks + chunk) * kTile + p) * kTile;
    }

    // Columns [first, first + 32 * chunks) of at most 16 rows, from `row` on.
    template <class B> void decode(const RowOf<B>* rows, int count, int row, int64_t cols, int64_t first) {
        if constexpr (B::quantised)
            decode_groups<B>(rows, count, row, cols / kBlock, first / kBlock);
        else
            decode_plain<B>(rows, count, row, cols, first);
    }

  private:
    template <class B>
    void decode_groups(const RowOf<B>* rows, int count, int row, int64_t blocks, int64_t first) {
        alignas(64) float pairs[kTile][kTile][kLanes] = {};
        Room<B, 1> room;
        for (int64_t block = first; block < first + chunks; block += kLanes) {
            for (int r = 0; r < count; ++r) {
                alignas(64) float value[kBlock][kLanes];
                for_lanes(blocks, block, [&](int lanes, int l, int n) HC_INLINE_LAMBDA {
                    const Group<B> group = group_of<B>(rows[r], blocks, block, lanes, l, room);
                    const Head head = group.head(l, n);
                    I unit[B::units];
                    group.load(l, n, unit);
                    unroll<0, kBlock>([&](auto k) HC_INLINE_LAMBDA {
                        constexpr int e = decltype(k)::value, P = e / 4 % B::parts, W = e / 4 / B::parts;
                        Vec::store(value[e] + l, weight<B, P, W, e % 4>(unit, head));
                    });
                });
                for (int p = 0; p < kTile; ++p)
                    for (int l = 0; l < kLanes; ++l) {
                        const uint32_t both = to_bf16(value[2 * p][l]) | to_bf16(value[2 * p + 1][l]) << 16;
                        std::memcpy(&pairs[p][r][l], &both, 4);
                    }
            }
            const int lanes = int(smaller<int64_t>(kLanes, first + chunks - block));
            for (int p = 0; p < kTile; ++p)
                store_rows(pairs[p], lanes,
                           [&](int b) HC_INLINE_LAMBDA { return pair(high, row, block - first + b, p); });
        }
    }
    template <class P>
    void decode_plain(const RowOf<P>* rows, int count, int row, int64_t cols, int64_t first) {
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            const int64_t begin = first + chunk * kBlock;
            alignas(64) float halves[2][kTile][kLanes] = {};
            for (int r = 0; r < count; ++r) {
                alignas(64) float value[kBlock] = {};
                for (int i = 0; i < kBlock && begin + i < cols; i += Vec::width)
                    Vec::store(value + i, P::load(rows[r], begin + i,
                                                  int(smaller<int64_t>(Vec::width, cols - begin - i))));
                for (int p = 0; p < kTile; ++p) {
                    const float* v = value + 2 * p;
                    const uint32_t a = to_bf16(v[0]), b = to_bf16(v[1]), both = a | b << 16;
                    const uint32_t rest = to_bf16(rest_of(v[0], a)) | to_bf16(rest_of(v[1], b)) << 16;
                    std::memcpy(&halves[0][r][p], &both, 4);
                    std::memcpy(&halves[1][r][p], &rest, 4);
                }
            }
            for (float* part : {high, low})
                store_rows(halves[part == low], kTile,
                           [&](int p) HC_INLINE_LAMBDA { return pair(part, row, chunk, p); });
        }
    }
};

template <class B> void tile_dots_of_halves(const SomeRows& some, const Input& in, int t0, int t1,
                                            const Sink& sink, float* local) {
    Tiles::configure(64);
    const bool split = in.math == kSplitMath;
    auto* sums = (float(*)[2][2][kTile * kTile])(local + 2 * kSliceFloats);  // of each 32 tokens
    for (int64_t first = 0; first < some.count; first += kTileRows)
        for (int begin = t0, end; begin < t1; begin = end) {
            end = smaller(begin + kTileTokens, t1);
            for (int64_t at = 0; at < in.cols; at += kSlice) {
                const int64_t chunks = (smaller(kSlice, in.cols - at) + kBlock - 1) / kBlock;
                HalfRows decoded{local, local + kSliceFloats, chunks};
                for (int row = 0; row < kTileRows && first + row < some.count; row += kTile) {
                    RowOf<B> rows[kTile];
                    const int count = int(smaller<int64_t>(kTile, some.count - first - row));
                    for (int r = 0; r < count; ++r)
                        rows[r] = row_of<B>(some.rows, some.number(first + row + r));
                    decoded.decode<B>(rows, count, row, in.cols, at);
                }
                for (int t = begin; t < end; t += kTileRows) {
                    const uint8_t* x = in.tiled_row(t) + in.halves() + at * 2;
                    const FloatTiles of{x,
                                        (const uint8_t*)decoded.high,
                                        in.tiled_bytes(),
                                        kTile * kTile * 4,
                                        padded(in.cols) * 2,
                                        kSliceFloats * 4,
                                        split,
                                        split && some.rows.type != BF16};
                    Tiles::multiply(of, chunks, at > 0, sums[(t - begin) / kTileRows]);
                }
            }
            for (int t = begin; t < end; ++t)
                for (int r = 0; r < kTileRows && first + r < some.count; ++r) {
                    const int token = t - begin;
                    const auto& of = sums[token / kTileRows][token % kTileRows / kTile][r / kTile];
                    sink.put(first + r, t - t0, some.number(first + r),
                             of[token % kTile * kTile + r % kTile]);
                }
        }
    Tiles::release();
}

}  // namespace
}  // namespace hc
