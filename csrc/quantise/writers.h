// The functions that pack one row of each block type; compiled once for each instruction set.
#pragma once
#include <cstdint>

namespace hc {

// `row` packs n weights, a multiple of a block. `w` has the weight of each squared error; null means equal
// weights. Throws std::invalid_argument for a value that the type cannot hold.
struct BlockWriter {
    int type;  // ggml's number
    int64_t weights, bytes;
    void (*row)(const float* x, const float* w, int64_t n, uint8_t* out);
};

constexpr int kWriters = 18;
extern const BlockWriter writers_plain[kWriters];
extern const BlockWriter writers_avx2[kWriters];

// Refuses a value or block scale that the type cannot hold.
[[noreturn]] void refuse_value(const char* type, float value);
[[noreturn]] void refuse_scale(const char* type, float scale, float bound);

constexpr float kHalfBound = 65520;  // float16 rounds it to infinity

}  // namespace hc
