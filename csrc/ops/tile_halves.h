// Rows times tokens by tiles of BF16 numbers. hotcold.kernels.numpy_tiles specifies the order of sums;
// it depends neither on the number of tokens nor on their place in a tile.
#pragma once
#include <type_traits>

#include "ops/row_tiles.h"
#include "ops/tile_bytes.h"
#include "simd/tiles.h"

namespace hc {
namespace {

// Rows, columns and tokens that are multiplied at once: a slice of rows stays in L1, its sums stay in L2.
constexpr int64_t kSlice = 1024;
constexpr int kTileRows = 2 * kTile, kTileTokens = 512;
constexpr int64_t kSliceFloats = kTileRows * kSlice / 2;  // floats that hold a slice as BF16 numbers

// The bits of the nearest BF16 number, ties to even.
HC_INLINE uint32_t to_bf16(float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    return (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
// The low half of a float, from the difference to its high half; 0 if the high half is not finite.
HC_INLINE uint32_t low_half(float v, uint32_t high) {
    return (high & 0x7f80) == 0x7f80 ? 0 : to_bf16(v - float_of(high << 16));
}

// Writes Input::tiled for a token.
void tile_input(const Input& in, int token) {
    uint8_t* to = in.tiled_row(token);
    const int64_t blocks = in.cols / kBlock;
    if (in.tiled_codes)
        for (int64_t b = 0; b < blocks; ++b) {
            const int8_t* from = in.codes(token) + b / kLanes * kGroup + b % kLanes * 4;
            for (int w = 0; w < kBlock / 4; ++w)
                std::memcpy(to + place_of(b, blocks) * kBlock + 4 * w, from + w * 4 * kLanes, 4);
        }
    if (!in.has_high()) return;
    const float* x = in.x + token * in.stride;
    const size_t padding = size_t(-in.cols & (kBlock - 1)) * 2;  // bytes of the last chunk
    auto *high = (uint16_t*)(to + in.halves()), *low = high + padded(in.cols);
    for (int64_t i = 0; i < in.cols; ++i) high[i] = uint16_t(to_bf16(x[i]));
    std::memset(high + in.cols, 0, padding);
    if (!in.has_low()) return;
    for (int64_t i = 0; i < in.cols; ++i) low[i] = uint16_t(low_half(x[i], high[i]));
    std::memset(low + in.cols, 0, padding);
}

// Where a slice stores pair p of a chunk's columns for 16 rows: each chunk is a tile of weights.
HC_INLINE float* pair_at(float* slice, int64_t chunk, int p) { return slice + (chunk * kTile + p) * kTile; }

// Decodes chunks [first, first + chunks) of at most 16 rows to the high halves of a slice.
template <class B> void decode_quantised(const RowOf<B>* rows, int count, int64_t blocks, int64_t first,
                                         int64_t chunks, float* slice) {
    alignas(64) float pairs[kTile][kTile][kLanes] = {};
    GroupScratch<B, 1> scratch;
    for (int64_t block = first; block < first + chunks; block += kLanes) {
        for (int r = 0; r < count; ++r) {
            alignas(64) float value[kBlock][kLanes];
            for_lanes(blocks, block, [&](int lanes, int l, int n) HC_INLINE_LAMBDA {
                const Group<B> group = group_of<B>(rows[r], blocks, block, lanes, l, scratch);
                const Head head = group.head(l, n);
                I unit[B::units];
                group.load(l, n, unit);
                unroll<0, kBlock>([&](auto k) HC_INLINE_LAMBDA {
                    constexpr int e = decltype(k)::value, P = e / 4 % B::parts, W = e / 4 / B::parts;
                    Vec::store(value[e] + l, weight<B, P, W, e % 4>(unit, head));
                });
            });
            for (int p = 0; p < kTile; ++p)
                for (int l = 0; l < kLanes; ++l)
                    pairs[p][r][l] = float_of(to_bf16(value[2 * p][l]) | to_bf16(value[2 * p + 1][l]) << 16);
        }
        const int lanes = int(smaller<int64_t>(kLanes, first + chunks - block));
        for (int p = 0; p < kTile; ++p)
            store_rows(pairs[p], lanes,
                       [&](int b) HC_INLINE_LAMBDA { return pair_at(slice, block - first + b, p); });
    }
}

// Decodes columns [first, first + 32 * chunks) of at most 16 rows to both halves of a slice, or to the high
// halves if the weights are BF16 numbers. With each chunk fetches a share of `coming`.
template <class P> void decode_plain(const RowOf<P>* rows, int count, int64_t cols, int64_t first,
                                     int64_t chunks, float* slice, Coming& coming) {
    constexpr bool bf16 = std::is_same_v<P, FloatBF16>;
    const int64_t share = coming.share(chunks);
    for (int64_t chunk = 0; chunk < chunks; ++chunk, first += kBlock) {
        coming.fetch(share);
        alignas(64) float halves[2 - bf16][kTile][kLanes] = {};
        for (int r = 0; r < count; ++r) {
            const int64_t left = cols - first;
            if constexpr (bf16) {
                std::memcpy(halves[0][r], rows[r] + first * 2, size_t(smaller<int64_t>(kBlock, left)) * 2);
            } else {
                alignas(64) float value[kBlock] = {};
                for (int i = 0; i < kBlock && i < left; i += Vec::width)
                    Vec::store(value + i,
                               P::load(rows[r], first + i, int(smaller<int64_t>(Vec::width, left - i))));
                for (int p = 0; p < kTile; ++p) {
                    const float* v = value + 2 * p;
                    const uint32_t a = to_bf16(v[0]), b = to_bf16(v[1]);
                    halves[0][r][p] = float_of(a | b << 16);
                    halves[1][r][p] = float_of(low_half(v[0], a) | low_half(v[1], b) << 16);
                }
            }
        }
        for (int half = 0; half < 2 - bf16; ++half)
            store_rows(halves[half], kTile, [&](int p) HC_INLINE_LAMBDA {
                return pair_at(slice + half * kSliceFloats, chunk, p);
            });
    }
}

template <class B> void tile_dots_of_halves(const SomeRows& some, const Input& in, bool split, int t0, int t1,
                                            const Sink& sink, float* slice) {
    Tiles::configure(64);
    const int64_t known = some.known(kTileRows);
    auto* sums = (TileSums*)(slice + 2 * kSliceFloats);  // of 32 tokens each
    for (int64_t first = 0; first < some.count; first += kTileRows)
        for (int begin = t0, end; begin < t1; begin = end) {
            end = smaller(begin + kTileTokens, t1);
            std::memset(sums, 0, size_t(end - begin + kTileRows - 1) / kTileRows * sizeof *sums);
            for (int64_t at = 0; at < in.cols; at += kSlice) {
                const int64_t chunks = (smaller(kSlice, in.cols - at) + kBlock - 1) / kBlock;
                for (int row = 0; row < kTileRows && first + row < some.count; row += kTile) {
                    RowOf<B> rows[kTile];
                    const int count = int(smaller<int64_t>(kTile, some.count - first - row));
                    for (int r = 0; r < count; ++r)
                        rows[r] = row_of<B>(some.rows, some.number(first + row + r));
                    float* to = pair_at(slice, row / kTile * chunks, 0);
                    if constexpr (B::quantised)
                        decode_quantised<B>(rows, count, in.cols / kBlock, at / kBlock, chunks, to);
                    else {
                        const int64_t next = at + kSlice < in.cols ? at + kSlice : 0;
                        const int64_t from = first + row + (next ? 0 : kTileRows);
                        const int64_t end = smaller(next + kSlice, in.cols) * B::bytes;
                        Coming coming{some, from, smaller(from + kTile, known), next * B::bytes, end};
                        decode_plain<B>(rows, count, in.cols, at, chunks, to, coming);
                    }
                }
                for (int t = begin; t < end; t += kTileRows)
                    Tiles::multiply({in.tiled_row(t) + in.halves() + at * 2, (const uint8_t*)slice,
                                     in.tiled_bytes(), split ? padded(in.cols) * 2 : 0,
                                     split && some.rows.type != BF16 ? kSliceFloats * 4 : 0},
                                    chunks, sums[(t - begin) / kTileRows]);
            }
            for (int t = begin; t < end; ++t)
                for (int r = 0; r < kTileRows && first + r < some.count; ++r) {
                    const int token = (t - begin) % kTileRows;
                    const float* of_tile = sums[(t - begin) / kTileRows][token / kTile][r / kTile];
                    sink.put(first + r, t - t0, some.number(first + r),
                             of_tile[token % kTile * kTile + r % kTile]);
                }
        }
    Tiles::release();
}

}  // namespace
}  // namespace hc
