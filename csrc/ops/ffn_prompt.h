// The FFN op for prompt rows: sums by outputs, of what ffn_hidden.h leaves.
#pragma once
#include "ops/ffn_reduce.h"
#include "ops/leaf_sums.h"

namespace hc {
namespace {

constexpr int kTile = 32;  // neurons decoded at once for a tile of tokens

// The neurons of a tile that count for each token, with their coefficients.
struct TileLists {
    uint64_t any;  // tokens for which any counts, a bit each
    int count[kPromptTile];
    int neuron[kPromptTile][kTile];
    float c[kPromptTile][kTile];

    // h[k * step + t]: n neurons, `tokens` tokens.
    void build(const float* h, int64_t step, int n, int tokens, bool all) {
        for (int t = 0; t < tokens; ++t) count[t] = 0;
        for (int k = 0; k < n; ++k) {
            for (int t = 0; t < tokens; ++t) {
                const int at = count[t];
                neuron[t][at] = k;
                c[t][at] = h[t];
                count[t] = at + (h[t] != 0 || all);
            }
            h += step;
        }
        any = 0;
        for (int t = 0; t < tokens; ++t) any |= uint64_t(count[t] > 0) << t;
    }
};

// acc += c * down over a tile of decoded neurons, for each token: axpy's products, in axpy's order. Scaled
// tiles hold codes whose lanes still want their scale; sums lie as axpy leaves them, those of the factors too
// where it keeps them, or in plain order where none is scaled. A slice of the tile stays in L1 for all
// tokens. Tokens that are not `begun` have no sums yet: theirs begin here.
template <bool Scaled, bool Factors> inline void add_tile(const float* tile, const float* scales,
                                                          const TileLists& lists, int tokens, uint64_t begun,
                                                          float* acc) {
    constexpr int DT = Vec::down_tile;
    for (int l = 0; l < kLanes; l += Vec::width) {
        for (int t = 0; t < tokens && Factors; ++t) {
            if (!lists.count[t]) continue;
            F sum = begun >> t & 1 ? Vec::load(acc + t * kSums + kGroup + l) : Vec::zero();
            for (int k = 0; k < lists.count[t]; ++k)
                sum = Vec::add(sum, Vec::mul(Vec::load(scales + lists.neuron[t][k] * kLanes + l),
                                             Vec::set1(lists.c[t][k])));
            Vec::store(acc + t * kSums + kGroup + l, sum);
        }
        for (int e = 0; e < kBlock; e += DT)
            for (int t = 0; t < tokens; ++t) {
                if (!lists.count[t]) continue;
                float* to = acc + t * kSums + e * kLanes + l;
                F sum[DT];
                if (begun >> t & 1)
                    for (int i = 0; i < DT; ++i) sum[i] = Vec::load(to + i * kLanes);
                else
                    for (F& s : sum) s = Vec::zero();
                for (int k = 0; k < lists.count[t]; ++k) {
                    const int neuron = lists.neuron[t][k];
                    F c = Vec::set1(lists.c[t][k]);
                    if (Scaled) c = Vec::mul(Vec::load(scales + neuron * kLanes + l), c);
                    const float* from = tile + neuron * kGroup + e * kLanes + l;
                    for (int i = 0; i < DT; ++i) sum[i] = Vec::fma(Vec::load(from + i * kLanes), c, sum[i]);
                }
                for (int i = 0; i < DT; ++i) Vec::store(to + i * kLanes, sum[i]);
            }
    }
}

// tile[e * kLanes + l] = fn(P, W, Byte, unit) for the elements of the lanes from l on.
template <class B, class Fn>
HC_INLINE void decode_codes(const I (&unit)[B::units], int l, float* tile, Fn&& fn) {
    unroll<0, B::parts * B::words_per_part * 4>([&](auto j) HC_INLINE_LAMBDA {
        constexpr int Byte = decltype(j)::value % 4, word = decltype(j)::value / 4;
        constexpr int P = word / B::words_per_part, W = word % B::words_per_part;
        Vec::store(tile + (4 * (P + W * B::parts) + Byte) * kLanes + l,
                   fn(Constant<P>{}, Constant<W>{}, Constant<Byte>{}, unit));
    });
}

// Decodes one group of one down row: codes and, apart, the lanes' scales, where there is one per block; else
// weights.
template <class B>
inline void decode_group(const RowOf<B>& row, int64_t cols, int64_t group, float* tile, float* scales) {
    if (cols < (group + 1) * kGroup)
        for (int i = 0; i < kGroup; i += Vec::width) Vec::store(tile + i, Vec::zero());
    if constexpr (B::quantised) {
        const int64_t blocks = cols / kBlock, block = group * kLanes;
        Room<B, 1> room;
        for_lanes(blocks, block, [&](int lanes, int l, int n) HC_INLINE_LAMBDA {
            const Group<B> from = group_of<B>(row, blocks, block, lanes, l, room);
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
        const int64_t n = smaller<int64_t>(kGroup, cols - group * kGroup);
        for (int64_t i = 0; i < n; i += Vec::width) {
            const int m = int(smaller<int64_t>(Vec::width, n - i));
            Vec::store(tile + i, B::load(row, group * kGroup + i, m), m);
        }
    }
}

// Decodes one group of a panel's run: `tile` gets a row of codes for each neuron, then one of scales and one
// of minima.
template <class B> void decode_panel(const Ffn& f, int64_t first, int64_t group, float* tile) {
    const int64_t blocks = f.down.cols / kBlock, block = group * kLanes;
    const int rows = scale_run(f.down.type), run = int(first % f.panels.neurons) / rows;
    const auto decode = [&](auto p, auto w, auto byte, const I* unit) HC_INLINE_LAMBDA {
        return code<B, decltype(p)::value, decltype(w)::value, decltype(byte)::value, false>(unit);
    };
    for_lanes(blocks, block, [&](int lanes, int l, int n) HC_INLINE_LAMBDA {
        for (int k = 0; k < rows; ++k) {
            I unit[B::units];
            load_units<B::units>(down_row(f, first + k) + block * 4 * B::units + 4 * l, lanes, n, unit);
            decode_codes<B>(unit, l, tile + k * kGroup, decode);
        }
        for (int e = 0; e < kBlock; ++e) {
            const int64_t at = block * kBlock + e * lanes + l;
            const Head head = panel_head<B>({panel_of(f, first), f.down.cols, at, n}, run);
            Vec::store(tile + rows * kGroup + e * kLanes + l, head.scale);
            Vec::store(tile + (rows + 1) * kGroup + e * kLanes + l, head.minimum);
        }
    });
}

// Does for many tokens what panel_axpy does for one: a tile of `rows` neurons as decode_panel leaves it.
template <class B>
void add_panel(const float* tile, int rows, const TileLists& lists, int tokens, uint64_t begun, float* acc) {
    constexpr int DT = Vec::down_tile;
    const float *scales = tile + rows * kGroup, *minima = scales + kGroup;
    for (int l = 0; l < kLanes; l += Vec::width)
        for (int e = 0; e < kBlock; e += DT)
            for (int t = 0; t < tokens; ++t) {
                if (!lists.count[t]) continue;
                F sum[DT], total = Vec::zero();
                for (F& s : sum) s = Vec::zero();
                for (int k = 0; k < lists.count[t]; ++k) {
                    const F c = Vec::set1(lists.c[t][k]);
                    const float* from = tile + lists.neuron[t][k] * kGroup + e * kLanes + l;
                    for (int i = 0; i < DT; ++i) sum[i] = Vec::fma(Vec::load(from + i * kLanes), c, sum[i]);
                    if constexpr (B::has_minimum || B::offset > 0) total = Vec::add(total, c);
                }
                for (int i = 0; i < DT; ++i) {
                    const int at = (e + i) * kLanes + l;
                    float* to = acc + t * kSums + at;
                    const Head head{Vec::load(scales + at), Vec::zero(), Vec::load(minima + at)};
                    const F before = begun >> t & 1 ? Vec::load(to) : Vec::zero();
                    Vec::store(to, add_run<B>(sum[i], 1, total, head, before));
                }
            }
}

template <class B> constexpr bool tile_is_scaled() {
    if constexpr (B::quantised)
        return one_scale<B>;
    else
        return false;
}

// Brings one group of rows [first, end) into L2: slices of rows that lie far apart, which no hardware
// foresees.
template <class B> inline void fetch_groups(const Ffn& f, int64_t group, int64_t first, int64_t end) {
    const Rows& rows = f.down;
    for (int64_t i = first; i < end; ++i) {
        int64_t at = group * kGroup * row_bytes(rows) / rows.cols;
        int64_t bytes = kGroup * row_bytes(rows) / rows.cols;
        if constexpr (B::quantised && !B::opened) {
            const int64_t head = B::header_quarters * kLanes / 4;
            at = codes_of<B>(f.panels.neurons ? 0 : rows.cols / kBlock, group * kLanes);
            bytes -= head;
            if (!f.panels.neurons) Vec::prefetch_l2(rows.row(i) + group * head);
        }
        for (int64_t b = 0; b < bytes; b += 64) Vec::prefetch_l2(down_row(f, i) + at + b);
    }
}

// Adds what the neurons of one leaf add to one group of outputs.
template <class B> void add_leaf(const Ffn& f, int64_t leaf, int64_t group, int t0, int tokens, float* tile,
                                 TileLists& lists, LeafSums& sums) {
    float* scales = tile + kTile * kGroup;
    const int rows = f.panels.neurons ? scale_run(f.down.type) : kTile;
    const int64_t end = f.leaf_begin(leaf + 1);
    for (int64_t first = f.leaf_begin(leaf); first < end; first += rows) {
        const int n = int(smaller<int64_t>(rows, end - first));
        fetch_groups<B>(f, group, first + n, smaller(first + n + rows, f.neurons()));
        lists.build(f.hidden + first * f.hidden_tokens + t0, f.hidden_tokens, n, tokens,
                    !can_skip(f.activation));
        if (!lists.any) continue;
        const uint64_t begun = sums.added();
        sums.add(lists.any);
        if constexpr (B::quantised && !B::opened)
            if (f.panels.neurons) {
                decode_panel<B>(f, first, group, tile);
                add_panel<B>(tile, rows, lists, tokens, begun, sums.current());
                continue;
            }
        for (int k = 0; k < n; ++k)
            decode_group<B>(row_of<B>(f.down, first + k), f.dim(), group, tile + k * kGroup,
                            scales + k * kLanes);
        add_tile<tile_is_scaled<B>(), sums_factors<B>()>(tile, scales, lists, tokens, begun, sums.current());
    }
}

// One group of outputs for tokens [t0, t1), leaf by leaf as the decode rows sum them.
void ffn_prompt_down(const Ffn& f, int64_t group, int t0, int t1, uint8_t* local) {
    const int tokens = t1 - t0;
    int levels = 0;
    while (1 << levels < f.leaves()) ++levels;
    const int64_t sizes = tokens * kSums;
    float *root = (float*)local, *room = root + sizes, *tile = room + levels * sizes;
    TileLists& lists = *(TileLists*)(tile + (kTile + 2) * kGroup);
    // Sums of the factors, which some types do not keep.
    for (int64_t row = 0; row < (levels + 1) * tokens; ++row)
        for (int i = kGroup; i < kSums; ++i) root[row * kSums + i] = 0;
    LeafSums sums(root, room, levels, tokens, kSums);
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
