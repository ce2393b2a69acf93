// The FFN op: dense, exact and predicted, for decode rows (cut by neurons) and prompt rows (cut by outputs).
#pragma once
#include <cstring>

#include "activation.h"
#include "linear.h"

namespace hc {
namespace {

constexpr int kChunk = 32;      // the most neurons whose up rows are read before their down rows are added
constexpr int kRowsAtOnce = 8;  // of these where down lies in rows: enough to fetch ahead

// Where the panel of a neuron begins, and its row of down or of codes there.
inline const uint8_t* panel_of(const Ffn& f, int64_t neuron) {
    return f.down.base + neuron / f.panels.neurons * f.panels.bytes();
}
inline const uint8_t* down_row(const Ffn& f, int64_t neuron) {
    if (!f.panels.neurons) return f.down.row(neuron);
    return panel_of(f, neuron) + f.panels.header + neuron % f.panels.neurons * f.panels.row;
}

inline bool named(const Ffn& f, int token, int64_t neuron) {
    return !f.mask || (f.mask[token * f.words() + neuron / 64] >> (neuron % 64) & 1);
}

// Neurons of [begin, end) that any token's mask names, ascending.
inline int64_t candidates(const Ffn& f, int tokens, int64_t begin, int64_t end, int32_t* list) {
    int64_t count = 0;
    for (int64_t word = begin / 64; word * 64 < end; ++word) {
        uint64_t any = f.mask ? 0 : ~uint64_t(0);
        if (f.mask)
            for (int t = 0; t < tokens; ++t) any |= f.mask[t * f.words() + word];
        for (int64_t i = word * 64; any && i < end; ++i, any >>= 1)
            if (any & 1) list[count++] = int32_t(i);
    }
    return count;
}

// y += c[k] * down[neurons[k]], in ascending order; in panels, the neurons of one run. At least one.
void add_down(const Ffn& f, const int32_t* neurons, const float* c, int count, float* y, Stream& ahead) {
    const uint8_t* rows[kChunk];
    for (int k = 0; k < count; ++k) rows[k] = down_row(f, neurons[k]);
    with_type(f.down.type, [&](auto type) {
        using B = decltype(type);
        if constexpr (B::quantised)
            if (f.panels.neurons) {
                const int run = int(neurons[0] % f.panels.neurons) / scale_run(f.down.type);
                return panel_axpy<B>({panel_of(f, neurons[0]), run, rows, c, count, f.down.cols / kBlock}, y,
                                     ahead);
            }
        int k = 0;
        for (; k + 4 <= count; k += 4) axpy<B, 4>(rows + k, c + k, f.down.cols, y, ahead);
        if (k + 2 <= count) axpy<B, 2>(rows + k, c + k, f.down.cols, y, ahead), k += 2;
        if (k < count) axpy<B, 1>(rows + k, c + k, f.down.cols, y, ahead);
    });
}

// Whether two neurons of a panel share scales: what they add is summed before it is scaled.
inline bool same_run(const Ffn& f, int64_t a, int64_t b) {
    return a / scale_run(f.down.type) == b / scale_run(f.down.type);
}

// Neurons of the chunk that begins a list: a few rows, or those of one run of a panel.
inline int chunk_of(const Ffn& f, const int32_t* list, int64_t count) {
    if (!f.panels.neurons) return int(smaller<int64_t>(kRowsAtOnce, count));
    int n = 1;
    while (n < count && same_run(f, list[0], list[n])) ++n;
    return n;
}

// The decode rows of one range of neurons, in blocks: the gates of one, then the rows that the block before
// it found. So the next rows are known while gates are read, and what to fetch never runs out before the
// range.
class Range {
  public:
    Range(const Ffn& ffn, int token_count, int range, uint8_t* local)
        : f(ffn),
          tokens(token_count),
          begin(f.range_begin(range)),
          end(f.range_end(range)),
          first(f.first()),
          segments((Segment*)local),
          gate((float*)(segments + 4 * (end - begin))),
          list((int32_t*)(gate + (end - begin) * tokens)),
          partial(f.partial + range * tokens * sums_of(f.dim())),
          stats(f.range_stats + range * kStats),
          ahead(segments) {}

