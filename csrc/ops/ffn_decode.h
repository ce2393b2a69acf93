// The FFN op for decode rows: exact and predicted, cut by neurons.
#pragma once
#include "ops/activation.h"
#include "ops/down_rows.h"
#include "ops/leaf_sums.h"
#include "ops/linear.h"
#include "ops/scratch.h"

namespace hc {
namespace {

static_assert(kNeuronScratch == 4 * sizeof(Segment) + kMaxDecodeRows * 4 + 4, "what DecodePiece takes of it");

constexpr int kRowsAtOnce = 8;  // neurons of a chunk if down is in rows: enough to fetch ahead for one token

inline bool named(const Ffn& f, int token, int64_t neuron) { return !f.mask || f.mask.has(token, neuron); }

// Neurons of [begin, end) in any token's mask, ascending.
inline int64_t candidates(const Ffn& f, int tokens, int64_t begin, int64_t end, int32_t* list) {
    int64_t count = 0;
    for (int64_t word = begin / 64; word * 64 < end; ++word) {
        uint64_t any = f.mask ? 0 : ~uint64_t(0);
        if (f.mask)
            for (int t = 0; t < tokens; ++t) any |= f.mask.row(t)[word];
        for (int64_t i = word * 64; any && i < end; ++i, any >>= 1)
            if (any & 1) list[count++] = int32_t(i);
    }
    return count;
}

// Returns true if two neurons of a panel share scales: they are summed before the sum is scaled.
inline bool same_run(const Ffn& f, int64_t a, int64_t b) {
    return a / scale_run(f.down.type) == b / scale_run(f.down.type);
}

// The current leaf of an ascending list of neurons.
class Leaf {
  public:
    Leaf(const Ffn& ffn, int64_t neuron)
        : f(ffn), number(f.leaf_of(neuron)), end_(f.leaf_begin(number + 1)) {}
    int64_t end() const { return end_; }
    void next() { end_ = f.leaf_begin(++number + 1); }

  private:
    const Ffn& f;
    int64_t number, end_;
};

// Neurons of the chunk at the start of a list: a few rows of one leaf, or the neurons of one run of a panel.
// With several tokens a chunk is larger: each token goes through its sums once a chunk and adds only its own
// neurons.
inline int chunk_of(const Ffn& f, int tokens, const Leaf& leaf, const int32_t* list, int64_t count) {
    const int64_t rows = tokens == 1 ? kRowsAtOnce : kChunk;
    const int64_t most = f.panels.neurons ? count : smaller(rows, count);
    int n = 1;
    while (n < most && (f.panels.neurons ? same_run(f, list[0], list[n]) : list[n] < leaf.end())) ++n;
    return n;
}

// Returns how many down rows are added for some active neurons of a chunk: those, or a panel's whole run if
// few of its neurons are inactive. These get coefficients of 0, which change no bit. The processor prefetches
// rows at one distance and not rows with gaps, so a run with few gaps takes longer than a whole one.
inline int rows_added(const Ffn& f, int active) {
    const int run = scale_run(f.down.type);
    return f.panels.neurons && 8 * active >= 7 * run ? run : active;
}

// Replaces the active neurons of a run, with their coefficients, by all neurons of the run.
inline void add_inactive(int run, int active, int32_t* neurons, float* c) {
    const int32_t first = neurons[0] / run * run;
    float all[kChunk] = {};
    for (int k = 0; k < active; ++k) all[neurons[k] - first] = c[k];
    for (int k = 0; k < run; ++k) {
        neurons[k] = first + k;
        c[k] = all[k];
    }
}

// The decode rows of one piece, some neighbouring leaves, in blocks of neurons: the gates of one block, then
// the other rows of the block before it. So the next rows are known while gates are read, and there is always
// something to fetch until the piece ends.
class DecodePiece {
  public:
    DecodePiece(const Ffn& ffn, int token_count, int piece_number, uint8_t* local)
        : f(ffn),
          tokens(token_count),
          piece(piece_number),
          begin(f.piece_begin(tokens, piece)),
          end(f.piece_begin(tokens, piece + 1)),
          first(f.first()),
          segments((Segment*)local),
          gate((float*)(segments + 4 * (end - begin))),
          list((int32_t*)(gate + (end - begin) * tokens)),
          sums(f.partial + piece * tokens * sums_of(f.dim()),
               (float*)(((uintptr_t)(list + (end - begin)) + 63) / 64 * 64), f.levels[tokens], tokens,
               sums_of(f.dim())),
          stats(f.piece_stats[piece]),
          leaf(f, begin),
          expected_leaf(f, begin),
          ahead(segments) {}

    void run() {
        if (f.active)
            for (int t = 0; t < tokens; ++t)
                for (int64_t w = begin / 64; w * 64 < end; ++w) f.active.row(t)[w] = 0;
        count = candidates(f, tokens, begin, end, list);
        stats = {f.gates ? 0 : count, 0, 0, 0, 0};

        const float* bias = f.gate.base ? f.gate_bias : f.up_bias;
        int64_t k = 0, n = expect_gates(), next = expect_gates();
        fetch(ahead, fetching.ahead);
        int64_t done = 0, kept = 0;  // neurons whose rows are read, and neurons whose rows will be read
        while (n > 0 || done < kept) {
            const int64_t known = kept;
            if (f.gates)
                take_gates(k, n);
            else
                dots(first, list + k, 0, n, f.x, 0, tokens, ahead, {gate + k * tokens, tokens, 1, bias});
            kept = keep_active(k, n, kept);
            while (done < known) {
                end_leaves(list[done]);
                done += run_chunk(list + done, gate + done * tokens, known - done);
            }
            expect_rows(list + known, kept - known);
            k += n;
            n = next;
            next = expect_gates();
        }
        end_leaves(end - 1);
        sums.end_leaf();
        f.added[piece] = uint32_t(sums.end());
    }

