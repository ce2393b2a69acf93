// The kernels of byte products. Like all kernel files, it is compiled once for each instruction set: HC_ISA
// names its parts of the table, and compiler flags enable the instructions. An instruction set that differs
// from another only in these products has this part alone; HC_ISA_SHARES names the other set.
#include "isa/table.h"
#include "ops/ffn_decode.h"
#include "ops/ffn_hidden.h"

namespace hc {

constexpr ByteProducts HC_OWN(products) = {Vec::name, product, ffn_piece, ffn_hidden, predict};

}  // namespace hc
