// Compiled once per ISA: HC_ISA names the table, the compiler's flags allow the instructions.
#include "ops/attention_block.h"
#include "ops/ffn_decode.h"
#include "ops/ffn_prompt.h"
#include "ops/norm_rope.h"
#include "ops/quantise.h"
#include "ops/router.h"
#include "simd/kernels.h"

#define HC_CONCAT_(a, b) a##b
#define HC_CONCAT(a, b) HC_CONCAT_(a, b)

namespace hc {
// clang-format off
const Kernels HC_CONCAT(kernels_, HC_ISA) = {
    Vec::name, quantise, arrange, decode_row, product, ffn_piece, ffn_hidden, ffn_reduce, ffn_prompt_down, predict,
    attention_split, attention_merge, attention_row, attention_block, router, norm, rope, store_row, add, relu, read,
};
// clang-format on
}  // namespace hc
