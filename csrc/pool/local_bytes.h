// The scratch of each thread, which a kernel may use while it runs.
#pragma once
#include <cstddef>

namespace hc {

constexpr size_t kLocalBytes = 2 << 20;

}  // namespace hc
