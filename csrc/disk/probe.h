// Measures how fast a file is read in pieces of one size, so many at a time.
#pragma once
#include <cstdint>

#include "disk/reader.h"

namespace hc {

struct DiskProbe {
    int64_t bytes = 0;        // of a piece, in whole blocks of kDiskBlock
    int depth = 1;            // pieces under way at once
    double seconds = 0;       // after which no thread begins another piece
    bool sequential = false;  // one piece after another from the file's beginning; else any, by a fixed draw
    ReadWay way = ReadWay::kBest;
};

struct DiskSpeed {
    double bytes_per_s = 0;
    bool direct = false;  // past the system's cache
};

// std::invalid_argument: no such probe, or the file is shorter than a piece. DiskError: it cannot be read,
// or not in that way.
DiskSpeed probe_disk(int file, const DiskProbe&);

}  // namespace hc
