// The FFN op for prompt rows: sums by outputs of the hidden values of ffn_hidden.h.
#pragma once
#include <cstring>
#if defined(_MSC_VER)
#include <intrin.h>
#endif

#include "ops/down_rows.h"
#include "ops/ffn_reduce.h"
#include "ops/leaf_sums.h"
#include "ops/linear_rows.h"

namespace hc {
namespace {

constexpr int kTile = 32;  // neurons decoded at once for a tile of tokens

// A tile is stored by slices of a group, with all neurons adjacent: the tokens read one slice from a few
// whole lines in all sets of L1. (A neuron's groups are 2 KB apart, in two of its sets.)
constexpr int kSlice = Vec::down_tile * Vec::width, kSlices = kGroup / kSlice;
static_assert(kGroup % kSlice == 0 && kSlice % kLanes == 0, "whole elements of all lanes");
// Position of float i of a neuron's group, from the neuron's first float.
constexpr int in_tile(int i) { return i / kSlice * kTile * kSlice + i % kSlice; }

inline int lowest_bit(uint32_t bits) {
#if defined(_MSC_VER)
    unsigned long at;
    _BitScanForward(&at, bits);
    return int(at);
#else
    return __builtin_ctz(bits);
#endif
}
// Calls fn(k) for the set bits, ascending.
template <class Fn> HC_INLINE void for_bits(uint32_t bits, Fn&& fn) {
    for (; bits; bits &= bits - 1) fn(lowest_bit(bits));
}

// The neurons of a tile that count for each token, with their coefficients.
struct TileLists {
    uint64_t any;   // tokens for which any neuron counts, a bit each
    uint32_t used;  // neurons that count for any token, a bit each
    int count[kPromptTile];
    int neuron[kPromptTile][kTile];
    float c[kPromptTile][kTile];

    // h[k * step + t]: n neurons, `tokens` tokens.
    void build(const float* h, int64_t step, int n, int tokens, bool all) {
        any = used = 0;
        for (int t = 0; t < tokens; t += Vec::width) {
            const int lanes = smaller(Vec::width, tokens - t);
            uint32_t counts[Vec::width];
            find(h + t, step, n, lanes, counts);
            for (int i = 0; i < lanes; ++i) list(t + i, h + t + i, step, all ? ~0u >> (32 - n) : counts[i]);
        }
    }

  private:
    // Sets bit k of to[t] if h[k * step + t] is not 0, including NaN, whatever its sign.
    static void find(const float* h, int64_t step, int n, int tokens, uint32_t (&to)[Vec::width]) {
        I nonzero = Vec::zero_i();
        for (int k = n; k-- > 0;) {
            const float* at = h + k * step;
            const I bits = tokens == Vec::width ? Vec::load_i(at) : Vec::load_i(at, tokens);
            const I size = Vec::bit_and(bits, Vec::set1_i(0x7fffffff));
            nonzero = Vec::bit_or(Vec::shl<1>(nonzero), Vec::shr<31>(Vec::sub_i(Vec::zero_i(), size)));
        }
        float stored[Vec::width];
        Vec::store(stored, Vec::as_float(nonzero));
        std::memcpy(to, stored, sizeof to);
    }
    void list(int t, const float* h, int64_t step, uint32_t counts) {
        any |= uint64_t(counts != 0) << t;
        used |= counts;
        int n = 0;
        for_bits(counts, [&](int k) HC_INLINE_LAMBDA {
            neuron[t][n] = k;
            c[t][n++] = h[k * step];
        });
        count[t] = n;
    }
};

// The same group of the next rows. The hardware prefetcher cannot predict it, because it is a slice of
// distant rows. Each slice of a tile brings a share of the rows into L2.
struct NextGroups {
    const uint8_t *codes, *heads;  // of the first row; heads may be null
    int64_t step, code_bytes, head_bytes, rows;

