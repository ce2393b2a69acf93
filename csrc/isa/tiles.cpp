// Products of tiles, for AMX or as plain loops. HC_ISA is the instruction set with all other kernels,
// HC_TILES the name of the table.
#include "isa/table.h"
#include "ops/ffn_hidden.h"

namespace hc {

constexpr TileProducts HC_CONCAT(tiles_, HC_TILES) = {Tiles::name, tile_input, product, ffn_hidden};

}  // namespace hc
