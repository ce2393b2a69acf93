#include "program.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "pack.h"
#include "scratch.h"

namespace hc {

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows of one piece of a product, so that a piece stays in L2 for all its tokens: about 64 KB of weights, or
// 192 KB of plain ones, whose tokens do not stay there and are read again for every piece.
int64_t piece_rows(const Rows& rows) {
    const int64_t bytes = (is_quantised(rows.type) ? 64 : 192) << 10;
    return std::clamp<int64_t>(bytes / std::max<int64_t>(1, row_size(rows.type, rows.cols)), 8,
                               kMaxPieceRows);
}

// Rows [first, end) where they lie in one stretch.
Span stretch(const Rows& rows, int64_t first, int64_t end) {
    const int64_t bytes = row_bytes(rows.type, rows.cols);
    if (rows.stride != bytes) return {};
    return {rows.row(first), (std::min(end, rows.count) - first) * bytes};
}

int max_splits(const Batch& b, int tokens) {
    int m = 0;
    for (int t = 0; t < tokens; ++t) m = std::max(m, b.positions[t] / kSplit + 1);
    return m;
}

std::shared_ptr<Input> input_of(const float* x, int64_t cols) {
    return std::make_shared<Input>(Input{x, cols, nullptr, cols});
}

void check_range(const char* what, int64_t seen, int64_t limit) {
    if (seen < 0 || seen > limit)
        throw std::invalid_argument(std::string("batch: ") + what + " " + std::to_string(seen) +
                                    " is out of range; allowed: 0 to " + std::to_string(limit));
}

}  // namespace

class Program::ScratchPlan {
  public:
    explicit ScratchPlan(Program& program) : program_(program) {}
    ~ScratchPlan() { program_.shared_bytes_ = std::max(program_.shared_bytes_, bytes_); }
    template <class Set> void take(int64_t bytes, Set set) {
        const size_t at = bytes_;
        bytes_ += size_t(bytes + 63) / 64 * 64;
        program_.parts_.push_back({at, std::move(set)});
    }

  private:
    Program& program_;
    size_t bytes_ = 0;
};

void Program::check() const {
    const Batch& b = batch_;
    check_range("n_tokens", b.counts[0], bounds_.tokens);
    check_range("n_decode", b.counts[1], std::min<int64_t>(b.counts[0], max_decode()));
    check_range("n_logits", b.counts[2], bounds_.logits);
    for (int r = 0; r < b.counts[2]; ++r) check_range("logits row", b.logits_rows[r], b.counts[0] - 1);
    for (int t = 0; t < b.counts[0]; ++t) {
        check_range("token", b.tokens[t], bounds_.vocab - 1);
        check_range("position", b.positions[t],
                    std::min<int64_t>(bounds_.positions, b.pages_per_sequence * kPage) - 1);
        check_range("sequence", b.sequence[t], bounds_.sequences - 1);
        check_range("slot", b.slots[t], bounds_.pages * kPage - 1);
        if (t && b.sequence[t] == b.sequence[t - 1] && b.positions[t] / kPage <= b.positions[t - 1] / kPage)
            continue;
        for (int p = 0; p <= b.positions[t] / kPage; ++p)
            check_range("page", b.pages[b.sequence[t] * b.pages_per_sequence + p], bounds_.pages - 1);
    }
}

void Program::run(const std::function<void()>& check_interrupt) {
    check();
    if (!shared_) {
        shared_ = pool_->shared_scratch(shared_bytes_);
        for (const Part& part : parts_) part.set(shared_.get() + part.at);
    }
    pool_->run(steps_, shared_.get(), check_interrupt);
}

void Program::step(std::function<int64_t()> pieces, std::function<void(int64_t, const Scratch&)> run,
                   std::function<Span(int64_t, int64_t)> reads) {
    if (shared_)
        throw std::invalid_argument("this program has run: its scratch is laid out, no op can follow");
    steps_.push_back({std::move(pieces), std::move(run), std::move(reads)});
}

void Program::embed(const Rows& table, float* out) {
    bounds_.vocab = std::min(bounds_.vocab, table.count);
    step([this] { return count(kTokens); },
         [this, table, out](int64_t t, const Scratch& s) {
             k_.decode_row(table, batch_.tokens[t], out + t * table.cols, s.local);
         });
}

