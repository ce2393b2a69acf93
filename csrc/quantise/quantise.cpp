#include "quantise/quantise.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <vector>

#include "quantise/half.h"

namespace hc {
namespace {

constexpr BlockWriter kWriters[] = {
    {0, 1, 4, write_f32},       {1, 1, 2, write_f16},       {30, 1, 2, write_bf16},
    {2, 32, 18, write_q4_0},    {3, 32, 20, write_q4_1},    {6, 32, 22, write_q5_0},
    {7, 32, 24, write_q5_1},    {8, 32, 34, write_q8_0},    {39, 32, 17, write_mxfp4},
    {34, 256, 54, write_tq1_0}, {35, 256, 66, write_tq2_0}, {10, 256, 84, write_q2_k},
    {11, 256, 110, write_q3_k}, {12, 256, 144, write_q4_k}, {13, 256, 176, write_q5_k},
    {14, 256, 210, write_q6_k}, {20, 32, 18, write_iq4_nl}, {23, 256, 136, write_iq4_xs},
};

constexpr int64_t kPiece = 8192;  // weights, at least, that a thread takes at a time

// Relative to the mean. A column that counts nothing still counts a little, so that its codes make sense;
// empty where all count alike, or nothing.
std::vector<float> relative_importance(const float* importance, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += double(importance[i]);
    if (!(sum > 0)) return {};
    std::vector<float> w(size_t(n), 0.0f);
    for (int64_t i = 0; i < n; ++i) w[size_t(i)] = float(double(importance[i]) / sum * double(n)) + 1e-7f;
    return w;
}

}  // namespace

const BlockWriter* find_writer(int type) {
    for (const BlockWriter& each : kWriters)
        if (each.type == type) return &each;
    return nullptr;
}

void refuse_scale(const char* type, float scale, float bound) {
    char text[96];
    std::snprintf(text, sizeof text, "block scale %g does not fit in %s: less than %g is needed",
                  double(std::fabs(scale)), type, double(bound));
    throw std::invalid_argument(text);
}

void check_finite(const char* type, const float* x, int64_t n, float bound) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) largest = std::max(largest, bits_of(x[i]) & 0x7fffffff);
    if (largest >= 0x7f800000) refuse_scale(type, float_of(largest), bound);
}

uint16_t half_scale(const char* type, float scale) {
    if (!(std::fabs(scale) < kHalfBound)) refuse_scale(type, scale, kHalfBound);
    return to_half(scale);
}

void put_codes(uint8_t* out, const uint8_t* codes, int bits) {
    for (int i = 0; i < 16; ++i) out[i] = uint8_t((codes[i] & 15) | codes[i + 16] << 4);
    if (bits == 4) return;
    for (int k = 0; k < 4; ++k) {
        int fifth = 0;
        for (int i = 0; i < 8; ++i) fifth |= codes[8 * k + i] >> 4 << i;
        out[k - 4] = uint8_t(fifth);
    }
}

void quantise(const BlockWriter& writer, const float* values, const float* importance, int64_t rows,
              int64_t n, uint8_t* out, Pool& pool, const std::function<void()>& check_interrupt) {
    const std::vector<float> weights = importance ? relative_importance(importance, n) : std::vector<float>();
    const float* w = weights.empty() ? nullptr : weights.data();
    const int64_t row_bytes = n / writer.weights * writer.bytes, together = std::max<int64_t>(1, kPiece / n);
    const int64_t pieces = (rows + together - 1) / together;
    pool.run({{[=] { return pieces; },
               [=](int64_t piece, const Scratch&) {
                   const int64_t end = std::min(rows, (piece + 1) * together);
                   for (int64_t row = piece * together; row < end; ++row)
                       writer.row(values + row * n, w, n, out + row * row_bytes);
               }}},
             nullptr, check_interrupt);
}

}  // namespace hc
