// The products of tiles: compiled with the flags of the instruction set that has all other kernels (HC_ISA),
// once for AMX and once as plain loops. HC_TILES names the table.
#include "isa/table.h"
#include "ops/ffn_hidden.h"

namespace hc {

constexpr TileProducts HC_CONCAT(tiles_, HC_TILES) = {Tiles::name, tile_input, product, ffn_hidden};

}  // namespace hc
