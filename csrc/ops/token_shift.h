// Mixes each row with the previous row of its sequence, by several shares at once (RWKV).
#pragma once
#include <cstring>

#include "ops/states.h"

namespace hc {
namespace {

void token_shift(const TokenShift& s, const StateRows& rows, int64_t first, int64_t count, uint8_t* local) {
    auto* old = reinterpret_cast<float*>(local);  // a copy, because the state may change
    if (rows.from)
        std::memcpy(old, rows.from + first, size_t(count) * 4);
    else
        clear(old, count);
    const float* before = old;
    for (int64_t t = 0; t < rows.count; ++t) {
        const int64_t at = (rows.first + t) * s.channels + first;
        const float* x = s.x + at;
        for_vectors(count, [&](int64_t i, int m) HC_INLINE_LAMBDA {
            const F x_part = load_part(x + i, m), change = Vec::sub(load_part(before + i, m), x_part);
            for (int j = 0; j < s.count; ++j) {
                const F mix = load_part(s.mixes + j * s.channels + first + i, m);
                store_part(s.outs[j] + at + i, Vec::fma(change, mix, x_part), m);
            }
        });
        before = x;
    }
    if (rows.to) std::memcpy(rows.to + first, before, size_t(count) * 4);
}

}  // namespace
}  // namespace hc
