// Packs float rows into the block types of ggml, in the layouts of its ggml-common.h.
#pragma once
#include <cstdint>
#include <functional>

#include "pool/threads.h"

namespace hc {

// `row` packs n weights, a multiple of a block; w has how much each one's squared error counts, null for
// alike. It throws std::invalid_argument for a value that the type cannot hold.
struct BlockWriter {
    int type;  // ggml's number
    int64_t weights, bytes;
    void (*row)(const float* x, const float* w, int64_t n, uint8_t* out);
};

// Null where the type cannot be written.
const BlockWriter* find_writer(int type);

// values [rows, n], importance [n] or null, out [rows, row bytes]. The bytes do not depend on the number of
// threads. Throws as BlockWriter::row does, and as Pool::run.
void quantise(const BlockWriter&, const float* values, const float* importance, int64_t rows, int64_t n,
              uint8_t* out, Pool&, const std::function<void()>& check_interrupt);

// Rows of the types that have one way of being written, and of those whose scales are searched for.
using RowWriter = void(const float* x, const float* w, int64_t n, uint8_t* out);
RowWriter write_f32, write_f16, write_bf16, write_q8_0, write_q4_0, write_q4_1, write_q5_0, write_q5_1,
    write_mxfp4, write_tq1_0, write_tq2_0;
RowWriter write_q2_k, write_q3_k, write_q4_k, write_q5_k, write_q6_k, write_iq4_nl, write_iq4_xs;
// What write_q4_0, ... do where w is given.
RowWriter search_q4_0, search_q4_1, search_q5_0, search_q5_1;

// Refuses a value whose scale, or itself, the type cannot hold.
[[noreturn]] void refuse_scale(const char* type, float scale, float bound);
// Throws for a row that holds a NaN or an infinity.
void check_finite(const char* type, const float* x, int64_t n, float bound);

constexpr float kHalfBound = 65520;  // float16 rounds it to infinity
// The scale as float16; refused where that is infinite.
uint16_t half_scale(const char* type, float scale);
// Codes 0..31 of 32 weights: the lower four bits of the first 16 in the low halves of 16 bytes; the fifth
// bits of all in the four bytes before these.
void put_codes(uint8_t* out, const uint8_t* codes, int bits);

}  // namespace hc
