// The kernels of an instruction set: one table of functions on pointers.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "ops/arguments.h"
#include "ops/state_arguments.h"

namespace hc {

// The kernels that multiply bytes: the only part of an instruction set that shares the other kernels.
struct ByteProducts {
    const char* name;
    // Rows [first, first + count) of one product for tokens [t0, t1); with `where`, of decode rows only.
    void (*product)(const Product&, const Input&, int64_t first, int64_t count, int t0, int t1,
                    uint8_t* local);
    void (*ffn_piece)(const Ffn&, int tokens, int piece, uint8_t* local);
    void (*ffn_hidden)(const Ffn&, int64_t first, int64_t count, int t0, int t1, uint8_t* local);
    // Score bits (score >= threshold) of 64 neurons a word: words [word, end) for tokens [0, tokens).
    void (*predict)(const Rows&, const Input&, const float* threshold, int64_t word, int64_t end, int tokens,
                    const Masks&);
    // Writes Input::tiled for a token; null: no tiles.
    void (*tile_input)(const Input&, int token) = nullptr;
    // True if tiles multiply like plain loops, bit by bit: checked once, on small products.
    bool (*tiles_agree)() = nullptr;
};

// Decodes a weight row to floats.
struct RowSums {
    void (*decode_row)(const Rows&, int64_t row, float* out, uint8_t* local);
};

// The sums of FFNs, by groups of outputs.
struct FfnSums {
    // Sums one group of a token over all pieces, to `out`.
    void (*ffn_reduce)(const Ffn&, int tokens, int token, int64_t group, float* out);
    void (*ffn_prompt_down)(const Ffn&, int64_t group, int t0, int t1, uint8_t* local);
};

// The kernels that read no weight rows.
struct FloatKernels {
    void (*quantise)(const Input&, int token);
    void (*arrange)(const Input&, int token);  // plain input of at least kLeastArranged tokens
    void (*attention_split)(const Attention&, const Batch&, int token, int kv_head, int split,
                            uint8_t* local);
    void (*attention_merge)(const Attention&, const Batch&, int token, int kv_head);
    void (*attention_row)(const Attention&, const Batch&, int token, int kv_head, uint8_t* local);
    // Prompt rows [token, end): same result as attention_row; attention_block_scratch must fit.
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

// The kernels of ops that keep a state for each sequence, and other ops of such layers.
// src/hotcold/kernels/state_ops.py specifies them.
struct StateKernels {
    // Channels [first, first + count), at most kConvChannels.
    void (*short_conv)(const ShortConv&, const StateRows&, int64_t first, int64_t count, uint8_t* local);
    void (*gated_delta)(const GatedDelta&, const StateRows&, int64_t head, uint8_t* local);
    void (*ssm_scan)(const SsmScan&, const StateRows&, int64_t head, uint8_t* local);
    void (*decay)(const Decay&, const float* x, float* out);
    // `x`: null means ones.
    void (*multiply)(Gate, const float* x, const float* gate, float* out, int64_t n);
    // Channels [first, first + count), at most kShiftChannels.
    void (*token_shift)(const TokenShift&, const StateRows&, int64_t first, int64_t count, uint8_t* local);
    void (*wkv7)(const Wkv&, const StateRows&, int64_t head, uint8_t* local);
};

struct Kernels : ByteProducts, RowSums, FfnSums, FloatKernels, StateKernels {};

// Each part is compiled once for each instruction set. Parts are constants: no code of an instruction set
// runs before the processor is checked.
extern const ByteProducts products_scalar, products_avx2, products_avxvnni, products_avxvnni_evex,
    products_avx512, products_neon, products_dotprod, products_i8mm, products_amx, products_amx_avx2,
    products_loops_scalar, products_loops_neon;
extern const RowSums row_sums_scalar, row_sums_avx2, row_sums_avx512, row_sums_neon;
extern const FfnSums ffn_sums_scalar, ffn_sums_avx2, ffn_sums_avx512, ffn_sums_neon;
extern const FloatKernels floats_scalar, floats_avx2, floats_avx512, floats_neon;
extern const StateKernels states_scalar, states_avx2, states_avx512, states_neon;

// The instruction sets that this build's compiler knows, best first.
struct KnownIsa {
    const char* name;
    bool runs;               // on this processor
    const Kernels* kernels;  // null: not in this build
};
const std::vector<KnownIsa>& known_isas();

// Why a processor with AMX does not run its kernels; empty if it does, or without AMX.
const std::string& tile_fault();

// Kernels by ISA name; null if this build or this CPU lacks it. "" picks the best. Tests also
// name sets with other tiles: "scalar+loops" has plain loops, "avx2+amx" has AMX with AVX2's vectors.
const Kernels* find_kernels(const char* name);

}  // namespace hc