    void run() {
        if (f.fired)
            for (int t = 0; t < tokens; ++t)
                for (int64_t w = begin / 64; w * 64 < end; ++w) f.fired[t * f.words() + w] = 0;
        std::memset(partial, 0, size_t(tokens * sums_of(f.dim()) * 4));
        for (int i = 0; i < kStats; ++i) stats[i] = 0;
        stats[0] = count = candidates(f, tokens, begin, end, list);

        const float* bias = f.gate.base ? f.gate_bias : f.up_bias;
        int64_t k = 0, n = expect_gates(), next = expect_gates();
        ahead.fetch(kAhead);
        int64_t done = 0, kept = 0;  // neurons whose rows are read, and those that are to be
        while (n > 0 || done < kept) {
            const int64_t found = kept;
            dots(first, list + k, 0, n, f.x, 0, tokens, ahead, {gate + k * tokens, tokens, 1, bias});
            kept = keep_fired(k, n, kept);
            while (done < found) done += run_chunk(list + done, gate + done * tokens, found - done);
            expect_rows(list + found, kept - found);
            k += n, n = next, next = expect_gates();
        }
    }

  private:
    // The stream will read the next block's gates; returns how many.
    int64_t expect_gates() {
        const int64_t k = expected;
        // Few of many make shorter blocks, so that there are several. No run of a panel lies in two.
        expected = smaller(k + (count == end - begin ? 64 : 16), count);
        while (f.panels.neurons && expected < count && same_run(f, list[expected - 1], list[expected]))
            ++expected;
        const int64_t bytes = row_bytes(first), together = count == end - begin && first.stride == bytes;
        for (int64_t i = k; i < expected; i += together ? expected - k : 1)
            ahead.expect(first.row(list[i]), together ? (expected - k) * bytes : bytes);
        return expected - k;
    }

    // The stream will read the up rows, panel's scales and down rows of some neurons, chunk by chunk, in the
    // order of use.
    void expect_rows(const int32_t* neurons, int64_t left) {
        for (int n; left > 0; neurons += n, left -= n) {
            n = chunk_of(f, neurons, left);
            for (int i = 0; i < n && f.gate.base; ++i) ahead.expect(f.up.row(neurons[i]), row_bytes(f.up));
            if (f.panels.neurons) {
                // Of 256 neurons' scales this fetches the share that these read, in the order of the file's
                // regions.
                const int64_t part = f.panels.header * scale_run(f.down.type) / f.panels.neurons;
                const int64_t run = *neurons % f.panels.neurons / scale_run(f.down.type);
                ahead.expect(panel_of(f, *neurons) + run * part, part);
            }
            for (int i = 0; i < n; ++i)
                ahead.expect(down_row(f, neurons[i]), f.panels.neurons ? f.panels.row : row_bytes(f.down));
        }
    }

    // Moves those of neurons [k, k + n) whose gate fires for some token that names them, with their gates, to
    // `kept`; returns where they end.
    int64_t keep_fired(int64_t k, int64_t n, int64_t kept) {
        const bool all = !(f.skip && can_skip(f.activation));
        for (const int64_t stop = k + n; k < stop; ++k) {  // without a branch that none can foresee
            bool any = all;
            for (int t = 0; t < tokens; ++t) {
                const float v = gate[k * tokens + t];
                any |= (v > f.threshold) & (tokens == 1 || named(f, t, list[k]));
                gate[kept * tokens + t] = v;
            }
            list[kept] = list[k];
            kept += any;
        }
        return kept;
    }

