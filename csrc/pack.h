// Rows of a GGUF tensor -> rows as the kernels want them: a permutation of each row's bytes (see kernels.h).
#pragma once
#include "kernels.h"

namespace hc {

// Bytes of a row of `cols` weights, in the file and packed. Throws std::invalid_argument for a bad width.
int64_t row_size(Type type, int64_t cols);

// Packs one row; for float types a copy. `from` and `to` do not overlap.
void pack_row(Type type, const uint8_t* from, int64_t cols, uint8_t* to);

}  // namespace hc
