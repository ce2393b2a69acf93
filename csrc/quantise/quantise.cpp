#include "quantise/quantise.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace hc {
namespace {

constexpr int64_t kPiece = 8192;  // minimum number of weights that a thread takes at a time

// Importance relative to the mean. Columns with importance 0 get a small one, so that their codes make sense.
// Empty if the sum is 0.
std::vector<float> relative_importance(const float* importance, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += double(importance[i]);
    if (!(sum > 0)) return {};
    std::vector<float> w(size_t(n), 0.0f);
    for (int64_t i = 0; i < n; ++i) w[size_t(i)] = float(double(importance[i]) / sum * double(n)) + 1e-7f;
    return w;
}

}  // namespace

const BlockWriter* find_writer(int type, const char* isa) {
    const BlockWriter* writers = writers_plain;
#ifdef HC_HAVE_WRITERS_AVX2
    if (std::strcmp(isa, "scalar"))
        writers = writers_avx2;  // every other instruction set of such a processor includes AVX2
#else
    (void)isa;
#endif
    for (int i = 0; i < kWriters; ++i)
        if (writers[i].type == type) return &writers[i];
    return nullptr;
}

void refuse_value(const char* type, float value) {
    char text[96];
    std::snprintf(text, sizeof text, "value %g does not fit in %s; keep this tensor in F32", double(value),
                  type);
    throw std::invalid_argument(text);
}

void refuse_scale(const char* type, float scale, float bound) {
    char text[96];
    std::snprintf(text, sizeof text, "block scale %g does not fit in %s: less than %g is needed",
                  double(std::fabs(scale)), type, double(bound));
    throw std::invalid_argument(text);
}

void quantise(const BlockWriter& writer, const float* values, const float* importance, int64_t rows,
              int64_t n, uint8_t* out, Pool& pool, const std::function<void()>& check_interrupt) {
    const std::vector<float> weights = importance ? relative_importance(importance, n) : std::vector<float>();
    const float* w = weights.empty() ? nullptr : weights.data();
    const int64_t row_bytes = n / writer.weights * writer.bytes,
                  rows_per_piece = std::max<int64_t>(1, kPiece / n);
    const int64_t pieces = (rows + rows_per_piece - 1) / rows_per_piece;
    pool.run({{[=] { return pieces; },
               [=](int64_t piece, const Scratch&) {
                   const int64_t end = std::min(rows, (piece + 1) * rows_per_piece);
                   for (int64_t row = piece * rows_per_piece; row < end; ++row)
                       writer.row(values + row * n, w, n, out + row * row_bytes);
               }}},
             nullptr, check_interrupt);
}

}  // namespace hc
