// Linux's io_uring by system calls: the kernel reads several pieces while this thread packs.
#pragma once
#include <memory>

#include "disk/reader.h"

namespace hc {

// Returns a reader with at most `most` reads in flight; null with errno if the system lacks io_uring or
// forbids it, as containers do.
std::unique_ptr<Reader> open_ring(int most);

}  // namespace hc
