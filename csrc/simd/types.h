// Block types, weight rows and activations: the memory layouts that all kernels read.
//
// A quantised row is packed for the vector unit as [scales of all blocks][codes], the codes in groups of
// kLanes blocks with lane = block: word j (4 codes) of each of the group's blocks are adjacent. The last
// group may hold fewer blocks. The row keeps its size in the file and nothing is rounded: packing permutes
// bytes. A quantised down by output is packed into panels (struct Panels), so that there too a neuron is a
// row.
#pragma once
#include <cstdint>

// This header is also compiled once per ISA. A function that is not inlined would be a weak symbol, and the
// linker keeps that of any ISA.
#if defined(_MSC_VER)
#define HC_SMALL __forceinline
#else
#define HC_SMALL inline __attribute__((always_inline))
#endif

namespace hc {

constexpr int kBlock = 32;  // weights of one scale
constexpr int kLanes = 16;  // blocks of one group
constexpr int kGroup = kBlock * kLanes;
constexpr int kSums = kGroup + kLanes;  // floats of the sums of packed rows for a group: see axpy

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
    const float* factors = nullptr;  // of opened types: factor of each row; or null
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

// How products of prompt rows are computed: hotcold.kernels.numpy_tiles.PROMPT_MATHS.
enum PromptMath : int { kSameMath = 0, kSplitMath = 1, kFastMath = 2 };
constexpr int kTilesBehind = 31;  // tokens that tiles may load after the last one

// Activations of several tokens: float rows and, for quantised weights, int8 codes per 32 values in the order
// of packed rows, with a scale and a sum of codes for each block.
struct Input {
    const float* x = nullptr;
    int64_t stride = 0;  // floats between tokens
    uint8_t* quantised = nullptr;
    int64_t cols = 0;
    float* arranged = nullptr;  // for plain weights and many tokens: see ops/plain_tiles.h
    // Rows that tiles load, or null: each token's codes, the high halves of its floats as BF16 numbers, and
    // the low halves, as far as its products read them.
    uint8_t* tiled = nullptr;
    PromptMath math = kSameMath;
    bool tiled_codes = false;
    bool bf16 = false;      // tiles multiply BF16 weights in every math, by decode rows too
    bool decoding = false;  // decode rows alone: `math` does not concern them

    HC_SMALL bool has_high() const { return bf16 || math != kSameMath; }
    HC_SMALL bool has_low() const { return bf16 || math == kSplitMath; }
    HC_SMALL int64_t halves() const { return tiled_codes ? padded(cols) : 0; }  // offset of the high halves
    HC_SMALL int64_t tiled_bytes() const {
        return padded(cols) * (tiled_codes + 2 * has_high() + 2 * has_low());
    }
    HC_SMALL uint8_t* tiled_row(int64_t t) const { return tiled + t * tiled_bytes(); }
    HC_SMALL Input of_decode_rows() const {
        Input in = *this;
        in.decoding = true;
        if (!bf16) in.tiled = nullptr;
        return in;
    }

    // Rows of several tokens are read together: the stride avoids that they share cache sets.
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

}  // namespace hc
