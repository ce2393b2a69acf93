// Compiled once for each instruction set: HC_ISA names the table, the compiler's flags allow the
// instructions. One that differs from another by its products of bytes alone has HC_ISA_SHARES, that one's
// name: it takes the other's kernels but these.
#ifndef HC_ISA_SHARES
#include "ops/attention_block.h"
#include "ops/ffn_prompt.h"
#include "ops/ffn_reduce.h"
#include "ops/norm_rope.h"
#include "ops/quantise.h"
#include "ops/router.h"
#include "simd/state_kernels.h"
#endif
#include "ops/ffn_decode.h"
#include "ops/ffn_hidden.h"

namespace hc {
namespace {

#ifdef HC_ISA_SHARES
using Table = ByteProducts;
#else
using Table = Kernels;
#endif

constexpr Table table() {
    Table k{};
    k.name = Vec::name;
    k.product = product;
    k.ffn_piece = ffn_piece;
    k.ffn_hidden = ffn_hidden;
    k.predict = predict;
#ifndef HC_ISA_SHARES
    k.quantise = quantise;
    k.arrange = arrange;
    k.decode_row = decode_row;
    k.add_down = add_down;
    k.ffn_reduce = ffn_reduce;
    k.ffn_prompt_down = ffn_prompt_down;
    k.attention_split = attention_split;
    k.attention_merge = attention_merge;
    k.attention_row = attention_row;
    k.attention_block = attention_block;
    k.router = router;
    k.norm = norm;
    k.rope = rope;
    k.store_row = store_row;
    k.add = add;
    k.softcap = softcap;
    k.relu = relu;
    k.read = read;
    k.states = &HC_CONCAT(states_, HC_ISA);
#endif
    return k;
}

}  // namespace

// Constant, so that no code for this instruction set runs before its processor was looked at.
#ifdef HC_ISA_SHARES
constexpr Table HC_CONCAT(products_, HC_ISA) = table();
#else
constexpr Table HC_CONCAT(kernels_, HC_ISA) = table();
#endif
}  // namespace hc