void Program::norm(const NormArgs& args, const float* x, float* out, int64_t rows_per_token, RowsOf rows) {
    step([this, rows] { return count(rows); },
         [this, args, x, out, rows_per_token](int64_t t, const Scratch&) {
             for (int64_t r = t * rows_per_token; r < (t + 1) * rows_per_token; ++r)
                 k_.norm(args, x + r * args.dim, out + r * args.dim);
         });
}

void Program::take_quantised(ScratchPlan& plan, std::shared_ptr<Input> in, int64_t max_rows) {
    plan.take(max_rows * Input::token_bytes(in->cols), [in](uint8_t* p) { in->quantised = p; });
}

void Program::quantise(std::shared_ptr<Input> in, std::function<int64_t()> rows) {
    step(std::move(rows), [this, in](int64_t t, const Scratch&) { k_.quantise(*in, int(t)); });
}

// Pieces of several products over the same input: blocks of rows, one product after another.
void Program::products(std::shared_ptr<Input> in, std::shared_ptr<std::vector<Product>> all,
                       std::function<int64_t()> rows) {
    std::vector<int64_t> begins{0};  // first piece of each product, and the end
    for (const Product& p : *all)
        begins.push_back(begins.back() + ceil_div(p.rows.count, piece_rows(p.rows)));
    const auto of = [begins](int64_t piece) {
        size_t i = 0;
        while (piece >= begins[i + 1]) ++i;
        return i;
    };
    step([rows, n = begins.back()] { return rows() ? n : 0; },
         [this, in, all, of, begins, rows](int64_t piece, const Scratch&) {
             const size_t i = of(piece);
             const Product& p = (*all)[i];
             const int64_t size = piece_rows(p.rows), first = (piece - begins[i]) * size;
             k_.product(p, *in, first, std::min(size, p.rows.count - first), 0, int(rows()));
         },
         [all, of, begins](int64_t piece, int64_t end) {
             const size_t i = of(piece);
             const Rows& r = (*all)[i].rows;
             const int64_t size = piece_rows(r);
             return stretch(r, (piece - begins[i]) * size, (end - begins[i]) * size);
         });
}

void Program::linear(const float* x, const std::vector<Product>& list, RowsOf rows) {
    ScratchPlan plan(*this);
    const bool quantised =
        std::any_of(list.begin(), list.end(), [](const Product& p) { return is_quantised(p.rows.type); });
    auto in = input_of(x, list[0].rows.cols);
    const auto n = [this, rows] { return count(rows); };
    if (quantised) {
        take_quantised(plan, in, max_rows(rows));
        quantise(in, n);
    }
    products(in, std::make_shared<std::vector<Product>>(list), n);
}

void Program::rope(const RopeArgs& args, int64_t positions, float* x, int64_t heads, int64_t head_dim) {
    bounds_.positions = std::min(bounds_.positions, positions);
    step([this] { return count(kTokens); },
         [this, args, x, heads, head_dim](int64_t t, const Scratch&) {
             for (int64_t h = 0; h < heads; ++h)
                 k_.rope(args, x + (t * heads + h) * head_dim, batch_.positions[t]);
         });
}

void Program::store_kv(const float* k, const float* v, const Cache& c) {
    bounds_.pages = std::min(bounds_.pages, c.pages);
    step([this, c] { return count(kTokens) ? c.kv_heads : 0; },
         [=](int64_t h, const Scratch&) {
             const int64_t bytes = row_bytes(c.type, c.head_dim);
             for (int64_t t = 0; t < count(kTokens); ++t) {
                 const int64_t page = batch_.slots[t] / kPage, offset = batch_.slots[t] % kPage;
                 const int64_t from = (t * c.kv_heads + h) * c.head_dim;
                 const int64_t to = ((page * c.kv_heads + h) * kPage + offset) * bytes;
                 k_.store_row(c.type, k + from, c.k + to, c.head_dim);
                 k_.store_row(c.type, v + from, c.v + to, c.head_dim);
             }
         });
}

