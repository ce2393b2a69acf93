#include "disk/load_batches.h"

#include <chrono>

namespace hc {

void LoadBatches::next(const Disk::GiveUp& give_up) {
    turn();
    const auto start = std::chrono::steady_clock::now();
    if (!await(give_up)) return;
    const auto waited = std::chrono::steady_clock::now() - start;
    ++counts_.stalls;
    counts_.stall_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(waited).count();
}

}  // namespace hc
