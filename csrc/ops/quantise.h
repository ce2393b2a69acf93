// Quantising a dot's input: int8 per 32 values, scale amax / 127, codes rounded to nearest even. The steps
// are float32 exactly as in the reference backend, so the codes agree bit for bit.
#pragma once
#include <cstring>

#include "../block_dot.h"

namespace hc {
namespace {

constexpr float kSmallestAmax = 0x1p-100f;  // below it 127 / amax could overflow: such a block counts as zero

void quantise(const Input& in, int token) {
    const float* x = in.x + token * in.stride;
    int8_t* codes = in.codes(token);
    float* scales = in.scales(token);
    int32_t* sums = in.sums(token);
    const int64_t blocks = in.cols / kBlock, all = padded(in.cols) / kBlock;
    for (int64_t b = 0; b < all; ++b) {
        int8_t* group =
            codes + b / kLanes * kGroup + b % kLanes * 4;  // word w of this lane: + w * 4 * kLanes
        int8_t q[kBlock] = {};
        float amax = 0, poison = 0, sum = 0,
              low = 0;  // poison is NaN when the block holds a NaN or an infinity
        if (b < blocks) {
            F m = Vec::zero(), nan = Vec::zero(), total[2] = {Vec::zero(), Vec::zero()};
            for (int i = 0; i < kBlock; i += Vec::width) {
                const F v = Vec::load(x + b * kBlock + i);
                m = Vec::max(m, Vec::abs(v));
                nan = Vec::fma(v, Vec::zero(), nan);
            }
            amax = Vec::max_of(m), poison = Vec::sum(nan);
            if (!(amax >= kSmallestAmax)) amax = 0;
            const F inverse = Vec::set1(amax > 0 ? 127.0f / amax : 0.0f);
            for (int i = 0; i < kBlock; i += Vec::width) {
                const I code = Vec::to_int(Vec::mul(Vec::load(x + b * kBlock + i), inverse));
                Vec::store_i8(q + i, code);
                F& half = total[i / (kBlock / 2)];
                half = Vec::add(half, Vec::to_float(code));
            }
            low = Vec::sum(total[0]), sum = low + Vec::sum(total[1]);
        }
        for (int w = 0; w < kBlock / 4; ++w) std::memcpy(group + w * 4 * kLanes, q + 4 * w, 4);
        scales[b] = amax / 127.0f + poison;
        sums[b] = poison == 0 ? int32_t(sum) : 0;
        in.low_sums(token)[b] = poison == 0 ? int32_t(low) : 0;
    }
}

// Row `row` as floats, in plain order.
void decode_row(const Rows& rows, int64_t row, float* out, uint8_t* local) {
    const uint8_t* w = rows.row(row);
    const float one = 1.0f;
    Stream none;
    with_type(rows.type, [&](auto type) {
        using B = decltype(type);
        if constexpr (!B::quantised) {
            for (int64_t i = 0; i < rows.cols; ++i) out[i] = 0;
            axpy<B, 1>(&w, &one, rows.cols, out, none);
        } else {
            float* packed = (float*)local;
            for (int64_t i = 0; i < padded(rows.cols); ++i) packed[i] = 0;
            axpy<B, 1>(&w, &one, rows.cols, packed, none);
            for (int64_t g = 0; g * kGroup < rows.cols; ++g)
                unpack_group(packed + g * kGroup, out + g * kGroup, rows.cols, g);
        }
    });
}

}  // namespace
}  // namespace hc
