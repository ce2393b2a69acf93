// Measures the speed of reading a file in pieces of one size, several at a time.
#pragma once
#include <cstdint>

#include "disk/reader.h"

namespace hc {

struct DiskProbe {
    int64_t bytes = 0;        // of a piece, in whole blocks of kDiskBlock
    int depth = 1;            // pieces in flight at once
    double seconds = 0;       // after this time no thread begins another piece
    bool sequential = false;  // from the file's start in order; else in a fixed pseudorandom order
    ReadWay way = ReadWay::kBest;
};

struct DiskSpeed {
    double bytes_per_s = 0;
    bool direct = false;  // reads bypassed the page cache
};

// Throws std::invalid_argument if the probe is invalid or the file is shorter than a piece. Throws DiskError
// if the file cannot be read, or not in this way.
DiskSpeed probe_disk(int file, const DiskProbe&);

}  // namespace hc
