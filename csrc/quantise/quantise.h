// Packs float rows into the block types of ggml, in the layouts of its ggml-common.h.
#pragma once
#include <cstdint>
#include <functional>

#include "pool/threads.h"
#include "quantise/writers.h"

namespace hc {

// The writer for the instruction set that Kernels call by this name. Null where the type cannot be written.
const BlockWriter* find_writer(int type, const char* isa);

// values [rows, n], importance [n] or null, out [rows, row bytes]. The bytes do not depend on the number of
// threads or on the writer's instruction set. Throws as BlockWriter::row does, and as Pool::run.
void quantise(const BlockWriter&, const float* values, const float* importance, int64_t rows, int64_t n,
              uint8_t* out, Pool&, const std::function<void()>& check_interrupt);

}  // namespace hc
