// The end of the FFN op's sums: the tree above the pieces, then plain order.
#pragma once
#include "ops/arguments.h"
#include "simd/block_dot.h"

namespace hc {
namespace {

// Writes one group of a token's sums, in axpy's layout, to the output.
inline void write_out(const Ffn& f, int64_t group, const float* sum, float* out) {
    const int64_t n = smaller<int64_t>(kGroup, f.dim() - group * kGroup);
    float plain[kGroup];
    with_type(f.down.type, [&](auto type) {
        using B = decltype(type);
        if constexpr (B::quantised) {
            if (f.panels.neurons)
                unpack_group<TypeBase>(sum, plain, f.down.cols, group);
            else
                unpack_group<B>(sum, plain, f.down.cols, group);
            sum = plain;
        }
    });
    for (int64_t i = 0; i < n; ++i) {
        const float v = f.down_bias ? sum[i] + f.down_bias[group * kGroup + i] : sum[i];
        out[i] = f.accumulate ? out[i] + v : v;
    }
}

// The tree above the pieces, for one group of a token's sums.
class GroupSum {
  public:
    GroupSum(const Ffn& ffn, int token_count, int token_number, int64_t group)
        : f(ffn), tokens(token_count), token(token_number), size(is_quantised(f.down.type) ? kSums : kGroup) {
        from = f.partial + token * sums_of(f.dim()) + group * size;
    }

    // The sum of pieces [first, first + count), a node of 2^n pieces, or null if nothing is added. It is
    // stored in `scratch`, which takes n sums, or is the sum of one piece.
    const float* of(int first, int count, float* scratch) const {
        if (first >= f.pieces(tokens)) return nullptr;
        if (count == 1)
            return f.added[first] >> token & 1 ? from + first * tokens * sums_of(f.dim()) : nullptr;
        const float* a = of(first, count / 2, scratch);
        const float* b = of(first + count / 2, count / 2, a == scratch ? scratch + kSums : scratch);
        if (!a || !b) return a ? a : b;
        for (int i = 0; i < size; i += Vec::width)
            Vec::store(scratch + i, Vec::add(Vec::load(a + i), Vec::load(b + i)));
        return scratch;
    }

  private:
    const Ffn& f;
    const int tokens, token, size;
    const float* from;
};

void ffn_reduce(const Ffn& f, int tokens, int token, int64_t group, float* out) {
    static const float zeros[kSums] = {};
    float scratch[kMaxLevels * kSums];
    const float* sum = GroupSum(f, tokens, token, group).of(0, kMaxLeaves, scratch);
    write_out(f, group, sum ? sum : zeros, out);
}

}  // namespace
}  // namespace hc
