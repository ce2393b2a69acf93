// Compiled once for each instruction set; HC_WRITERS names its table.
#include "quantise/writers.h"

#include "quantise/exact.h"
#include "quantise/searched.h"

namespace hc {

const BlockWriter HC_WRITERS[kWriters] = {
    {0, 1, 4, write_f32},       {1, 1, 2, write_f16},       {30, 1, 2, write_bf16},
    {2, 32, 18, write_q4_0},    {3, 32, 20, write_q4_1},    {6, 32, 22, write_q5_0},
    {7, 32, 24, write_q5_1},    {8, 32, 34, write_q8_0},    {10, 256, 84, write_q2_k},
    {11, 256, 110, write_q3_k}, {12, 256, 144, write_q4_k}, {13, 256, 176, write_q5_k},
    {14, 256, 210, write_q6_k}, {20, 32, 18, write_iq4_nl}, {23, 256, 136, write_iq4_xs},
    {34, 256, 54, write_tq1_0}, {35, 256, 66, write_tq2_0}, {39, 32, 17, write_mxfp4},
};

}  // namespace hc