    void fetch(int slice) const {
        for (int64_t i = rows * slice / kSlices; i < rows * (slice + 1) / kSlices; ++i) {
            for (int64_t b = 0; b < code_bytes; b += 64) Vec::prefetch_l2(codes + i * step + b);
            for (int64_t b = 0; b < head_bytes; b += 64) Vec::prefetch_l2(heads + i * step + b);
        }
    }
    void fetch_all() const {
        for (int slice = 0; slice < kSlices; ++slice) fetch(slice);
    }
};

// acc += c * down over a tile of decoded neurons, for each token: axpy's products, in axpy's order. Scaled
// tiles hold codes whose lanes are not yet scaled. Sums have axpy's layout, with the sums of factors if axpy
// keeps them, or plain order if nothing is scaled. Tokens that are not `begun` have no sums yet: they begin
// here.
template <bool Scaled, bool Factors> inline void add_tile(const float* tile, const float* scales,
                                                          const TileLists& lists, int tokens, uint64_t begun,
                                                          float* acc, const NextGroups& next) {
    constexpr int DT = Vec::down_tile, S = kLanes / Vec::width;
    for (int l = 0; l < kLanes; l += Vec::width) {
        for (int t = 0; t < tokens && Factors; ++t) {
            if (!lists.count[t]) continue;
            F sum = begun >> t & 1 ? Vec::load(acc + t * kSums + kGroup + l) : Vec::zero();
            for (int k = 0; k < lists.count[t]; ++k)
                sum = Vec::add(sum, Vec::mul(Vec::load(scales + lists.neuron[t][k] * kLanes + l),
                                             Vec::set1(lists.c[t][k])));
            Vec::store(acc + t * kSums + kGroup + l, sum);
        }
    }
    for (int slice = 0; slice < kSlices; ++slice, tile += kTile * kSlice, acc += kSlice) {
        next.fetch(slice);
        for (int t = 0; t < tokens; ++t) {
            if (!lists.count[t]) continue;
            float* to = acc + t * kSums;
            F sum[DT];
            if (begun >> t & 1)
                for (int i = 0; i < DT; ++i) sum[i] = Vec::load(to + i * Vec::width);
            else
                for (F& s : sum) s = Vec::zero();
            for (int k = 0; k < lists.count[t]; ++k) {
                const int neuron = lists.neuron[t][k];
                const float* from = tile + neuron * kSlice;
                F c[S];
                for (int i = 0; i < S; ++i) {
                    c[i] = Vec::set1(lists.c[t][k]);
                    if (Scaled) c[i] = Vec::mul(Vec::load(scales + neuron * kLanes + i * Vec::width), c[i]);
                }
                for (int i = 0; i < DT; ++i)
                    sum[i] = Vec::fma(Vec::load(from + i * Vec::width), c[i % S], sum[i]);
            }
            for (int i = 0; i < DT; ++i) Vec::store(to + i * Vec::width, sum[i]);
        }
    }
}

// Stores the results of fn(P, W, Byte, unit) for the lanes from l on to their places in the tile of a neuron.
template <class B, class Fn>
HC_INLINE void decode_codes(const I (&unit)[B::units], int l, float* tile, Fn&& fn) {
    unroll<0, B::parts * B::words_per_part * 4>([&](auto j) HC_INLINE_LAMBDA {
        constexpr int Byte = decltype(j)::value % 4, word = decltype(j)::value / 4;
        constexpr int P = word / B::words_per_part, W = word % B::words_per_part;
        Vec::store(tile + in_tile((4 * (P + W * B::parts) + Byte) * kLanes) + l,
                   fn(Constant<P>{}, Constant<W>{}, Constant<Byte>{}, unit));
    });
}

// Decodes one group of one down row: codes and, separately, the lanes' scales if each block has one scale;
// else weights.
template <class B>
inline void decode_group(const RowOf<B>& row, int64_t cols, int64_t group, float* tile, float* scales) {
    if (cols < (group + 1) * kGroup)
        for (int i = 0; i < kGroup; i += Vec::width) Vec::store(tile + in_tile(i), Vec::zero());
    if constexpr (B::quantised) {
        const int64_t blocks = cols / kBlock, block = group * kLanes;
        GroupScratch<B, 1> scratch;
        for_lanes(blocks, block, [&](int lanes, int l, int n) HC_INLINE_LAMBDA {
            const Group<B> from = group_of<B>(row, blocks, block, lanes, l, scratch);
            const Head head = from.head(l, n);
            Vec::store(scales + l, head.scale);
            const auto decode = [&](auto p, auto w, auto byte, const I* unit) HC_INLINE_LAMBDA {
                constexpr int P = decltype(p)::value, W = decltype(w)::value, Byte = decltype(byte)::value;
                if constexpr (one_scale<B>)
                    return B::template value<P, W, Byte>(unit);
                else
                    return weight<B, P, W, Byte>(unit, head);
            };
            I unit[B::units];
            from.load(l, n, unit);
            decode_codes<B>(unit, l, tile, decode);
        });
    } else {
        const int n = int(smaller<int64_t>(kGroup, cols - group * kGroup));
        for (int i = 0; i < n; i += Vec::width) {
            const int m = smaller(Vec::width, n - i);
            Vec::store(tile + in_tile(i), B::load(row, group * kGroup + i, m), m);
        }
    }
}

// Decodes one group of a panel's run: codes of the `used` neurons, a bit each, to `tile`, and the scales and
// any minima of all outputs.
template <class B>
void decode_panel(const Ffn& f, int64_t first, int64_t group, uint32_t used, float* tile, float* scales) {
    const int64_t blocks = f.down.cols / kBlock, block = group * kLanes;
    const int run = int(first % f.panels.neurons) / scale_run(f.down.type);
    float* minima = scales + kGroup;
    const auto decode = [&](auto p, auto w, auto byte, const I* unit) HC_INLINE_LAMBDA {
        return code<B, decltype(p)::value, decltype(w)::value, decltype(byte)::value, false>(unit);
    };
    for_lanes(blocks, block, [&](int lanes, int l, int n) HC_INLINE_LAMBDA {
        for_bits(used, [&](int k) HC_INLINE_LAMBDA {
            I unit[B::units];
            load_units<B::units>(down_row(f, first + k) + block * 4 * B::units + 4 * l, lanes, n, unit);
            decode_codes<B>(unit, l, tile + k * kSlice, decode);
        });
        for (int e = 0; e < kBlock; ++e) {
            const int64_t at = block * kBlock + e * lanes + l;
            const Head head = panel_head<B>({panel_of(f, first), f.down.cols, at, n}, run);
            Vec::store(scales + e * kLanes + l, head.scale);
            if constexpr (B::has_minimum) Vec::store(minima + e * kLanes + l, head.minimum);
        }
    });
}

// Does for many tokens what panel_axpy does for one, with a tile from decode_panel.
template <class B> void add_panel(const float* tile, const float* scales, const TileLists& lists, int tokens,
                                  uint64_t begun, float* acc, const NextGroups& next) {
    constexpr int DT = Vec::down_tile;
    for (int slice = 0; slice < kSlices; ++slice, tile += kTile * kSlice, scales += kSlice, acc += kSlice) {
        next.fetch(slice);
        for (int t = 0; t < tokens; ++t) {
            if (!lists.count[t]) continue;
            F sum[DT], total = Vec::zero();
            for (F& s : sum) s = Vec::zero();
            for (int k = 0; k < lists.count[t]; ++k) {
                const F c = Vec::set1(lists.c[t][k]);
                const float* from = tile + lists.neuron[t][k] * kSlice;
                for (int i = 0; i < DT; ++i) sum[i] = Vec::fma(Vec::load(from + i * Vec::width), c, sum[i]);
                if constexpr (B::has_minimum || B::offset > 0) total = Vec::add(total, c);
            }
            float* to = acc + t * kSums;
            for (int i = 0; i < DT; ++i) {
                const int at = i * Vec::width;
                const F minimum = B::has_minimum ? Vec::load(scales + kGroup + at) : Vec::zero();
                const Head head{Vec::load(scales + at), Vec::zero(), minimum};
                const F before = begun >> t & 1 ? Vec::load(to + at) : Vec::zero();
                Vec::store(to + at, add_run<B>(sum[i], 1, total, head, before));
            }
        }
    }
}

template <class B> constexpr bool tile_is_scaled() {
    if constexpr (B::quantised)
        return one_scale<B>;
    else
        return false;
}

// One group of rows [first, end), all in one panel.
template <class B> inline NextGroups next_groups(const Ffn& f, int64_t group, int64_t first, int64_t end) {
    const Rows& rows = f.down;
    if (first >= end) return {nullptr, nullptr, 0, 0, 0, 0};
    const int64_t bytes = kGroup * row_bytes(rows) / rows.cols, count = end - first;
    if constexpr (B::quantised && !B::opened) {
        constexpr int64_t head = B::header_quarters * kLanes / 4;
        const int64_t at = codes_of<B>(f.panels.neurons ? 0 : rows.cols / kBlock, group * kLanes);
        if (f.panels.neurons) return {down_row(f, first) + at, nullptr, f.panels.row, bytes - head, 0, count};
        return {rows.row(first) + at, rows.row(first) + group * head, rows.stride, bytes - head, head, count};
    }
    return {rows.row(first) + group * bytes, nullptr, rows.stride, bytes, 0, count};
}

// Adds the neurons of one leaf to one group of outputs.
template <class B> void add_leaf(const Ffn& f, int64_t leaf, int64_t group, int t0, int tokens, float* tile,
                                 TileLists& lists, LeafSums& sums) {
    float* scales = tile + kTile * kGroup;
    const int rows = f.panels.neurons ? scale_run(f.down.type) : kTile;
    const int64_t end = f.leaf_begin(leaf + 1);
    for (int64_t first = f.leaf_begin(leaf); first < end; first += rows) {
        const int n = int(smaller<int64_t>(rows, end - first));
        const NextGroups next = next_groups<B>(f, group, first + n, smaller(first + n + rows, f.neurons()));
        lists.build(f.hidden + first * f.hidden_tokens + t0, f.hidden_tokens, n, tokens,
                    !can_skip(f.activation));
        if (!lists.any) {
            next.fetch_all();
            continue;
        }
        const uint64_t begun = sums.added();
        sums.add(lists.any);
        if constexpr (B::quantised && !B::opened)
            if (f.panels.neurons) {
                decode_panel<B>(f, first, group, lists.used, tile, scales);
                add_panel<B>(tile, scales, lists, tokens, begun, sums.current(), next);
                continue;
            }
        for_bits(lists.used, [&](int k) HC_INLINE_LAMBDA {
            decode_group<B>(row_of<B>(f.down, first + k), f.dim(), group, tile + k * kSlice,
                            scales + k * kLanes);
        });
        add_tile<tile_is_scaled<B>(), sums_factors<B>()>(tile, scales, lists, tokens, begun, sums.current(),
                                                         next);
    }
}

// One group of outputs for tokens [t0, t1), leaf by leaf in the order of decode rows.
void ffn_prompt_down(const Ffn& f, int64_t group, int t0, int t1, uint8_t* local) {
    const int tokens = t1 - t0;
    int levels = 0;
    while (1 << levels < f.leaves()) ++levels;
    const int64_t sizes = tokens * kSums;
    float *root = (float*)local, *scratch = root + sizes, *tile = scratch + levels * sizes;
    TileLists& lists = *(TileLists*)(tile + (kTile + 2) * kGroup);
    // Sums of the factors, which some types do not keep.
    for (int64_t row = 0; row < (levels + 1) * tokens; ++row)
        for (int i = kGroup; i < kSums; ++i) root[row * kSums + i] = 0;
    LeafSums sums(root, scratch, levels, tokens, kSums);
    with_type(f.down.type, [&](auto type) {
        for (int leaf = 0; leaf < f.leaves(); ++leaf) {
            add_leaf<decltype(type)>(f, leaf, group, t0, tokens, tile, lists, sums);
            sums.end_leaf();
        }
    });
    const uint64_t added = sums.end();
    for (int t = 0; t < tokens; ++t) {
        float* sum = root + t * kSums;
        if (!(added >> t & 1))
            for (int i = 0; i < kSums; ++i) sum[i] = 0;
        write_out(f, group, sum, f.out + (t0 + t) * f.dim() + group * kGroup);
    }
}

}  // namespace
}  // namespace hc
