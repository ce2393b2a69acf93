// Decodes weight rows to floats.
#pragma once
#include "simd/block_dot.h"

namespace hc {
namespace {

// Row `row` as floats, in plain order.
void decode_row(const Rows& rows, int64_t row, float* out, uint8_t* local) {
    const float one = 1.0f;
    Stream none;
    with_type(rows.type, [&](auto type) {
        using B = decltype(type);
        const RowOf<B> w = row_of<B>(rows, row);
        if constexpr (!B::quantised) {
            for (int64_t i = 0; i < rows.cols; ++i) out[i] = 0;
            axpy<B, 1>(&w, &one, rows.cols, out, none);
        } else {
            float* packed = (float*)local;
            for (int64_t i = 0; i < sums_of(rows.cols); ++i) packed[i] = 0;
            axpy<B, 1>(&w, &one, rows.cols, packed, none);
            for (int64_t g = 0; g * kGroup < rows.cols; ++g)
                unpack_group<B>(packed + g * kSums, out + g * kGroup, rows.cols, g);
        }
    });
}

}  // namespace
}  // namespace hc
