// Linux's io_uring, by its system calls: the kernel reads while this thread packs, several pieces at a time.
#pragma once
#include <memory>

#include "disk/reader.h"

namespace hc {

// A reader with so many reads under way at most; null with errno where the system has none or forbids it,
// as containers do.
std::unique_ptr<Reader> open_ring(int most);

}  // namespace hc
