// What the files of the op table share: random numbers, weights and their values, a step, and checks.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "isa/table.h"
#include "program/program.h"

namespace op_table {

using namespace hc;

inline std::mt19937 random_bits(7);
inline int failures = 0, checks = 0;
inline bool with_truth = true;                  // or bits alone, for who knows the right ones
inline uint64_t all_bits = 0xcbf29ce484222325;  // FNV-1a

inline float uniform() { return float(random_bits() % 20001) / 10000.0f - 1.0f; }

inline std::vector<float> random_floats(int64_t n) {
    std::vector<float> v(static_cast<size_t>(n));
    for (float& x : v) x = uniform();
    return v;
}

// float16 by hand, for values in its normal range: the kernels' own conversions are under test.
uint16_t to_half(double v);
double from_half(uint16_t h);
double half_at(const uint8_t* p);

// A weight matrix: packed rows for the kernels, and values if there is a truth.
struct Weights {
    Rows rows;
    std::vector<uint8_t> plain, bytes;
    std::vector<double> values;
    double largest = 0;
    double at(int64_t r, int64_t c) const { return values[size_t(r * rows.cols + c)]; }
};

Weights random_weights(Type type, int64_t count, int64_t cols);
// Returns x as a dot with weights of this type sees it.
std::vector<double> seen(Type type, const float* x, int64_t n);
double dot(const Weights& w, int64_t r, const std::vector<double>& x);

inline void note_bits(const std::vector<float>& values) {
    for (float value : values) {
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        all_bits = (all_bits ^ bits) * 0x100000001b3;
    }
}

inline void check(const char* what, int type, int64_t n, double got, double want, double size) {
    ++checks;
    if (std::fabs(got - want) <= 2e-5 * size) return;
    if (failures++ < 20)
        std::printf("%s, type %d, size %d: got %g, want %g\n", what, type, int(n), got, want);
}

inline double magnitude(const std::vector<double>& v) {
    double m = 1e-3;
    for (double x : v) m = std::max(m, std::fabs(x));
    return m;
}

// One sequence whose last `tokens` positions are this step's rows.
struct Step1 {
    std::vector<int32_t> counts, tokens, positions, sequence, slots, pages, lengths, logits;
    Batch batch;
    BatchBounds bounds;
    Step1(int n, int decode, int length) : counts{n, decode, n, 1}, lengths{length} {
        const int pages_needed = (length + kPage - 1) / kPage;
        for (int p = 0; p < pages_needed; ++p) pages.push_back(pages_needed - 1 - p);
        for (int t = 0; t < n; ++t) {
            const int position = length - n + t;
            tokens.push_back(t % 5);
            positions.push_back(position);
            sequence.push_back(0);
            logits.push_back(n - 1 - t);
            slots.push_back(pages[size_t(position / kPage)] * kPage + position % kPage);
        }
        batch = {counts.data(), tokens.data(),  positions.data(), sequence.data(), slots.data(),
                 pages.data(),  lengths.data(), logits.data(),    pages_needed,    nullptr,
                 nullptr,       nullptr,        nullptr};
        bounds = {n, 1, n};
    }
};

// op_table_attention.cpp
void test_attentions(const Kernels& k, std::shared_ptr<Pool> pool);

}  // namespace op_table
