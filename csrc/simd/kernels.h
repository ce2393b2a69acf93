// The interface of every ISA's kernels: plain argument structs and one table of functions on pointers.
//
// A quantised row is packed for the vector unit as [scales of all blocks][codes], the codes in groups of
// kLanes blocks with lane = block: word j (4 codes) of the group's blocks lie side by side. The last group
// may hold fewer blocks. The row keeps its size in the file and nothing is rounded: packing is a permutation
// of bytes. A quantised down by output is packed into panels (struct Panels), so that there too a neuron is a
// row.
#pragma once
#include <cstddef>
#include <cstdint>

// This header is compiled once per ISA too: a function of it that stayed one would be a weak symbol, of which
// the linker keeps any ISA's.
#if defined(_MSC_VER)
#define HC_SMALL __forceinline
#else
#define HC_SMALL inline __attribute__((always_inline))
#endif
// kernels_ and avx2 -> kernels_avx2, where the second is a macro.
#define HC_CONCAT_(a, b) a##b
#define HC_CONCAT(a, b) HC_CONCAT_(a, b)

namespace hc {

constexpr int kPage = 32;           // positions of one KV page
constexpr int kSplit = 256;         // positions that one attention partial covers
constexpr int kScoreRows = 48;      // rows of a block of queries whose scores of a split are kept
constexpr int kLeastBlockRows = 8;  // fewer queries of a kv head are not worth a block
constexpr int kMaxDecodeRows = 16;  // rows of a step that may follow the decode rule
constexpr int kBlock = 32;          // weights of one scale
constexpr int kLanes = 16;          // blocks of one group
constexpr int kGroup = kBlock * kLanes;
constexpr int kSums = kGroup + kLanes;  // floats that sums of packed rows take for a group: see axpy
constexpr int kPromptTile = 64;         // the most prompt rows of one piece of an FFN's down sums
constexpr int kMaxLeaves = 64;          // that the neurons of a layer are cut into: struct Ffn
constexpr int kMaxLevels = 7;           // of a tree of so many

enum Type : int {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ2_XXS = 16,
    IQ2_XS = 17,
    IQ3_XXS = 18,
    IQ1_S = 19,
    IQ4_NL = 20,
    IQ3_S = 21,
    IQ2_S = 22,
    IQ4_XS = 23,
    IQ1_M = 29,
    BF16 = 30,
    TQ1_0 = 34,
    TQ2_0 = 35,
    MXFP4 = 39,
    NVFP4 = 40,
    Q1_0 = 41,
    Q2_0 = 42,
};

// Weights of one file block and its bytes; {0, 0} for a type without kernels.
struct BlockSize {
    int weights, bytes;
};
HC_SMALL BlockSize block_size(Type type) {
    switch (type) {
        case F32: return {1, 4};
        case F16:
        case BF16: return {1, 2};
        case Q4_0:
        case IQ4_NL: return {32, 18};
        case Q4_1: return {32, 20};
        case Q5_0: return {32, 22};
        case Q5_1: return {32, 24};
        case Q8_0: return {32, 34};
        case Q4_K: return {256, 144};
        case Q5_K: return {256, 176};
        case Q6_K: return {256, 210};
        case MXFP4: return {32, 17};
        case Q2_K: return {256, 84};
        case Q3_K: return {256, 110};
        case IQ2_XXS: return {256, 66};
        case IQ2_XS: return {256, 74};
        case IQ3_XXS: return {256, 98};
        case IQ1_S: return {256, 50};
        case IQ3_S: return {256, 110};
        case IQ2_S: return {256, 82};
        case IQ4_XS: return {256, 136};
        case IQ1_M: return {256, 56};
        case TQ1_0: return {256, 54};
        case TQ2_0: return {256, 66};
        case NVFP4: return {64, 36};
        case Q1_0: return {128, 18};
        case Q2_0: return {64, 18};
    }
    return {0, 0};
}
// Types whose rows are opened, a group at a time, before they are used: see simd/open_groups.h. They have no
// panels.
HC_SMALL bool is_opened(Type type) {
    switch (type) {
        case F32:
        case F16:
        case BF16:
        case Q4_0:
        case Q4_1:
        case Q5_0:
        case Q5_1:
        case Q8_0:
        case Q4_K:
        case Q5_K:
        case Q6_K:
        case IQ4_NL:
        case MXFP4: return false;
        default: return true;
    }
}
HC_SMALL bool is_quantised(Type type) { return block_size(type).weights > 1; }
HC_SMALL int64_t row_bytes(Type type, int64_t cols) {
    return cols / block_size(type).weights * block_size(type).bytes;
}
HC_SMALL int64_t padded(int64_t n) { return (n + kGroup - 1) / kGroup * kGroup; }
HC_SMALL int64_t sums_of(int64_t n) { return (n + kGroup - 1) / kGroup * kSums; }

// `count` weight rows of `cols` weights, `stride` bytes apart.
struct Rows {
    const uint8_t* base = nullptr;
    int64_t stride = 0;
    int64_t count = 0;
    int64_t cols = 0;
    Type type = F32;
    const float* factors = nullptr;  // of types that are opened: what each row is multiplied by, or nothing
    HC_SMALL const uint8_t* row(int64_t i) const { return base + i * stride; }
};

// Down by output, its blocks along the neurons: each panel holds the neurons of one block. First the scales
// of all outputs, in the order of packed codes; then for each neuron a row of codes, packed like any row's.
struct Panels {
    int64_t neurons = 0;  // 32 or 256; 0: no panels
    int64_t header = 0;   // bytes of scales
    int64_t row = 0;      // bytes of one neuron's codes
    HC_SMALL int64_t bytes() const { return header + neurons * row; }
};
// Neurons whose weights of one output share one scale; panels of 256 hold several such runs.
HC_SMALL int scale_run(Type type) { return type == Q6_K ? 16 : kBlock; }

// One step's numbers; see hotcold.kernels.backend.Batch.
struct Batch {
    const int32_t *counts, *tokens, *positions, *sequence, *slots, *pages, *lengths, *logits_rows;
    int64_t pages_per_sequence;
    const int32_t *first_rows, *row_counts, *state_from, *state_to;  // by sequence, the last by row
    HC_SMALL int tokens_count() const { return counts[0]; }
    HC_SMALL int decode_count() const { return counts[1]; }
    HC_SMALL int prompt_count() const { return counts[0] - counts[1]; }
};

// Activations of several tokens: float rows and, where a quantised weight will meet them, int8 codes per 32
// values in the order of packed rows, with a scale and a sum of codes for each block.
struct Input {
    const float* x = nullptr;
    int64_t stride = 0;  // floats between tokens
    uint8_t* quantised = nullptr;
    int64_t cols = 0;
    float* arranged = nullptr;  // where plain weights will meet many tokens: see ops/plain_tiles.h

