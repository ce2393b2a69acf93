// The arguments of the kernels: plain structs, and the sizes of pieces of work.
#pragma once
#include <cstddef>

#include "simd/types.h"

namespace hc {

constexpr int kPage = 32;       // positions of one KV page
constexpr int kSplit = 256;     // positions that one attention partial covers
constexpr int kScoreRows = 48;  // rows of a block of queries whose scores of a split are kept
constexpr int kRowPad = 16;     // floats after a row of a block, so that rows share few sets of L1
constexpr int kScoreStride = kSplit + kRowPad;
constexpr int kLeastBlockRows = 8;  // fewer queries of a kv head are not worth a block
constexpr int kMaxDecodeRows = 16;  // rows of a step that may follow the decode rule
constexpr int kPromptTile = 64;     // maximum prompt rows of one piece of an FFN's down sums
constexpr int kMaxLeaves = 64;      // leaves of a layer's neurons: struct Ffn
constexpr int kMaxLevels = 7;       // levels of a tree of kMaxLeaves leaves

constexpr int kLeastArranged = 4;           // fewer tokens are not arranged
constexpr int64_t kDotScratch = 1 << 20;    // bytes of `local` that a product of arranged tokens uses
constexpr int64_t kPlainPiece = 192 << 10;  // bytes of plain rows that stay in L2 for all their tokens
constexpr int kArrangedRows = 24;           // plain rows at once, whatever their length
constexpr int kDecodedRows = 16;            // quantised rows that are decoded at once: see ops/row_tiles.h
constexpr int kMostDecoded = 64;            // tokens for these rows at once, so that the sums stay in L2
constexpr int kLeastTiled = 16;             // fewer tokens are not multiplied by byte tiles

// One step's numbers; see hotcold.kernels.backend.Batch.
struct Batch {
    const int32_t *counts, *tokens, *positions, *sequence, *slots, *pages, *lengths, *logits_rows;
    int64_t pages_per_sequence;
    const int32_t *first_rows, *row_counts, *state_from, *state_to;  // by sequence; state_to by row
    HC_SMALL int tokens_count() const { return counts[0]; }
    HC_SMALL int decode_count() const { return counts[1]; }
    HC_SMALL int prompt_count() const { return counts[0] - counts[1]; }
};

// Counts of rows that decode rows have read: hotcold.kernels.backend.FFNStats, in its order.
struct FfnCounts {
    int64_t gate_rows, up_rows, down_rows, pairs, runs;
    HC_SMALL void add(const FfnCounts& other) {
        gate_rows += other.gate_rows;
        up_rows += other.up_rows;
        down_rows += other.down_rows;
        pairs += other.pairs;
        runs += other.runs;
    }
};

// out[t * stride + r] (+)= rows[r] . x[t] + bias[r].
struct Product {
    Rows rows;
    const float* bias = nullptr;
    float* out = nullptr;
    int64_t stride = 0;
    bool accumulate = false;
    // Same layout as `out`: for decode rows, computes only outputs where this is above 0; the others are 0.
    const float* where = nullptr;
    FfnCounts* stats = nullptr;  // of `where`, or null
    HC_SMALL bool wanted(int t, int64_t r) const { return where[t * stride + r] > 0; }
};

enum Activation : int {
    kRelu = 0,
    kDRelu = 1,
    kRelu2 = 2,
    kSilu = 3,
    kGelu = 4,
    kGeluErf = 5,
    kSwigluOai = 6
};
HC_SMALL bool can_skip(Activation a) { return a == kRelu || a == kDRelu || a == kRelu2; }

// Bits of neurons, a row of words for each token; null: none. `tokens` has the row numbers if they are not 0,
// 1, ...
struct Masks {
    uint64_t* words = nullptr;
    int64_t stride = 0;  // words between rows
    const int32_t* tokens = nullptr;
    HC_SMALL explicit operator bool() const { return words != nullptr; }
    HC_SMALL uint64_t* row(int t) const { return words + (tokens ? tokens[t] : t) * stride; }
    HC_SMALL bool has(int t, int64_t neuron) const { return row(t)[neuron / 64] >> (neuron % 64) & 1; }
};

// One layer's FFN, or one expert's. Its neurons are cut into leaves by their number alone. A token's neurons
// are summed leaf by leaf, in ascending order, and the leaves' sums in a binary tree: neighbours (0 and 1, 2
// and 3, ...), then neighbouring pairs, and so on. A last node without a neighbour moves up unchanged, and so
// does the sum next to a leaf that adds nothing. A piece of work is a node of this tree with 2^levels leaves.
// The number of pieces suits the threads and changes no sum.
struct Ffn {
    Rows gate, up,
        down;       // gate.base is null without gating; down (N, D), also in panels, or (D, N) by output
    Panels panels;  // of down
    const float *gate_bias, *up_bias, *down_bias;
    bool by_output;  // down is a dot product over all neurons
    Activation activation;
    float threshold;     // of an active gate
    float limit, alpha;  // of kSwigluOai
    bool skip, accumulate;
    Masks mask, active;  // candidates and active neurons, of decode rows
    FfnCounts* stats;    // or null
    int max_leaves;
    Input x;
    const float* gates;  // [T, N]: results of the gate's rows if those are elsewhere; or null
    float* out;          // [T, D]