    // The first chunk of a list: up rows, coefficients, then the down rows of each token. Returns its
    // neurons.
    int run_chunk(const int32_t* neurons, const float* gates, int64_t left) {
        const int n = chunk_of(f, neurons, left);
        const bool skip = f.skip && can_skip(f.activation);
        float up[kChunk * kMaxDecodeRows], h[kChunk * kMaxDecodeRows];
        if (f.gate.base) {
            dots(f.up, neurons, 0, n, f.x, 0, tokens, ahead, {up, tokens, 1, f.up_bias});
            stats[1] += n;
        }
        activate_rows(f.activation, f.threshold, gates, f.gate.base ? up : nullptr, h, int64_t(n) * tokens);
        bool used[kChunk] = {};
        for (int t = 0; t < tokens; ++t) {
            int32_t active[kChunk];
            float c[kChunk];
            int m = 0;
            for (int k = 0; k < n; ++k) {
                const float v = h[k * tokens + t];
                if (!named(f, t, neurons[k]) || (skip && v == 0)) continue;
                if (f.fired && v != 0)
                    f.fired[t * f.words() + neurons[k] / 64] |= uint64_t(1) << (neurons[k] % 64);
                active[m] = neurons[k], c[m++] = v, used[k] = true;
            }
            if (!m) continue;
            stats[3] += m;
            add_down(f, active, c, m, partial + t * sums_of(f.dim()), ahead);
        }
        int rows = 0;
        for (int k = 0; k < n; ++k) rows += used[k];
        stats[2] += rows, stats[4] += f.panels.neurons && rows;
        return n;
    }