    // A stride that no set of a cache divides, as tokens are read side by side.
    HC_SMALL static int64_t arranged_stride(int64_t cols) { return cols + 16; }
    HC_SMALL float* arranged_row(int t) const { return arranged + t * arranged_stride(cols); }

    HC_SMALL static int64_t token_bytes(int64_t cols) { return padded(cols) + padded(cols) / kBlock * 12; }
    HC_SMALL int8_t* codes(int t) const {
        return reinterpret_cast<int8_t*>(quantised + t * token_bytes(cols));
    }
    HC_SMALL float* scales(int t) const { return reinterpret_cast<float*>(codes(t) + padded(cols)); }
    HC_SMALL int32_t* sums(int t) const {
        return reinterpret_cast<int32_t*>(scales(t) + padded(cols) / kBlock);
    }
    HC_SMALL int32_t* low_sums(int t) const {
        return sums(t) + padded(cols) / kBlock;
    }  // of each block's first half
};

constexpr int kLeastArranged = 4;           // of fewer tokens none is
constexpr int64_t kDotScratch = 1 << 20;    // bytes that a product of arranged tokens takes of `local`
constexpr int64_t kPlainPiece = 192 << 10;  // bytes of plain rows that stay in L2 for all their tokens
constexpr int kArrangedRows = 24;           // of them at once, whatever their length
constexpr int kDecodedRows = 16;            // quantised ones that are decoded at once: see ops/row_tiles.h
constexpr int kMostDecoded = 64;            // times so many tokens, whose sums stay in L2

// Counts of what decode rows have read: hotcold.kernels.backend.FFNStats, in its order.
struct FfnCounts {
    int64_t gate_rows, up_rows, down_rows, pairs, runs;
    HC_SMALL void add(const FfnCounts& more) {
        gate_rows += more.gate_rows;
        up_rows += more.up_rows;
        down_rows += more.down_rows;
        pairs += more.pairs;
        runs += more.runs;
    }
};

// out[t * stride + r] (+)= rows[r] . x[t] + bias[r].
struct Product {
    Rows rows;
    const float* bias = nullptr;
    float* out = nullptr;
    int64_t stride = 0;
    bool accumulate = false;
    // Laid out as `out`: of decode rows only what lies where this is above 0 is computed, the rest is 0.
    const float* where = nullptr;
    FfnCounts* stats = nullptr;  // of that, or null
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

// Bits of neurons, a row of words for each token; null: none. `tokens` has the numbers of the rows, where
// they are not 0, 1, ...
struct Masks {
    uint64_t* words = nullptr;
    int64_t stride = 0;  // words between rows
    const int32_t* tokens = nullptr;
    HC_SMALL explicit operator bool() const { return words != nullptr; }
    HC_SMALL uint64_t* row(int t) const { return words + (tokens ? tokens[t] : t) * stride; }
    HC_SMALL bool has(int t, int64_t neuron) const { return row(t)[neuron / 64] >> (neuron % 64) & 1; }
};

// One layer's FFN, or one expert's. Its neurons are cut into leaves by their number alone. What a token's
// neurons add is summed leaf by leaf, in ascending order, and the leaves' sums in a binary tree: neighbours
// (0 and 1, 2 and 3, ...), then neighbouring pairs, and so on; the last one without a neighbour goes up as it
// is, and so does a sum beside a leaf that adds nothing. A piece of work is a node of that tree: 2^levels
// leaves, as many as suits the threads, since that changes no sum.
struct Ffn {
    Rows gate, up,
        down;       // gate.base is null without gating; down (N, D), also in panels, or (D, N) by output
    Panels panels;  // of down
    const float *gate_bias, *up_bias, *down_bias;
    bool by_output;  // down is a dot over all neurons
    Activation activation;
    float threshold;     // of a gate that fires
    float limit, alpha;  // of kSwigluOai
    bool skip, accumulate;
    Masks mask, fired;  // candidates and what fired, of decode rows
    FfnCounts* stats;   // or null
    int max_leaves;
    Input x;
    const float* gates;  // [T, N]: what the gate's rows would give, which are not there; or null
    float* out;          // [T, D]

