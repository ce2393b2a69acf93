// A GGUF tensor's bytes -> bytes as the kernels want them: a permutation, nothing is rounded (see
// simd/types.h).
#pragma once
#include "simd/types.h"

namespace hc {

// Bytes of a row of `cols` weights, in the file and packed. Throws std::invalid_argument for a bad width.
int64_t row_size(Type type, int64_t cols);

// Packs one row; for float types a copy. `from` and `to` do not overlap.
void pack_row(Type type, const uint8_t* from, int64_t cols, uint8_t* to);

// The layout of the panels of a matrix of `dim` outputs. Throws std::invalid_argument for a float type.
Panels panels_of(Type type, int64_t dim);

// Outputs of a panel with whole groups of lanes: their blocks lie `stride` bytes apart.
struct Outputs {
    const uint8_t* from;
    int64_t stride;
    int64_t first;  // number of the first one, a multiple of kGroup
    int count;      // at most kGroup; from here to the next multiple of kBlock, `from` holds blocks of zeros
};

// Packs what these outputs hold of one panel at `to`, of a matrix of `dim` outputs.
void pack_panel(Type type, const Outputs& outputs, int64_t dim, uint8_t* to);

// Floats of `bytes` bytes: column i of the outputs becomes the values at `to + i * stride`.
void transpose_floats(int bytes, const Outputs& outputs, int64_t columns, uint8_t* to, int64_t stride);

}  // namespace hc