    const Ffn& f;
    const int tokens;
    const int64_t begin, end;
    const Rows& first;  // read of every candidate: gates, or ups where there are none
    // Scratch: what will be read (at most a neuron's three rows and its run's scales), gates [neuron, token],
    // and the neurons still in play.
    Segment* segments;
    float* gate;
    int32_t* list;
    float* partial;
    int64_t* stats;
    Stream ahead;
    int64_t count = 0, expected = 0;  // candidates; those whose gates the stream knows
};

void ffn_range(const Ffn& f, int tokens, int range, uint8_t* local) { Range(f, tokens, range, local).run(); }

// Floats of a group's sums.
inline int group_sums(const Ffn& f) { return is_quantised(f.down.type) ? kSums : kGroup; }

inline void write_out(const Ffn& f, int token, int64_t group, const float* sum) {
    float* out = f.out + token * f.dim() + group * kGroup;
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

// Sums one group of outputs over the ranges, in range order.
void ffn_reduce(const Ffn& f, int tokens, int token, int64_t group) {
    const int size = group_sums(f);
    float sum[kSums] = {};
    for (int r = 0; r < f.ranges(); ++r) {
        const float* from = f.partial + (int64_t(r) * tokens + token) * sums_of(f.dim()) + group * size;
        for (int i = 0; i < size; i += Vec::width)
            Vec::store(sum + i, Vec::add(Vec::load(sum + i), Vec::load(from + i)));
    }
    write_out(f, token, group, sum);
    if (f.stats && token == 0 && group == 0)
        for (int r = 0; r < f.ranges(); ++r)
            for (int i = 0; i < kStats; ++i) f.stats[i] += f.range_stats[r * kStats + i];
}

// hidden = act(gate) * up for rows [first, first + count) and tokens [t0, t1): neuron by neuron for the sums
// of prompt rows, token by token where down is a dot.
void ffn_hidden(const Ffn& f, int64_t first, int64_t count, int t0, int t1, uint8_t* local) {
    constexpr int kTokens = 64;  // so that the tile of up values stays in L2
    const Rows& gate = f.first();
    const float* bias = f.gate.base ? f.gate_bias : f.up_bias;
    const int64_t row_step = f.by_output ? 1 : f.hidden_tokens, token_step = f.by_output ? f.neurons() : 1;
    float* up = (float*)local;  // one tile, in the order of hidden
    const int64_t up_row = f.by_output ? 1 : kTokens, up_token = f.by_output ? count : 1;
    for (int t = t0; t < t1; t += kTokens) {
        const int end = smaller(t + kTokens, t1);
        float* h = f.hidden + first * row_step + t * token_step;
        Stream ahead = stream_of(gate, first, count);
        dots(gate, nullptr, first, count, f.x, t, end, ahead, {h, row_step, token_step, bias});
        if (f.gate.base) {
            Stream more = stream_of(f.up, first, count);
            dots(f.up, nullptr, first, count, f.x, t, end, more, {up, up_row, up_token, f.up_bias});
        }
        const int64_t runs = f.by_output ? end - t : count, length = f.by_output ? count : end - t;
        for (int64_t i = 0; i < runs; ++i, h += f.by_output ? token_step : row_step)
            activate_rows(f.activation, f.threshold, h,
                          f.gate.base ? up + i * (f.by_output ? up_token : up_row) : nullptr, h, length);
    }
}

constexpr int kTile = 32;  // neurons decoded at once for a tile of tokens

// The neurons of a tile that count for each token, with their coefficients.
struct TileLists {
    int count[kPromptTile];
    int neuron[kPromptTile][kTile];
    float c[kPromptTile][kTile];

    // h[k * step + t]: n neurons, `tokens` tokens.
    void build(const float* h, int64_t step, int n, int tokens, bool all) {
        for (int t = 0; t < tokens; ++t) count[t] = 0;
        for (int k = 0; k < n; ++k, h += step)
            for (int t = 0; t < tokens; ++t) {
                const int at = count[t];
                neuron[t][at] = k, c[t][at] = h[t];
                count[t] = at + (h[t] != 0 || all);
            }
    }
};

// acc += c * down over a tile of decoded neurons, for each token: axpy's products, in axpy's order. Scaled
// tiles hold codes whose lanes still want their scale; sums lie as axpy leaves them, those of the factors too
// where it keeps them, or in plain order where none is scaled. A slice of the tile stays in L1 for all
// tokens.
template <bool Scaled, bool Factors>
inline void add_tile(const float* tile, const float* scales, const TileLists& lists, int tokens, float* acc) {
    constexpr int DT = Vec::down_tile;
    for (int l = 0; l < kLanes; l += Vec::width) {
        for (int t = 0; t < tokens && Factors; ++t) {
            F sum = Vec::load(acc + t * kSums + kGroup + l);
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
                for (int i = 0; i < DT; ++i) sum[i] = Vec::load(to + i * kLanes);
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

// tile[e * kLanes + l] = fn(P, W, Byte, unit) for the elements of some lanes' codes.
template <class B, class Fn>
HC_INLINE void decode_codes(const uint8_t* codes, int lanes, int l, int n, float* tile, Fn&& fn) {
    I unit[B::units];
    load_units<B>(codes + 4 * l, lanes, n, unit);
    unroll<0, B::parts * B::words_per_part * 4>([&](auto j) HC_INLINE_LAMBDA {
        constexpr int Byte = decltype(j)::value % 4, word = decltype(j)::value / 4;
        constexpr int P = word / B::words_per_part, W = word % B::words_per_part;
        Vec::store(tile + (4 * (P + W * B::parts) + Byte) * kLanes + l,
                   fn(Index<P>{}, Index<W>{}, Index<Byte>{}, unit));
    });
}

// Decodes one group of one down row: codes and, apart, the lanes' scales, where there is one per block; else
// weights.
template <class B>
inline void decode_group(const uint8_t* row, int64_t cols, int64_t group, float* tile, float* scales) {
    if (cols < (group + 1) * kGroup)
        for (int i = 0; i < kGroup; i += Vec::width) Vec::store(tile + i, Vec::zero());
    if constexpr (B::quantised) {
        const int64_t blocks = cols / kBlock, block = group * kLanes;
        for_lanes(blocks, block, [&](int lanes, int l, int n) HC_INLINE_LAMBDA {
            const Head head = B::head({row, blocks, block + l, n});
            Vec::store(scales + l, head.scale);
            const auto decode = [&](auto p, auto w, auto byte, const I* unit) HC_INLINE_LAMBDA {
                constexpr int P = decltype(p)::value, W = decltype(w)::value, Byte = decltype(byte)::value;
                if constexpr (one_scale<B>)
                    return B::template value<P, W, Byte>(unit);
                else
                    return weight<B, P, W, Byte>(unit, head);
            };
            decode_codes<B>(row + codes_of<B>(blocks, block), lanes, l, n, tile, decode);
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
        return code<B, decltype(p)::value, decltype(w)::value, decltype(byte)::value, true>(unit);
    };
    for_lanes(blocks, block, [&](int lanes, int l, int n) HC_INLINE_LAMBDA {
        for (int k = 0; k < rows; ++k)
            decode_codes<B>(down_row(f, first + k) + block * 4 * B::units, lanes, l, n, tile + k * kGroup,
                            decode);
        for (int e = 0; e < kBlock; ++e) {
            const int64_t at = block * kBlock + e * lanes + l;
            const Head head = panel_head<B>({panel_of(f, first), f.down.cols, at, n}, run);
            Vec::store(tile + rows * kGroup + e * kLanes + l, head.scale);
            Vec::store(tile + (rows + 1) * kGroup + e * kLanes + l, head.minimum);
        }
    });
}

// What panel_axpy does for one token, for many: a tile of `rows` neurons as decode_panel leaves it.
template <class B>
void add_panel(const float* tile, int rows, const TileLists& lists, int tokens, float* acc) {
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
                    if constexpr (B::has_minimum || excess<B> > 0) total = Vec::add(total, c);
                }
                for (int i = 0; i < DT; ++i) {
                    const int at = (e + i) * kLanes + l;
                    float* to = acc + t * kSums + at;
                    const Head head{Vec::load(scales + at), Vec::zero(), Vec::load(minima + at)};
                    Vec::store(to, add_run<B>(sum[i], 1, total, head, Vec::load(to)));
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
        int64_t at = group * kGroup * row_bytes(rows) / rows.cols,
                bytes = kGroup * row_bytes(rows) / rows.cols;
        if constexpr (B::quantised) {
            const int64_t head = B::header_quarters * kLanes / 4;
            at = codes_of<B>(f.panels.neurons ? 0 : rows.cols / kBlock, group * kLanes), bytes -= head;
            if (!f.panels.neurons) Vec::prefetch_l2(rows.row(i) + group * head);
        }
        for (int64_t b = 0; b < bytes; b += 64) Vec::prefetch_l2(down_row(f, i) + at + b);
    }
}

// One group of outputs for tokens [t0, t1), range by range as the decode rows sum them.
void ffn_prompt_down(const Ffn& f, int64_t group, int t0, int t1, uint8_t* local) {
    const int tokens = t1 - t0;
    float* acc = (float*)local;
    float* total = acc + tokens * kSums;
    float* tile = total + tokens * kSums;
    float* scales = tile + kTile * kGroup;
    TileLists& lists = *(TileLists*)(scales + 2 * kGroup);
    const int rows = f.panels.neurons ? scale_run(f.down.type) : kTile;
    for (int i = 0; i < tokens * kSums; ++i) total[i] = 0;
    with_type(f.down.type, [&](auto type) {
        using B = decltype(type);
        for (int r = 0; r < f.ranges(); ++r) {
            for (int i = 0; i < tokens * kSums; i += Vec::width) Vec::store(acc + i, Vec::zero());
            for (int64_t first = f.range_begin(r); first < f.range_end(r); first += rows) {
                const int n = int(smaller<int64_t>(rows, f.range_end(r) - first));
                fetch_groups<B>(f, group, first + n, smaller(first + n + rows, f.neurons()));
                lists.build(f.hidden + first * f.hidden_tokens + t0, f.hidden_tokens, n, tokens,
                            !can_skip(f.activation));
                if constexpr (B::quantised)
                    if (f.panels.neurons) {
                        decode_panel<B>(f, first, group, tile);
                        add_panel<B>(tile, rows, lists, tokens, acc);
                        continue;
                    }
                for (int k = 0; k < n; ++k)
                    decode_group<B>(f.down.row(first + k), f.dim(), group, tile + k * kGroup,
                                    scales + k * kLanes);
                add_tile<tile_is_scaled<B>(), sums_factors<B>()>(tile, scales, lists, tokens, acc);
            }
            for (int i = 0; i < tokens * kSums; i += Vec::width)
                Vec::store(total + i, Vec::add(Vec::load(total + i), Vec::load(acc + i)));
        }
    });
    for (int t = 0; t < tokens; ++t) write_out(f, t0 + t, group, total + t * kSums);
}

}  // namespace
}  // namespace hc