void Program::attention(Attention args, int64_t pages) {
    bounds_.pages = std::min(bounds_.pages, pages);
    ScratchPlan plan(*this);
    args.max_splits = int(ceil_div(batch_.pages_per_sequence * kPage, kSplit));
    auto a = std::make_shared<Attention>(args);
    plan.take(max_decode() * a->kv_heads * a->max_splits * a->partial_floats() * 4,
              [a](uint8_t* p) { a->partial = reinterpret_cast<float*>(p); });
    const auto splits = [this] { return max_splits(batch_, batch_.decode_count()); };
    // Decode rows are cut by splits, prompt rows are not: they are many.
    step([=] { return int64_t(a->kv_heads) * (batch_.decode_count() * splits() + batch_.prompt_count()); },
         [=](int64_t piece, const Scratch& s) {
             const Batch& b = batch_;
             const int n = splits(), kv_head = int(piece % a->kv_heads);
             const int64_t row = piece / a->kv_heads, decode = int64_t(b.decode_count()) * n;
             if (row < decode)
                 k_.attention_split(*a, b, int(row / n), kv_head, int(row % n), s.local);
             else
                 k_.attention_row(*a, b, int(b.decode_count() + row - decode), kv_head, s.local);
         });
    step([=] { return int64_t(batch_.decode_count()); },
         [=](int64_t t, const Scratch&) {
             for (int h = 0; h < a->kv_heads; ++h) k_.attention_merge(*a, batch_, int(t), h);
         });
}

void Program::predict(const float* x, const Rows& first, const Rows& second, bool relu,
                      const float* threshold, uint64_t* mask) {
    ScratchPlan plan(*this);
    const auto rows = [this] { return int64_t(batch_.decode_count()); };
    auto in = input_of(x, first.cols);
    auto product =
        std::make_shared<std::vector<Product>>(1, Product{first, nullptr, nullptr, first.count, false});
    auto hidden = input_of(nullptr, second.cols);
    if (is_quantised(second.type)) take_quantised(plan, hidden, max_decode());
    plan.take(max_decode() * first.count * 4, [product, hidden](uint8_t* p) {
        (*product)[0].out = reinterpret_cast<float*>(p);
        hidden->x = reinterpret_cast<float*>(p);
    });
    if (is_quantised(first.type)) {
        take_quantised(plan, in, max_decode());
        quantise(in, rows);
    }
    products(in, product, rows);
    if (relu || is_quantised(second.type))
        step(rows, [this, relu, hidden, product, second](int64_t t, const Scratch&) {
            if (relu) k_.relu((*product)[0].out + t * second.cols, second.cols);
            if (is_quantised(second.type)) k_.quantise(*hidden, int(t));
        });
    const int64_t words = ceil_div(second.count, 64), size = ceil_div(piece_rows(second), 64);
    step([rows, n = ceil_div(words, size)] { return rows() ? n : 0; },
         [=](int64_t piece, const Scratch&) {
             const int64_t end = std::min(words, (piece + 1) * size);
             k_.predict(second, *hidden, threshold, piece * size, end, int(rows()), mask);
         },
         [=](int64_t first, int64_t end) { return stretch(second, first * size * 64, end * size * 64); });
}

void Program::ffn(Ffn args, const float* x) {
    ScratchPlan plan(*this);
    auto f = std::make_shared<Ffn>(args);
    f->hidden_tokens = bounds_.tokens;
    const bool quantised = is_quantised(f->up.type) || (f->gate.base && is_quantised(f->gate.type));
    f->x = Input{x, f->dim(), nullptr, f->dim()};
    if (quantised) {
        const std::shared_ptr<Input> in(f, &f->x);
        take_quantised(plan, in, bounds_.tokens);
        quantise(in, [this] { return count(kTokens); });
    }
    if (f->by_output)
        ffn_by_output(f, plan);
    else
        ffn_by_neuron(f, plan);
}

