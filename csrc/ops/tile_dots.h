// Which products are computed by tiles: the one place that chooses.
#pragma once
#include "ops/tile_bytes.h"
#include "ops/tile_halves.h"

namespace hc {
namespace {

// Computes dots of rows with tokens [t0, t1), if that is for tiles. -> whether. Tiles of bytes multiply
// quantised rows with 16 tokens or more: the bits are those of vectors. Tiles of BF16 numbers multiply all
// prompt rows for which the prompt math asks for them: their bits must not depend on the number of tokens.
inline bool tile_dots(const SomeRows& rows, const Input& in, int t0, int t1, const Sink& sink,
                      uint8_t* local) {
    if (!in.tiled || !local) return false;
    const bool quantised = is_quantised(rows.rows.type);
    if (in.math == kFastMath || (in.math == kSplitMath && !quantised)) {
        with_type(rows.rows.type, [&](auto type) {
            tile_dots_of_halves<decltype(type)>(rows, in, t0, t1, sink, (float*)local);
        });
        return true;
    }
    if (!quantised || t1 - t0 < kLeastTiled) return false;
    bool fits = false;
    with_type(rows.rows.type, [&](auto type) {
        using B = decltype(type);
        if constexpr (B::quantised) {
            fits = ByteRows<B>::bytes(in.cols) <= kDotScratch;
            if (fits) tile_dots_of_bytes<B>(rows, in, t0, t1, sink, (float*)local);
        }
    });
    return fits;
}

}  // namespace
}  // namespace hc
