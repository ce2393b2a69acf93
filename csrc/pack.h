// A GGUF tensor's bytes -> bytes as the kernels want them: a permutation, nothing is rounded (see kernels.h).
#pragma once
#include "kernels.h"

namespace hc {

// Bytes of a row of `cols` weights, in the file and packed. Throws std::invalid_argument for a bad width.
int64_t row_size(Type type, int64_t cols);

// Packs one row; for float types a copy. `from` and `to` do not overlap.
void pack_row(Type type, const uint8_t* from, int64_t cols, uint8_t* to);

// The layout of the panels of a matrix of `dim` outputs. Throws std::invalid_argument for a float type.
Panels panels_of(Type type, int64_t dim);

// Packs one panel: `from` is its first output's block; further outputs lie `stride` bytes apart.
void pack_panel(Type type, const uint8_t* from, int64_t stride, int64_t dim, uint8_t* to);

}  // namespace hc