// Decode rows are cut by neurons, each range with sums of its own; prompt rows by rows, then by outputs.
void Program::ffn_by_neuron(std::shared_ptr<Ffn> f, ScratchPlan& plan) {
    plan.take(bounds_.tokens * f->neurons() * 4,
              [f](uint8_t* p) { f->hidden = reinterpret_cast<float*>(p); });
    plan.take(f->ranges() * max_decode() * sums_of(f->dim()) * 4,
              [f](uint8_t* p) { f->partial = reinterpret_cast<float*>(p); });
    plan.take(f->ranges() * int64_t(sizeof(FfnCounts)),
              [f](uint8_t* p) { f->range_stats = reinterpret_cast<FfnCounts*>(p); });
    const int64_t size = piece_rows(f->up), blocks = ceil_div(f->neurons(), size);
    step([=] { return (batch_.decode_count() ? f->ranges() : 0) + (batch_.prompt_count() ? blocks : 0); },
         [=](int64_t piece, const Scratch& s) {
             const int decode = batch_.decode_count(), ranges = decode ? f->ranges() : 0;
             if (piece < ranges) return k_.ffn_range(*f, decode, int(piece), s.local);
             const int64_t first = (piece - ranges) * size;
             k_.ffn_hidden(*f, first, std::min(size, f->neurons() - first), decode, batch_.tokens_count(),
                           s.local);
         },
         [=](int64_t first, int64_t end) {
             const int64_t ranges = batch_.decode_count() ? f->ranges() : 0;
             if (first >= ranges || f->mask) return Span{};  // which rows a mask names is not known yet
             return stretch(f->first(), f->range_begin(int(first)),
                            f->range_end(int(std::min(end, ranges)) - 1));
         });
    const int64_t groups = padded(f->dim()) / kGroup;
    step([=] { return groups * (batch_.decode_count() + ceil_div(batch_.prompt_count(), kPromptTile)); },
         [=](int64_t piece, const Scratch& s) {
             const int64_t group = piece % groups, row = piece / groups;
             const int decode = batch_.decode_count();
             if (row < decode) {
                 k_.ffn_reduce(*f, decode, int(row), group);
                 if (f->stats && piece == 0 && !batch_.prompt_count())
                     for (int r = 0; r < f->ranges(); ++r) f->stats->add(f->range_stats[r]);
                 return;
             }
             const int t0 = decode + int(row - decode) * kPromptTile;
             k_.ffn_prompt_down(*f, group, t0, std::min(t0 + kPromptTile, batch_.tokens_count()), s.local);
         });
}

// Decode rows whose down lies by output: leaves out what no mask names, reports what fired, counts what is
// read.
static void account_by_output(const Ffn& f, int decode, bool count) {
    const bool skip = f.skip && can_skip(f.activation);
    int64_t pairs = 0;
    for (int t = 0; t < decode; ++t) {
        float* h = f.hidden + t * f.neurons();
        for (int64_t word = 0; word < f.words(); ++word) {
            const uint64_t named = f.mask ? f.mask[t * f.mask_stride + word] : ~uint64_t(0);
            uint64_t fired = 0;
            for (int64_t i = word * 64; i < std::min(f.neurons(), word * 64 + 64); ++i) {
                const bool candidate = named >> (i % 64) & 1;
                if (!candidate) h[i] = 0;
                fired |= uint64_t(h[i] != 0) << (i % 64);
                pairs += candidate && (!skip || h[i] != 0);
            }
            if (f.fired) f.fired[t * f.words() + word] = fired;
        }
    }
    if (!f.stats || !count) return;
    const int64_t n = f.neurons();
    f.stats->add({n, f.gate.base ? n : 0, n, pairs, 0});
}

// Dense: every row is read, and down is a dot over all neurons.
void Program::ffn_by_output(std::shared_ptr<Ffn> f, ScratchPlan& plan) {
    const auto tokens = [this] { return count(kTokens); };
    auto in = input_of(nullptr, f->neurons());  // of down
    plan.take(bounds_.tokens * f->neurons() * 4, [f, in](uint8_t* p) {
        f->hidden = reinterpret_cast<float*>(p);
        in->x = f->hidden;
    });
    const int64_t size = piece_rows(f->up), blocks = ceil_div(f->neurons(), size);
    step([=] { return tokens() ? blocks : 0; },
         [=](int64_t piece, const Scratch& s) {
             const int64_t first = piece * size;
             k_.ffn_hidden(*f, first, std::min(size, f->neurons() - first), 0, int(tokens()), s.local);
         },
         [=](int64_t first, int64_t end) { return stretch(f->first(), first * size, end * size); });
    if (f->mask || f->fired || f->stats)
        step([this] { return int64_t(batch_.decode_count() > 0); },
             [this, f](int64_t, const Scratch&) {
                 account_by_output(*f, batch_.decode_count(), !batch_.prompt_count());
             });
    if (is_quantised(f->down.type)) {
        take_quantised(plan, in, bounds_.tokens);
        quantise(in, tokens);
    }
    auto down = std::make_shared<std::vector<Product>>(
        1, Product{f->down, f->down_bias, f->out, f->down.count, f->accumulate});
    products(in, down, tokens);
}

void Program::add(float* x, const float* y, int64_t dim) {
    step([this] { return count(kTokens); },
         [this, x, y, dim](int64_t t, const Scratch&) { k_.add(x + t * dim, y + t * dim, dim); });
}

void Program::gather(const float* x, float* out, int64_t dim) {
    step([this] { return count(kLogits); },
         [this, x, out, dim](int64_t r, const Scratch&) {
             std::memcpy(out + r * dim, x + batch_.logits_rows[r] * dim, size_t(dim) * 4);
         });
}

}  // namespace hc