  private:
    // Copies the gates of neurons [k, k + n) of the list, which were computed before.
    void take_gates(int64_t k, int64_t n) {
        for (const int64_t stop = k + n; k < stop; ++k)
            for (int t = 0; t < tokens; ++t) gate[k * tokens + t] = f.gates[t * f.neurons() + list[k]];
    }

    // Ends the leaves before this neuron.
    void end_leaves(int64_t neuron) {
        for (; neuron >= leaf.end(); leaf.next()) sums.end_leaf();
    }

    // Adds the next block's gates to the stream; returns their number.
    int64_t expect_gates() {
        const int64_t k = expected;
        // With few of many neurons, blocks are shorter, so that there are several. No run of a panel is
        // split.
        expected = smaller(k + (count == end - begin ? 64 : 16), count);
        while (f.panels.neurons && expected < count && same_run(f, list[expected - 1], list[expected]))
            ++expected;
        const int64_t bytes = row_bytes(first), together = count == end - begin && first.stride == bytes;
        for (int64_t i = k; i < expected && !f.gates; i += together ? expected - k : 1)
            expect(ahead, first.row(list[i]), together ? (expected - k) * bytes : bytes);
        return expected - k;
    }

    // Adds the up rows, the panel's scales and the down rows of some neurons to the stream, chunk by chunk,
    // in the order of use.
    void expect_rows(const int32_t* neurons, int64_t left) {
        while (left > 0) {
            while (*neurons >= expected_leaf.end()) expected_leaf.next();
            const int n = chunk_of(f, tokens, expected_leaf, neurons, left);
            for (int i = 0; i < n && f.gated(); ++i) expect(ahead, f.up.row(neurons[i]), row_bytes(f.up));
            if (f.panels.neurons) {
                // Fetches the share of the scales of 256 neurons that these neurons read, in the order of the
                // file's regions.
                const int64_t part = f.panels.header * scale_run(f.down.type) / f.panels.neurons;
                const int64_t run = *neurons % f.panels.neurons / scale_run(f.down.type);
                expect(ahead, panel_of(f, *neurons) + run * part, part);
            }
            const int rows = rows_added(f, n);
            if (rows > n) expect(ahead, down_row(f, *neurons / rows * rows), rows * f.panels.row);
            for (int i = 0; i < n && rows == n; ++i)
                expect(ahead, down_row(f, neurons[i]), f.panels.neurons ? f.panels.row : row_bytes(f.down));
            neurons += n;
            left -= n;
        }
    }

    // Moves the neurons of [k, k + n) whose gate is active for a token that names them, with their gates, to
    // `kept`; returns the end.
    int64_t keep_active(int64_t k, int64_t n, int64_t kept) {
        const bool all = !(f.skip && can_skip(f.activation));
        for (const int64_t stop = k + n; k < stop; ++k) {  // without an unpredictable branch
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

    // Computes the first chunk of a list: up rows, coefficients, then the down rows of each token. Returns
    // its neurons.
    int run_chunk(const int32_t* neurons, const float* gates, int64_t left) {
        const int n = chunk_of(f, tokens, leaf, neurons, left);
        const bool skip = f.skip && can_skip(f.activation);
        float up[kChunk * kMaxDecodeRows], h[kChunk * kMaxDecodeRows];
        if (f.gated()) {
            dots(f.up, neurons, 0, n, f.x, 0, tokens, ahead, {up, tokens, 1, f.up_bias});
            (f.gates ? stats.gate_rows : stats.up_rows) += n;  // gate_rows counts the rows read first
        }
        activate_rows(f, gates, f.gated() ? up : nullptr, h, int64_t(n) * tokens);
        bool used[kChunk] = {};
        for (int t = 0; t < tokens; ++t) {
            int32_t active[kChunk];
            float c[kChunk];
            int m = 0;
            for (int k = 0; k < n; ++k) {
                const float v = h[k * tokens + t];
                if (!named(f, t, neurons[k]) || (skip && v == 0)) continue;
                if (f.active && v != 0) f.active.row(t)[neurons[k] / 64] |= uint64_t(1) << (neurons[k] % 64);
                active[m] = neurons[k];
                c[m++] = v;
                used[k] = true;
            }
            if (!m) continue;
            stats.pairs += m;
            const int added = rows_added(f, m);
            if (added > m) add_inactive(added, m, active, c);
            HC_SHARED(add_down)(f, active, c, added, sums.start(t), ahead);
        }
        int rows = 0;
        for (int k = 0; k < n; ++k) rows += used[k];
        stats.down_rows += rows;
        stats.runs += f.panels.neurons && rows;
        return n;
    }

    const Ffn& f;
    const int tokens, piece;
    const int64_t begin, end;
    const Rows& first;  // read for each candidate: gates, or ups if there are none
    // Scratch: segments to read (at most a neuron's three rows and its run's scales), gates [neuron, token],
    // and the remaining neurons.
    Segment* segments;
    float* gate;
    int32_t* list;
    LeafSums sums;
    FfnCounts& stats;
    Leaf leaf, expected_leaf;  // `leaf`: being added; `expected_leaf`: known to the stream
    Stream ahead;
    int64_t count = 0, expected = 0;  // candidates; candidates whose gates the stream knows
};

void ffn_piece(const Ffn& f, int tokens, int piece, uint8_t* local) {
    DecodePiece(f, tokens, piece, local).run();
}

}  // namespace
}  // namespace hc