    // Shared scratch, laid out when the op is recorded.
    int8_t levels[kMaxDecodeRows + 1];  // of a piece, by the number of decode rows
    float* partial;                     // [pieces, T, sums_of(D)]
    uint32_t* added;                    // [pieces]: bit t is set where a piece adds anything to row t
    FfnCounts* piece_stats;             // [pieces]
    float* hidden;                      // prompt rows by neuron [N, hidden_tokens]; all rows by output [T, N]
    int64_t hidden_tokens;

    HC_SMALL const Rows& first() const { return gate.base ? gate : up; }  // read of every candidate
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
    // The start of one of pieces(tokens), or of what follows the last.
    HC_SMALL int64_t piece_begin(int tokens, int64_t piece) const {
        const int64_t leaf = piece << levels[tokens];
        return leaf_begin(leaf < leaves() ? leaf : leaves());
    }
};

struct Attention {
    const float* q;                 // [T, H, head_dim]
    const void *k_cache, *v_cache;  // [page, K, kPage] rows of head_dim values
    Type cache_type;                // F16, F32 or Q8_0, its blocks as in a file
    float* out;
    int heads, kv_heads, head_dim;
    float scale;
    int window = INT32_MAX;        // positions that a row sees, its own among them
    bool chunked = false;          // it sees those from the last multiple of the window on
    const float* sinks = nullptr;  // [H], or null
    float softcap = 0;             // of scores; 0: none
    float* partial;                // [decode rows, kv head, split, heads / kv_heads, head_dim + 2]
    int max_splits;                // of a row
    HC_SMALL int group() const { return heads / kv_heads; }
    // Where the part of the cache begins that a row at `position` sees, in which split; how many hold it.
    HC_SMALL int first_seen(int position) const {
        if (position < window) return 0;
        return chunked ? position / window * window : position - window + 1;
    }
    HC_SMALL int first_split(int position) const { return first_seen(position) / kSplit; }
    HC_SMALL int splits(int position) const { return position / kSplit + 1 - first_split(position); }
    HC_SMALL int64_t partial_floats() const { return int64_t(group()) * (head_dim + 2); }
};

constexpr int kMaxExperts = 1024, kMaxChosen = 32;  // of a router, and of one token
constexpr float kLeastScores = 1e-20f;              // a smaller sum of chosen scores counts as this

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

struct Stream;        // simd/stream.h
struct StateKernels;  // simd/state_kernels.h

// Bytes of thread-local scratch that each kernel may use.
constexpr size_t kLocalBytes = 2 << 20;

// The kernels in which bytes are multiplied: all that an instruction set has of its own where it shares the
// others.
struct ByteProducts {
    const char* name;
    // Rows [first, first + count) of one product for tokens [t0, t1): decode rows where it has `where`.
    void (*product)(const Product&, const Input&, int64_t first, int64_t count, int t0, int t1,
                    uint8_t* local);
    void (*ffn_piece)(const Ffn&, int tokens, int piece, uint8_t* local);
    void (*ffn_hidden)(const Ffn&, int64_t first, int64_t count, int t0, int t1, uint8_t* local);
    // Score bits of 64 neurons a word, words [word, end), for tokens [0, tokens): score >= threshold.
    void (*predict)(const Rows&, const Input&, const float* threshold, int64_t word, int64_t end, int tokens,
                    const Masks&);
};

struct Kernels : ByteProducts {
    const StateKernels* states;
    void (*quantise)(const Input&, int token);
    void (*arrange)(const Input&, int token);  // plain input of kLeastArranged tokens and more
    void (*decode_row)(const Rows&, int64_t row, float* out, uint8_t* local);
    // y += c[k] * down[neurons[k]], in ascending order; in panels, the neurons of one run. At least one, at
    // most 32. Part of ffn_piece.
    void (*add_down)(const Ffn&, const int32_t* neurons, const float* c, int count, float* y, Stream&);
    // One group of a token's sums over all pieces, to `out`.
    void (*ffn_reduce)(const Ffn&, int tokens, int token, int64_t group, float* out);
    void (*ffn_prompt_down)(const Ffn&, int64_t group, int t0, int t1, uint8_t* local);
    void (*attention_split)(const Attention&, const Batch&, int token, int kv_head, int split,
                            uint8_t* local);
    void (*attention_merge)(const Attention&, const Batch&, int token, int kv_head);
    void (*attention_row)(const Attention&, const Batch&, int token, int kv_head, uint8_t* local);
    // Prompt rows [token, end); as attention_row gives them, where attention_block_scratch fits.
    void (*attention_block)(const Attention&, const Batch&, int token, int end, int kv_head, uint8_t* local);
    void (*router)(const Router&, const float* logits, int32_t* ids, float* factors);
    void (*norm)(const NormArgs&, const float* x, float* out);
    void (*rope)(const RopeArgs&, float* head, int position);
    void (*store_row)(Type, const float* x, uint8_t* out, int64_t n);  // of a KV cache
    void (*add)(float* x, const float* y, int64_t n, float keep, float scale);
    void (*softcap)(float cap, float* x, int64_t n);  // x = cap tanh(x / cap)
    void (*relu)(float* x, int64_t n);
    double (*read)(const uint8_t* data, size_t bytes);  // streams through memory, for the bandwidth probe
};

extern const Kernels kernels_scalar, kernels_avx2, kernels_avx512, kernels_neon;

extern const ByteProducts products_avxvnni, products_avxvnni_evex;  // the rest is AVX2's
extern const ByteProducts products_dotprod, products_i8mm;          // the rest is NEON's

// How far ahead of their use weights are fetched, and into which cache: what suits this processor, unless
// somebody sets it while no program runs. It changes no result.
struct Fetching {
    int64_t ahead;  // bytes
    bool into_l2;   // else L1
};
extern Fetching fetching;

// Kernels by ISA name; null when this build or this CPU lacks it. "" picks the best.
const Kernels* find_kernels(const char* name);
// The best ones. std::runtime_error: this build has none for this CPU.
const Kernels& best_kernels();

}  // namespace hc
