// Packs a GGUF tensor's bytes for the kernels: a permutation without rounding (see simd/types.h).
#pragma once
#include "simd/types.h"

namespace hc {

// Bytes of a row of `cols` weights, in the file and packed. Throws std::invalid_argument for a bad width.
int64_t row_size(Type type, int64_t cols);

// Packs one row; float types are copied. `from` and `to` must not overlap.
void pack_row(Type type, const uint8_t* from, int64_t cols, uint8_t* to);

// The layout of the panels of a matrix with `dim` outputs. Throws std::invalid_argument for a float type.
Panels panels_of(Type type, int64_t dim);

// Outputs of a panel in whole groups of lanes: their blocks are `stride` bytes apart.
struct Outputs {
    const uint8_t* from;
    int64_t stride;
    int64_t first;  // number of the first output, a multiple of kGroup
    int count;      // at most kGroup; up to the next multiple of kBlock, `from` holds zero blocks
};

// Packs these outputs of one panel to `to`; the matrix has `dim` outputs.
void pack_panel(Type type, const Outputs& outputs, int64_t dim, uint8_t* to);

// Floats of `bytes` bytes: column i of the outputs becomes the values at `to + i * stride`.
void transpose_floats(int bytes, const Outputs& outputs, int64_t columns, uint8_t* to, int64_t stride);

}  // namespace hc
