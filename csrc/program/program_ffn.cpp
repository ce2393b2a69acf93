// The FFN op and its predictors.
#include <algorithm>
#include <cstring>

#include "program/program_parts.h"

namespace hc {

// More for several rows: the sums of large pieces would exceed a core's L2.
static int pieces_wanted(int threads, int rows) {
    const int for_few_threads = std::min((rows <= 2 ? 8 : 16) * threads, 32);
    return std::max(for_few_threads, 2 * threads);
}

void cut_into_pieces(Ffn& f, int max_rows, int threads, int chosen) {
    for (int rows = 1; rows <= max_rows; ++rows) {
        const int64_t wanted = ceil_div(pieces_wanted(threads, rows), chosen);
        for (f.levels[rows] = 0; f.pieces(rows) > 1;) {
            ++f.levels[rows];
            if (f.pieces(rows) >= wanted && ffn_piece_scratch(f, rows) <= int64_t(kLocalBytes)) continue;
            --f.levels[rows];
            break;
        }
    }
}

// Records the first product of a predictor for decode rows. Returns its result, the input of the second
// product.
std::shared_ptr<Input> Program::predictor_hidden(ScratchPlan& plan, const float* x, const Predictor& p) {
    const auto rows = [this] { return int64_t(batch_.decode_count()); };
    auto in = input_of(x, p.first.cols);
    auto product =
        std::make_shared<std::vector<Product>>(1, Product{p.first, nullptr, nullptr, p.first.count, false});
    auto hidden = input_of(nullptr, p.second.cols);
    const bool relu = p.relu, quantised = is_quantised(p.second.type);
    if (quantised) take_quantised(plan, hidden, max_decode());
    plan.take(max_decode() * p.first.count * 4, [product, hidden](uint8_t* at) {
        (*product)[0].out = reinterpret_cast<float*>(at);
        hidden->x = reinterpret_cast<float*>(at);
    });
    if (is_quantised(p.first.type)) {
        take_quantised(plan, in, max_decode());
        quantise(in, rows);
    }
    products(in, product, rows);
    if (relu || quantised)
        step(rows, [this, relu, quantised, hidden, product](int64_t t, const Scratch&) {
            if (relu) k_.relu((*product)[0].out + t * hidden->cols, hidden->cols);
            if (quantised) k_.quantise(*hidden, int(t));
        });
    return hidden;
}

void Program::predict(const float* x, const Predictor& p, const Masks& mask) {
    ScratchPlan plan(*this);
    const auto hidden = predictor_hidden(plan, x, p);
    const auto rows = [this] { return int64_t(batch_.decode_count()); };
    const int64_t words = ceil_div(p.second.count, 64), size = ceil_div(piece_rows(p.second), 64);
    step([rows, n = ceil_div(words, size)] { return rows() ? n : 0; },
         [=](int64_t piece, const Scratch&) {
             const int64_t end = std::min(words, (piece + 1) * size);
             k_.predict(p.second, *hidden, p.threshold, piece * size, end, int(rows()), mask);
         },
         [=](int64_t first, int64_t end) { return stretch(p.second, first * size * 64, end * size * 64); });
}

void Program::ffn(Ffn args, const float* x, Masks strongest) {
    ScratchPlan plan(*this);
    auto f = std::make_shared<Ffn>(args);
    f->hidden_tokens = bounds_.tokens;
    cut_into_pieces(*f, int(max_decode()), pool_->threads());
    f->x = Input{x, f->dim(), nullptr, f->dim()};
    const bool tiles = k_.tile_input && f->by_output;  // otherwise decode rows read single neurons
    Meets meets{};
    meets.with(f->up, tiles);
    if (f->gate.base) meets.with(f->gate, tiles);
    prepare(plan, {f, &f->x}, meets, bounds_.tokens, [this] { return count(kTokens); });
    if (f->by_output)
        ffn_by_output(f, plan, strongest);
    else
        ffn_by_neuron(f, plan);
}

void Program::hidden(const Ffn& f, int64_t first, int64_t count, int decode, int tokens,
                     uint8_t* local) const {
    by_kind(f.x, decode, tokens, [&](const Input& x, int t0, int t1) {
        Ffn of_kind = f;
        of_kind.x = x;
        k_.ffn_hidden(of_kind, first, count, t0, t1, local);
    });
}

// Decode rows are cut by neurons, each piece with its own sums; prompt rows by rows, then by outputs.
void Program::ffn_by_neuron(std::shared_ptr<Ffn> f, ScratchPlan& plan) {
    plan.take(bounds_.tokens * f->neurons() * 4,
              [f](uint8_t* p) { f->hidden = reinterpret_cast<float*>(p); });
    plan.take(f->leaves() * max_decode() * sums_of(f->dim()) * 4,
              [f](uint8_t* p) { f->partial = reinterpret_cast<float*>(p); });
    plan.take(f->leaves() * int64_t(sizeof(FfnCounts)),
              [f](uint8_t* p) { f->piece_stats = reinterpret_cast<FfnCounts*>(p); });
    plan.take(f->leaves() * 4, [f](uint8_t* p) { f->added = reinterpret_cast<uint32_t*>(p); });
    const int64_t size = piece_rows(f->up), blocks = ceil_div(f->neurons(), size);
    const auto pieces = [=] { return batch_.decode_count() ? f->pieces(batch_.decode_count()) : 0; };
    step([=] { return pieces() + (batch_.prompt_count() ? blocks : 0); },
         [=](int64_t piece, const Scratch& s) {
             const int decode = batch_.decode_count();
             if (piece < pieces()) return k_.ffn_piece(*f, decode, int(piece), s.local);
             const int64_t first = (piece - pieces()) * size;
             k_.ffn_hidden(*f, first, std::min(size, f->neurons() - first), decode, batch_.tokens_count(),
                           s.local);
         },
         [=](int64_t first, int64_t end) {
             // Which rows a mask or gates name is not known yet.
             if (first >= pieces() || f->mask || f->gates) return Span{};
             const int decode = batch_.decode_count();
             return stretch(f->first(), f->piece_begin(decode, first),
                            f->piece_begin(decode, std::min<int64_t>(end, pieces())));
         });
    const int64_t groups = padded(f->dim()) / kGroup;
    step([=] { return groups * (batch_.decode_count() + ceil_div(batch_.prompt_count(), kPromptTile)); },
         [=](int64_t piece, const Scratch& s) {
             const int64_t group = piece % groups, row = piece / groups;
             const int decode = batch_.decode_count();
             if (f->stats && piece == 0 && !batch_.prompt_count())
                 for (int i = 0; i < pieces(); ++i) f->stats->add(f->piece_stats[i]);
             if (row < decode)
                 return k_.ffn_reduce(*f, decode, int(row), group, f->out + row * f->dim() + group * kGroup);
             const int t0 = decode + int(row - decode) * kPromptTile;
             k_.ffn_prompt_down(*f, group, t0, std::min(t0 + kPromptTile, batch_.tokens_count()), s.local);
         });
}

void account_by_output(const Ffn& f, int decode, bool count) {
    const bool skip = f.skip && can_skip(f.activation);
    int64_t pairs = 0;
    for (int t = 0; t < decode; ++t) {
        float* h = f.hidden + t * f.neurons();
        for (int64_t word = 0; word < f.words(); ++word) {
            const uint64_t named = f.mask ? f.mask.row(t)[word] : ~uint64_t(0);
            uint64_t active = 0;
            for (int64_t i = word * 64; i < std::min(f.neurons(), word * 64 + 64); ++i) {
                const bool candidate = named >> (i % 64) & 1;
                if (!candidate) h[i] = 0;
                active |= uint64_t(h[i] != 0) << (i % 64);
                pairs += candidate && (!skip || h[i] != 0);
            }
            if (f.active) f.active.row(t)[word] = active;
        }
    }
    if (!f.stats || !count) return;
    const int64_t n = f.neurons();
    f.stats->add({n, f.gate.base ? n : 0, n, pairs, 0});
}

// The magnitude of a float as an integer with the same order; NaN ranks highest.
static uint32_t size_bits(float h) {
    uint32_t bits;
    std::memcpy(&bits, &h, 4);
    return bits & 0x7fffffff;
}

// Returns size_bits() of the `most`-th largest of n values, most >= 1. Counts values by their leading bits,
// so that few are left for an exact selection in `scratch`.
static uint32_t least_of_largest(const float* h, int64_t n, int64_t most, uint32_t* scratch) {
    constexpr int kShift = 21;  // leaves the exponent and two more bits
    uint32_t counts[1 << (31 - kShift)] = {};
    for (int64_t i = 0; i < n; ++i) ++counts[size_bits(h[i]) >> kShift];
    uint32_t size_class = (1 << (31 - kShift)) - 1;
    for (; counts[size_class] < most; --size_class) most -= counts[size_class];
    uint32_t* end = scratch;
    for (int64_t i = 0; i < n; ++i)
        if (const uint32_t size = size_bits(h[i]); size >> kShift == size_class) *end++ = size;
    std::nth_element(scratch, end - most, end);
    return end[-most];
}

void mark_strongest(const Ffn& f, int decode, const Masks& strongest, uint32_t* scratch) {
    const int64_t n = f.neurons();
    for (int t = 0; t < decode; ++t) {
        const float* h = f.hidden + t * n;
        const uint32_t least = std::max(1u, least_of_largest(h, n, ceil_div(n, 10), scratch));
        for (int64_t word = 0; word < f.words(); ++word) {
            uint64_t marked = 0;
            for (int64_t i = word * 64; i < std::min(n, word * 64 + 64); ++i)
                marked |= uint64_t(size_bits(h[i]) >= least) << (i % 64);
            strongest.row(t)[word] = marked;
        }
    }
}

// Dense: every row is read, and down is a dot product over all neurons.
void Program::ffn_by_output(std::shared_ptr<Ffn> f, ScratchPlan& plan, Masks strongest) {
    const auto tokens = [this] { return count(kTokens); };
    auto in = input_of(nullptr, f->neurons());  // input of down
    plan.take(bounds_.tokens * f->neurons() * 4, [f, in](uint8_t* p) {
        f->hidden = reinterpret_cast<float*>(p);
        in->x = f->hidden;
    });
    auto cut = std::make_shared<const EvenCut>(std::vector<EvenCut::Part>{part_of(f->up)}, pool_->threads());
    step([=] { return tokens() ? cut->pieces() : 0; },
         [=](int64_t piece, const Scratch& s) {
             cut->each(piece, [&](size_t, int64_t first, int64_t count) {
                 hidden(*f, first, count, batch_.decode_count(), int(tokens()), s.local);
             });
         },
         [=](int64_t piece, int64_t end) {
             const EvenCut::Stretch range = cut->stretch(piece, end);
             return stretch(f->first(), range.first, range.end);
         });
    auto scratch = std::make_shared<uint32_t*>();
    if (strongest)
        plan.take(f->neurons() * 4, [scratch](uint8_t* p) { *scratch = reinterpret_cast<uint32_t*>(p); });
    if (f->mask || f->active || f->stats || strongest)
        step([this] { return int64_t(batch_.decode_count() > 0); },
             [this, f, strongest, scratch](int64_t, const Scratch&) {
                 account_by_output(*f, batch_.decode_count(), !batch_.prompt_count());
                 if (strongest) mark_strongest(*f, batch_.decode_count(), strongest, *scratch);
             });
    Meets meets{};
    meets.with(f->down, k_.tile_input);
    prepare(plan, in, meets, bounds_.tokens, tokens);
    auto down = std::make_shared<std::vector<Product>>(
        1, Product{f->down, f->down_bias, f->out, f->down.count, f->accumulate});
    products(in, down, tokens);
}

}  // namespace hc
