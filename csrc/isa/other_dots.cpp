// Dot products of rows of all other types, and the opening of their rows.
#include "ops/row_dots.h"
#include "simd/open_types.h"

namespace hc {

void HC_OWN(other_dots)(const SomeRows& rows, const Input& in, int t0, int t1, Stream& stream,
                        const Sink& sink, uint8_t* local) {
    with_other_type(rows.rows.type,
                    [&](auto type) { dots_of<decltype(type)>(rows, in, t0, t1, stream, sink, local); });
}

}  // namespace hc
