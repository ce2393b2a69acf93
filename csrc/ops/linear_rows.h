// The rows that a product reads, and the place of its results: passed between files of one instruction set.
#pragma once
#include "simd/types.h"

namespace hc {

HC_SMALL int64_t row_bytes(const Rows& rows) { return row_bytes(rows.type, rows.cols); }

// Rows first, first + 1, ..., or the rows in a list.
struct SomeRows {
    Rows rows;
    const int32_t* list;
    int64_t first, count;
    HC_SMALL int64_t number(int64_t r) const { return list ? list[r] : first + r; }
    HC_SMALL const uint8_t* row(int64_t r) const { return rows.row(number(r)); }
    // End of the rows that are known to follow, at most `n` after the last: most likely the same thread's
    // next piece.
    HC_SMALL int64_t known(int64_t n) const {
        const int64_t left = rows.count - first;
        return list ? count : count + n < left ? count + n : left;
    }
};

// Destination of dot products: out[r * row_step + t * token_step] (+)= dot + bias[row].
struct Sink {
    float* out;
    int64_t row_step, token_step;
    const float* bias = nullptr;
    bool accumulate = false;
    HC_SMALL void put(int64_t r, int64_t t, int64_t row, float d) const {
        float* to = out + r * row_step + t * token_step;
        const float v = bias ? d + bias[row] : d;
        *to = accumulate ? *to + v : v;
    }
};

}  // namespace hc
