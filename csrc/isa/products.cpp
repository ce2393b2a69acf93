// The kernels of products of bytes. As the other files of kernels, this is compiled once for each instruction
// set: HC_ISA names the parts of its table, and the compiler's flags allow the instructions. An instruction
// set that differs from another only in these products has HC_ISA_SHARES, that one's name: it has no parts
// but this.
#include "isa/table.h"
#include "ops/ffn_decode.h"
#include "ops/ffn_hidden.h"

namespace hc {

constexpr ByteProducts HC_OWN(products) = {Vec::name, product, ffn_piece, ffn_hidden, predict};

}  // namespace hc
