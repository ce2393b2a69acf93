// Fills weights from a tensor, in memory or in an open file, on the pool's threads: each reads a piece and
// packs it while it is in its cache.
#pragma once
#include <functional>

#include "pool/threads.h"
#include "simd/types.h"

namespace hc {

// A tensor as a file stores it, [rows, row_bytes], in memory or in a file.
struct Source {
    const uint8_t* data = nullptr;
    int file = -1;       // descriptor, if data is null
    int64_t offset = 0;  // of the tensor in the file
    int64_t rows = 0, row_bytes = 0;
    int64_t first = 0;  // the first row of `data`
    // The wanted rows (by output: columns, counted in blocks), ascending; null for all.
    const int64_t* chosen = nullptr;
};

// The destination. By output, columns become rows: of panels if the type is quantised.
struct Target {
    Rows rows;
    Panels panels;
    bool by_output;
    uint8_t* base() const { return const_cast<uint8_t*>(rows.base); }
};

constexpr int kEnded = -1;  // the file ended early

// Returns 0 or the error of a read: errno, or kEnded. `check_interrupt` as in Pool::run. Throws
// std::invalid_argument for rows that are too wide.
int fill(const Target&, const Source&, Pool&, const std::function<void()>& check_interrupt);

// Fills rows [from.first, end) of a tensor in memory, on this thread. By output, from.first is a multiple of
// kGroup, and so is `end` unless it ends the tensor. `local` has kLocalBytes.
void fill_rows(const Target&, const Source& from, int64_t end, uint8_t* local);

}  // namespace hc
