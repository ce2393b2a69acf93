// Chooses the products that tiles compute.
#pragma once
#include "ops/tile_bytes.h"
#include "ops/tile_halves.h"

namespace hc {
namespace {

// Multiplies rows by tokens [t0, t1) if tiles compute this product; returns true if they do. Tiles of bytes
// multiply quantised rows by 16 tokens or more, with the bits of vectors. Tiles of BF16 numbers multiply any
// number of tokens, as bits must not depend on it: prompt rows as the prompt math says, and all rows by BF16
// weights.
inline bool tile_dots(const SomeRows& rows, const Input& in, int t0, int t1, const Sink& sink,
                      uint8_t* local) {
    if (!in.tiled || !local) return false;
    const bool quantised = is_quantised(rows.rows.type), fast = in.math == kFastMath && !in.decoding;
    const bool split = !in.decoding && in.math == kSplitMath && !quantised;
    if (fast || split || (in.bf16 && rows.rows.type == BF16)) {
        with_type(rows.rows.type, [&](auto type) {
            tile_dots_of_halves<decltype(type)>(rows, in, !fast, t0, t1, sink, (float*)local);
        });
        return true;
    }
    if (!quantised || !in.tiled_codes || t1 - t0 < kLeastTiled) return false;
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
