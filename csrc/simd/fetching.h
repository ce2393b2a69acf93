// The distance at which weights are prefetched.
#pragma once
#include <cstdint>

namespace hc {

// The distance and the cache. The default depends on the processor (fetching.cpp); a benchmark may set
// another while no program runs. It changes no result.
struct Fetching {
    int64_t ahead;  // bytes
    bool into_l2;   // else L1
    bool measured;  // on such a processor
};
extern Fetching fetching;

}  // namespace hc
