// Packs float rows into ggml's block types, in the layouts of its ggml-common.h.
#pragma once
#include <cstdint>
#include <functional>

#include "pool/threads.h"
#include "quantise/writers.h"

namespace hc {

// The writer for an instruction set, by its name in Kernels. Null if the type cannot be written.
const BlockWriter* find_writer(int type, const char* isa);

// values [rows, n], importance [n] or null, out [rows, row bytes]. The bytes do not depend on the number of
// threads or on the writer's instruction set. Throws as BlockWriter::row and Pool::run do.
void quantise(const BlockWriter&, const float* values, const float* importance, int64_t rows, int64_t n,
              uint8_t* out, Pool&, const std::function<void()>& check_interrupt);

}  // namespace hc
