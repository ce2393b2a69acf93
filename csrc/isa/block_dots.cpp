// Dot products of rows of types with blocks of 32 weights.
#include "ops/row_dots.h"

namespace hc {

void HC_OWN(block_dots)(const SomeRows& rows, const Input& in, int t0, int t1, Stream& stream,
                        const Sink& sink, uint8_t* local) {
    with_block_type(rows.rows.type,
                    [&](auto type) { dots_of<decltype(type)>(rows, in, t0, t1, stream, sink, local); });
}

}  // namespace hc
