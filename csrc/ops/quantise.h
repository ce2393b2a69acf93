// Quantises a dot product's input: int8 per 32 values, scale amax / 127, codes rounded to nearest even. The
// steps are float32 exactly as in the reference backend, so the codes agree bit for bit.
#pragma once
#include <cstring>

#include "simd/block_types.h"

namespace hc {
namespace {

constexpr float kSmallestAmax = 0x1p-100f;  // below it 127 / amax could overflow: the block becomes zero

// One block: its codes, its scale (NaN if the block holds a NaN or an infinity), and the sums of all codes
// and of the first half.
struct Codes {
    int8_t code[kBlock];
    float scale;
    int32_t sum, low_sum;
};

inline Codes quantise_block(const float* x) {
    Codes q;
    F m = Vec::zero(), nan = Vec::zero(), total[2] = {Vec::zero(), Vec::zero()};
    for (int i = 0; i < kBlock; i += Vec::width) {
        const F v = Vec::load(x + i);
        m = Vec::max(m, Vec::abs(v));
        nan = Vec::fma(v, Vec::zero(), nan);
    }
    const float poison = Vec::sum(nan);
    float amax = Vec::max_of(m);
    if (!(amax >= kSmallestAmax)) amax = 0;
    const F inverse = Vec::set1(amax > 0 ? 127.0f / amax : 0.0f);
    for (int i = 0; i < kBlock; i += Vec::width) {
        const I code = Vec::to_int(Vec::mul(Vec::load(x + i), inverse));
        Vec::store_i8(q.code + i, code);
        F& half = total[i / (kBlock / 2)];
        half = Vec::add(half, Vec::to_float(code));
    }
    const float low = Vec::sum(total[0]), sum = low + Vec::sum(total[1]);
    q.scale = amax / 127.0f + poison;
    q.sum = poison == 0 ? int32_t(sum) : 0;
    q.low_sum = poison == 0 ? int32_t(low) : 0;
    return q;
}

void quantise(const Input& in, int token) {
    const float* x = in.x + token * in.stride;
    const int64_t blocks = in.cols / kBlock, all = padded(in.cols) / kBlock;
    for (int64_t b = 0; b < all; ++b) {
        const Codes q = b < blocks ? quantise_block(x + b * kBlock) : Codes{};
        // Word w of this lane: + w * 4 * kLanes.
        int8_t* group = in.codes(token) + b / kLanes * kGroup + b % kLanes * 4;
        for (int w = 0; w < kBlock / 4; ++w) std::memcpy(group + w * 4 * kLanes, q.code + 4 * w, 4);
        in.scales(token)[b] = q.scale;
        in.sums(token)[b] = q.sum;
        in.low_sums(token)[b] = q.low_sum;
    }
}

// A row of the KV cache: floats, halves, or blocks of GGML's Q8_0.
void store_row(Type type, const float* x, uint8_t* out, int64_t n) {
    if (type == F32) {
        std::memcpy(out, x, size_t(n) * 4);
    } else if (type == F16) {
        for (int64_t i = 0; i < n; i += Vec::width) {
            const int m = int(smaller<int64_t>(Vec::width, n - i));
            Vec::store_f16((uint16_t*)out + i, Vec::load(x + i, m), m);
        }
    } else {
        for (int64_t i = 0; i < n; i += kBlock, out += kBlock + 2) {
            const Codes q = quantise_block(x + i);
            Vec::store_f16((uint16_t*)out, Vec::set1(q.scale), 1);
            std::memcpy(out + 2, q.code, kBlock);
        }
    }
}

}  // namespace
}  // namespace hc
