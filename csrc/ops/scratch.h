// Bytes of a thread's scratch (kLocalBytes) that kernels use. If the size depends on shapes, the binding
// refuses excess; the rest fits by constants.
#pragma once
#include <cstdint>

#include "ops/arguments.h"
#include "pool/local_bytes.h"

namespace hc {

constexpr int kMaxPieceRows = 256;  // of a product: see piece_rows

// decode_row: the sums of one row; plain types need none.
inline int64_t decode_row_scratch(Type type, int64_t cols) {
    return is_quantised(type) ? sums_of(cols) * 4 : 0;
}

// product with `where`: results of one piece's rows for all decode rows, and the scratch of its products.
constexpr int64_t kWantedBytes = kMaxPieceRows * kMaxDecodeRows * 4;
static_assert(kWantedBytes + kDotScratch <= int64_t(kLocalBytes), "a piece's values must fit");

// embed: the same, and the row itself if it is added.
inline int64_t embed_scratch(Type type, int64_t cols, bool accumulate) {
    return decode_row_scratch(type, cols) + (accumulate ? cols * 4 : 0);
}

// attention_split and attention_row: scores of a group of heads, and two partial results.
inline int64_t attention_scratch(int64_t group, int64_t head_dim) {
    return group * (kSplit + 2 * (head_dim + 2)) * 4;
}

// attention_block, as floats: queries and results of its rows, keys and values of a split, one page; scores
// and a partial result of kScoreRows rows. Values of a head fill whole vectors, of 16 at most.
inline int64_t attention_block_scratch(int64_t rows, int64_t head_dim) {
    const int64_t padded = (head_dim + 15) / 16 * 16;
    const int64_t stride = padded + kRowPad;
    return (rows * (2 * padded + 2) + kSplit * (padded + stride) + kPage * padded +
            kScoreRows * (kScoreStride + stride)) *
               4 +
           7 * 64;
}

// ffn_piece: for each neuron four segments to read, gates of all decode rows, and its number.
constexpr int64_t kNeuronScratch = 4 * 32 + kMaxDecodeRows * 4 + 4;
constexpr int64_t kMaxLeafNeurons = 4096;
static_assert((kMaxLeafNeurons + 64) * kNeuronScratch + 64 <= int64_t(kLocalBytes), "a leaf must fit");
// Also sums of its tokens on each level below its own and of the current leaf.
inline int64_t ffn_piece_scratch(const Ffn& f, int tokens) {
    int64_t most = 0;
    for (int piece = 0; piece < f.pieces(tokens); ++piece) {
        const int64_t neurons = f.piece_begin(tokens, piece + 1) - f.piece_begin(tokens, piece);
        most = neurons > most ? neurons : most;
    }
    const int levels = f.levels[tokens];
    return most * kNeuronScratch + 64 + levels * tokens * sums_of(f.dim()) * 4;
}

// ffn_hidden: up values of one piece's rows and kUpTile tokens, and the scratch of its products. Tiles decode
// rows again for each range of tokens, so their range is longer.
constexpr int kUpTile = 64, kTiledUpTile = 256;
constexpr int64_t kUpTileBytes = kMaxPieceRows * kTiledUpTile * 4;
static_assert(kUpTileBytes + kDotScratch <= int64_t(kLocalBytes), "a piece's tile must fit");

// ffn_prompt_down: for each token of a tile the sums of all levels and of the current leaf, 32 decoded rows
// with their scales, and a list of the neurons that count.
static_assert((kMaxLevels + 1) * kPromptTile * kSums * 4 + 34 * kGroup * 4 + kPromptTile * (4 + 32 * 8) +
                      16 <=
                  int64_t(kLocalBytes),
              "a tile of prompt rows must fit");

}  // namespace hc
