// The kernels of byte products. Like all kernel files, it is compiled once for each instruction set: HC_ISA
// names its parts of the table, and compiler flags enable the instructions. An instruction set that differs
// from another only in these products has this part alone; HC_ISA_SHARES names the other set. HC_TILES names
// a part whose products use tiles, with all other kernels of HC_ISA.
#include "isa/table.h"
#include "ops/ffn_decode.h"
#include "ops/ffn_hidden.h"

namespace hc {

#ifdef HC_TILES
constexpr ByteProducts HC_CONCAT(products_, HC_TILES) = {Tiles::name, product,    ffn_piece,  ffn_hidden,
                                                         predict,     tile_input, tiles_agree};
#else
constexpr ByteProducts HC_OWN(products) = {Vec::name, product, ffn_piece, ffn_hidden, predict};
#endif

}  // namespace hc
