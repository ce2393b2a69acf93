// Scratch memory of each thread for the kernel that it runs.
#pragma once
#include <cstddef>

namespace hc {

constexpr size_t kLocalBytes = 2 << 20;

}  // namespace hc