    // Shared scratch; its layout is fixed when the op is recorded.
    int8_t levels[kMaxDecodeRows + 1];  // of a piece, by the number of decode rows
    float* partial;                     // [pieces, T, sums_of(D)]
    uint32_t* added;                    // [pieces]: bit t is set if a piece adds anything to row t
    FfnCounts* piece_stats;             // [pieces]
    float* hidden;                      // prompt rows by neuron [N, hidden_tokens]; all rows by output [T, N]
    int64_t hidden_tokens;

    HC_SMALL const Rows& first() const { return gate.base ? gate : up; }  // read for each candidate
    HC_SMALL bool gated() const { return gate.base || gates; }
    HC_SMALL int64_t neurons() const { return up.count; }
    HC_SMALL int64_t dim() const { return up.cols; }
    HC_SMALL int64_t words() const { return (neurons() + 63) / 64; }
    HC_SMALL int leaves() const {
        const int64_t two_words_each = words() / 2;
        return two_words_each < 1 ? 1 : two_words_each < max_leaves ? int(two_words_each) : max_leaves;
    }
    // Leaf r has neurons [leaf_begin(r), leaf_begin(r + 1)), whole words of a mask.
    HC_SMALL int64_t leaf_begin(int64_t r) const {
        const int64_t begin = words() * r / leaves() * 64;
        return begin < neurons() ? begin : neurons();
    }
    HC_SMALL int64_t leaf_of(int64_t neuron) const { return ((neuron / 64 + 1) * leaves() - 1) / words(); }
    HC_SMALL int pieces(int tokens) const { return ((leaves() - 1) >> levels[tokens]) + 1; }
    // The start of a piece below pieces(tokens), or the end of the last one.
    HC_SMALL int64_t piece_begin(int tokens, int64_t piece) const {
        const int64_t leaf = piece << levels[tokens];
        return leaf_begin(leaf < leaves() ? leaf : leaves());
    }
};

struct Attention {
    const float* q;                 // [T, H, head_dim]
    const void *k_cache, *v_cache;  // [page, K, kPage] rows of head_dim values
    Type cache_type;                // F16, F32 or Q8_0, in the blocks of a file
    float* out;
    int heads, kv_heads, head_dim;
    float scale;
    int window = INT32_MAX;        // positions that a row attends to, including its own
    bool chunked = false;          // it attends to positions from the last multiple of the window on
    const float* sinks = nullptr;  // [H], or null
    float softcap = 0;             // of scores; 0: none
    float* partial;                // [decode rows, kv head, split, heads / kv_heads, head_dim + 2]
    int max_splits;                // of a row
    HC_SMALL int group() const { return heads / kv_heads; }
    // For a row at `position`: its first visible position, the split of that, and the number of visible
    // splits.
    HC_SMALL int first_seen(int position) const {
        if (position < window) return 0;
        return chunked ? position / window * window : position - window + 1;
    }
    HC_SMALL int first_split(int position) const { return first_seen(position) / kSplit; }
    HC_SMALL int splits(int position) const { return position / kSplit + 1 - first_split(position); }
    HC_SMALL int64_t partial_floats() const { return int64_t(group()) * (head_dim + 2); }
};

constexpr int kMaxExperts = 1024, kMaxChosen = 32;  // of a router, and of one token
constexpr float kLeastScores = 1e-20f;              // lower bound of the sum of chosen scores

// See hotcold.kernels.backend.Backend.router.
struct Router {
    int experts, chosen;
    bool softmax;                 // else sigmoid
    const float* selection_bias;  // [experts], or null
    bool normalise;
    float scale;
};

struct NormArgs {
    const float *weight, *bias;  // of a group; or null
    float eps;
    bool centre;
    int64_t dim;  // of a group
};

struct RopeArgs {
    const float *cos, *sin;  // [P, half]
    int64_t half;
    bool interleaved;
};

}  // namespace hc
