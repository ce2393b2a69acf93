#include "program/program.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "program/program_parts.h"

namespace hc {

namespace {

constexpr int64_t kSerialValues = 2048;  // keys of a step that one thread stores, with their values

constexpr int kSerialSplits = 16;  // splits of a row that one piece merges for all kv heads

constexpr int kBlockQueries = 192;   // maximum queries of a kv head that share one reading of the cache
constexpr int kFewestQueries = 48;   // minimum, even with many threads
constexpr int kPiecesPerThread = 4;  // so that all threads end together

// Prompt rows of one piece: fewer with many threads, 0 if no block fits a thread's scratch.
// Pieces are about equal, since each of them decodes the whole cache.
int block_rows(const Attention& a, int64_t rows, int threads) {
    const int64_t group = a.group(), pieces = ceil_div(kPiecesPerThread * threads, a.kv_heads);
    int64_t most = std::max<int64_t>(1, kBlockQueries / group);
    while (most && attention_block_scratch(most * group, a.head_dim) > int64_t(kLocalBytes)) --most;
    const int64_t n = std::min(most, std::max(ceil_div(kFewestQueries, group), rows / pieces));
    return int(n && rows ? ceil_div(rows, ceil_div(rows, n)) : n);
}

// NaN ranks last.
bool ranks_above(float a, float b) { return a > b || (std::isnan(b) && !std::isnan(a)); }

// The rank of a group of `count` experts.
float group_rank(const float* ranks, int count, int best) {
    float first = ranks[0], second = 0;
    for (int i = 1; i < count; ++i) {
        const bool above = ranks_above(ranks[i], first);
        if (i == 1 || above || ranks_above(ranks[i], second)) second = above ? first : ranks[i];
        if (above) first = ranks[i];
    }
    return best == 2 && count > 1 ? first + second : first;
}

// Computes the selection bias of one row: the router's bias, but NaN for experts outside the used groups.
void leave_groups_out(const ExpertGroups& groups, const Router& r, const float* logits, float* bias) {
    float ranks[kMaxExperts], group_ranks[kMaxExpertGroups], sum = 0;
    const float largest = *std::max_element(logits, logits + r.experts);
    for (int e = 0; e < r.experts; ++e) {
        ranks[e] = r.softmax ? std::exp(logits[e] - largest) : 1 / (1 + std::exp(-logits[e]));
        sum += ranks[e];
    }
    for (int e = 0; e < r.experts; ++e) {
        bias[e] = r.selection_bias ? r.selection_bias[e] : 0;
        ranks[e] = (r.softmax ? ranks[e] / sum : ranks[e]) + bias[e];
    }
    const int size = r.experts / groups.count;
    for (int g = 0; g < groups.count; ++g) group_ranks[g] = group_rank(ranks + g * size, size, groups.best);
    for (int g = 0; g < groups.count; ++g) {
        int above = 0;
        for (int o = 0; o < groups.count; ++o)
            above += ranks_above(group_ranks[o], group_ranks[g]) ||
                     (o < g && !ranks_above(group_ranks[g], group_ranks[o]));
        if (above >= groups.used) std::fill_n(bias + g * size, size, std::numeric_limits<float>::quiet_NaN());
    }
}

// The largest number of splits of a decode row.
int max_splits(const Attention& a, const Batch& b) {
    int m = 0;
    for (int t = 0; t < b.decode_count(); ++t) m = std::max(m, a.splits(b.positions[t]));
    return m;
}

}  // namespace

void Program::run(const std::function<void()>& check_interrupt, int64_t* nanoseconds) {
    check_batch(batch_, bounds_);
    if (bounds_.states >= 0) check_states(batch_, bounds_, active_);
    if (!shared_) {
        shared_ = pool_->shared_scratch(shared_bytes_);
        for (const Part& part : parts_) part.set(shared_.get() + part.at);
    }
    pool_->run(steps_, shared_.get(), check_interrupt, nanoseconds);
}

void Program::step(std::function<int64_t()> pieces, std::function<void(int64_t, const Scratch&)> run,
                   std::function<Span(int64_t, int64_t)> reads) {
    if (shared_)
        throw std::invalid_argument("this program has run: its scratch is laid out, no op can follow");
    steps_.push_back({std::move(pieces), std::move(run), std::move(reads)});
}

void Program::embed(const Rows& table, float* out, IndexedBy by, bool accumulate) {
    int64_t& bound = by == kByToken ? bounds_.vocab : bounds_.positions;
    bound = std::min(bound, table.count);
    const int32_t* index = by == kByToken ? batch_.tokens : batch_.positions;
    step([this] { return count(kTokens); },
         [=](int64_t t, const Scratch& s) {
             float* to = out + t * table.cols;
             if (!accumulate) return k_.decode_row(table, index[t], to, s.local);
             auto* row = reinterpret_cast<float*>(s.local + decode_row_scratch(table.type, table.cols));
             k_.decode_row(table, index[t], row, s.local);
             k_.add(to, row, table.cols, 1, 1);
         });
}

void Program::norm(const NormArgs& args, const float* x, float* out, int64_t rows_per_token, RowsOf rows,
                   int64_t groups) {
    step([this, rows] { return count(rows); },
         [this, args, x, out, rows_per_token, groups](int64_t t, const Scratch&) {
             for (int64_t r = t * rows_per_token; r < (t + 1) * rows_per_token; ++r) {
                 NormArgs row_args = args;
                 if (row_args.weight) row_args.weight += r % groups * args.dim;
                 if (row_args.bias) row_args.bias += r % groups * args.dim;
                 k_.norm(row_args, x + r * args.dim, out + r * args.dim);
             }
         });
}

void Program::take_quantised(ScratchPlan& plan, std::shared_ptr<Input> in, int64_t max_rows) {
    plan.take(max_rows * Input::token_bytes(in->cols), [in](uint8_t* p) { in->quantised = p; });
}

void Program::quantise(std::shared_ptr<Input> in, std::function<int64_t()> rows) {
    step(std::move(rows), [this, in](int64_t t, const Scratch&) { k_.quantise(*in, int(t)); });
}

void Program::prepare(ScratchPlan& plan, std::shared_ptr<Input> in, Meets meets, int64_t max_rows,
                      std::function<int64_t()> rows, bool plain_math) {
    if (meets.quantised) {
        take_quantised(plan, in, max_rows);
        quantise(in, rows);
    }
    if (meets.plain && max_rows >= kLeastArranged) {
        plan.take(max_rows * Input::arranged_stride(in->cols) * 4,
                  [in](uint8_t* p) { in->arranged = reinterpret_cast<float*>(p); });
        step([rows] { return rows() >= kLeastArranged ? rows() : 0; },
             [this, in](int64_t t, const Scratch&) { k_.arrange(*in, int(t)); });
    }
    if (plain_math && math_ != kSameMath) return;
    if (take_tiled(plan, in, meets, max_rows)) tile(in, rows);
}

bool Program::take_tiled(ScratchPlan& plan, std::shared_ptr<Input> in, Meets meets, int64_t max_rows) {
    in->math = math_ == kSplitMath && !meets.plain ? kSameMath : math_;
    in->bf16 = meets.bf16;
    in->tiled_codes = meets.quantised && in->math != kFastMath && max_rows >= kLeastTiled;
    if (!k_.tile_input || !(in->has_high() || in->tiled_codes)) return false;
    plan.take((max_rows + kTilesBehind) * in->tiled_bytes(), [in](uint8_t* p) { in->tiled = p; });
    return true;
}

void Program::tile(std::shared_ptr<Input> in, std::function<int64_t()> rows) {
    step([this, in, rows] { return any_tiled(*in, rows()) ? rows() : 0; },
         [this, in](int64_t t, const Scratch&) { k_.tile_input(*in, int(t)); });
}

// Counts the rows of a product that decode rows read (the step has only decode rows), and the pairs of row
// and token.
static void count_wanted(const Product& p, int tokens) {
    int64_t rows = 0, pairs = 0;
    for (int64_t r = 0; r < p.rows.count; ++r) {
        int wanted = 0;
        for (int t = 0; t < tokens; ++t) wanted += p.wanted(t, r);
        rows += wanted > 0;
        pairs += wanted;
    }
    p.stats->add({0, rows, 0, pairs, 0});
}

// Multiplies the same input by several products, in pieces: blocks of rows, one product after another.
void Program::products(std::shared_ptr<Input> in, std::shared_ptr<std::vector<Product>> all,
                       std::function<int64_t()> rows) {
    std::vector<EvenCut::Part> parts;
    for (const Product& p : *all) parts.push_back(part_of(p.rows));
    auto cut = std::make_shared<const EvenCut>(parts, pool_->threads());
    step([rows, n = cut->pieces()] { return rows() ? n : 0; },
         [this, in, all, cut, rows](int64_t piece, const Scratch& s) {
             const int tokens = int(rows());
             cut->each(piece, [&](size_t i, int64_t first, int64_t count) {
                 const Product& p = (*all)[i];
                 if (!p.where)
                     return by_kind(*in, batch_.decode_count(), tokens, [&](const Input& x, int t0, int t1) {
                         k_.product(p, x, first, count, t0, t1, s.local);
                     });
                 if (p.stats && first == 0 && !batch_.prompt_count()) count_wanted(p, tokens);
                 const int decode = batch_.decode_count();
                 if (decode) k_.product(p, in->of_decode_rows(), first, count, 0, decode, s.local);
                 Product rest = p;
                 rest.where = nullptr;
                 if (decode < tokens) k_.product(rest, *in, first, count, decode, tokens, s.local);
             });
         },
         [all, cut](int64_t piece, int64_t end) {
             const EvenCut::Stretch range = cut->stretch(piece, end);
             const Product& p = (*all)[range.part];
             if (p.where) return Span{};  // the rows that will be read are not known yet
             return stretch(p.rows, range.first, range.end);
         });
}

void Program::linear(const float* x, const std::vector<Product>& list, RowsOf rows) {
    ScratchPlan plan(*this);
    Meets meets{};
    for (const Product& p : list) meets.with(p.rows, k_.tile_input && rows == kTokens);
    auto in = input_of(x, list[0].rows.cols);
    const auto n = [this, rows] { return count(rows); };
    prepare(plan, in, meets, max_rows(rows), n, rows == kLogits);
    products(in, std::make_shared<std::vector<Product>>(list), n);
}

void Program::linear_heads(const float* x, int64_t width, const Rows& weights, int64_t heads, float* out) {
    ScratchPlan plan(*this);
    const int64_t head_rows = weights.count / heads, cols = weights.cols, most = bounds_.tokens;
    auto in = std::make_shared<std::vector<Input>>();
    auto all = std::make_shared<std::vector<Product>>();
    for (int64_t h = 0; h < heads; ++h) {
        in->push_back({x + h * width + width - cols, heads * width, nullptr, cols});
        Rows head_weights = weights;
        head_weights.base = weights.row(h * head_rows);
        if (head_weights.factors) head_weights.factors += h * head_rows;
        head_weights.count = head_rows;
        all->push_back({head_weights, nullptr, out + h * head_rows, heads * head_rows, false});
    }
    const auto tokens = [this] { return count(kTokens); };
    if (is_quantised(weights.type)) {
        const int64_t bytes = most * Input::token_bytes(cols);
        plan.take(heads * bytes, [in, bytes](uint8_t* p) {
            for (size_t h = 0; h < in->size(); ++h) (*in)[h].quantised = p + int64_t(h) * bytes;
        });
        step([=] { return tokens() * heads; },
             [=](int64_t i, const Scratch&) { k_.quantise((*in)[size_t(i % heads)], int(i / heads)); });
    } else if (most >= kLeastArranged) {
        const int64_t bytes = most * Input::arranged_stride(cols) * 4;
        plan.take(heads * bytes, [in, bytes](uint8_t* p) {
            for (size_t h = 0; h < in->size(); ++h)
                (*in)[h].arranged = reinterpret_cast<float*>(p + int64_t(h) * bytes);
        });
        step([=] { return tokens() >= kLeastArranged ? tokens() * heads : 0; },
             [=](int64_t i, const Scratch&) { k_.arrange((*in)[size_t(i % heads)], int(i / heads)); });
    }
    const int64_t size = piece_rows((*all)[0].rows), pieces = ceil_div(head_rows, size);
    step([=] { return tokens() ? heads * pieces : 0; },
         [=](int64_t piece, const Scratch& s) {
             const auto h = size_t(piece / pieces);
             const int64_t first = piece % pieces * size, n = std::min(size, head_rows - first);
             k_.product((*all)[h], (*in)[h], first, n, 0, int(tokens()), s.local);
         },
         [=](int64_t piece, int64_t end) {
             const auto row = [=](int64_t i) {
                 return i / pieces * head_rows + std::min(i % pieces * size, head_rows);
             };
             return stretch(weights, row(piece), row(end));
         });
}

void Program::join_heads(const float* x, const float* y, float* out, int64_t heads, int64_t n, int64_t m) {
    step([this] { return count(kTokens); },
         [=](int64_t t, const Scratch&) {
             for (int64_t row = t * heads; row < (t + 1) * heads; ++row) {
                 std::memcpy(out + row * (n + m), x + row * n, size_t(n) * 4);
                 std::memcpy(out + row * (n + m) + n, y + row * m, size_t(m) * 4);
             }
         });
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
    // For few rows, one thread stores all before another would wake up.
    const int64_t most = kSerialValues / (c.kv_heads * c.head_dim);
    step([this, c, most] { return count(kTokens) > most ? c.kv_heads : int64_t(count(kTokens) > 0); },
         [=](int64_t piece, const Scratch&) {
             const int64_t bytes = row_bytes(c.type, c.head_dim), tokens = count(kTokens);
             for (int64_t h = piece, end = tokens > most ? h + 1 : c.kv_heads; h < end; ++h)
                 for (int64_t t = 0; t < tokens; ++t) {
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
    args.max_splits = int(std::min(ceil_div(batch_.pages_per_sequence * kPage, kSplit),
                                   ceil_div(int64_t(args.window) - 1, kSplit) + 1));
    auto a = std::make_shared<Attention>(args);
    plan.take(max_decode() * a->kv_heads * a->max_splits * a->partial_floats() * 4,
              [a](uint8_t* p) { a->partial = reinterpret_cast<float*>(p); });
    const auto splits = [this, a] { return max_splits(*a, batch_); };
    const auto block = [this, a] { return block_rows(*a, batch_.prompt_count(), pool_->threads()); };
    // Decode rows are cut by splits, prompt rows into blocks.
    step(
        [=] {
            const int64_t blocks = ceil_div(batch_.prompt_count(), std::max(1, block()));
            return int64_t(a->kv_heads) * (batch_.decode_count() * splits() + blocks);
        },
        [=](int64_t piece, const Scratch& s) {
            const Batch& b = batch_;
            const int n = splits(), kv_head = int(piece % a->kv_heads);
            const int64_t row = piece / a->kv_heads, decode = int64_t(b.decode_count()) * n;
            if (row < decode) return k_.attention_split(*a, b, int(row / n), kv_head, int(row % n), s.local);
            const int rows = block(), first = b.decode_count() + int(row - decode) * std::max(1, rows);
            if (rows)
                k_.attention_block(*a, b, first, std::min(first + rows, b.tokens_count()), kv_head, s.local);
            else
                k_.attention_row(*a, b, first, kv_head, s.local);
        });
    // A few partial results are merged before other threads would wake up.
    const auto parts = [=] { return splits() > kSerialSplits ? a->kv_heads : 1; };
    step([=] { return int64_t(batch_.decode_count()) * parts(); },
         [=](int64_t piece, const Scratch&) {
             const int n = parts(), heads = a->kv_heads / n, first = int(piece % n) * heads;
             for (int h = first; h < first + heads; ++h) k_.attention_merge(*a, batch_, int(piece / n), h);
         });
}

void Program::choose(const Router& r, const ExpertGroups& groups, const float* logits, int32_t* ids,
                     float* factors) const {
    Router in_groups = r;
    float bias_in_groups[kMaxExperts];
    if (groups.used < groups.count) {
        leave_groups_out(groups, r, logits, bias_in_groups);
        in_groups.selection_bias = bias_in_groups;
    }
    k_.router(in_groups, logits, ids, factors);
}

void Program::router(const float* x, const Rows& weights, const float* bias, const Router& r,
                     const float* expert_scale, int32_t* ids, float* factors, const ExpertGroups& groups) {
    ScratchPlan plan(*this);
    const auto tokens = [this] { return count(kTokens); };
    auto in = input_of(x, weights.cols);
    Meets meets{};
    meets.with(weights, false);
    prepare(plan, in, meets, bounds_.tokens, tokens, true);
    auto logits =
        std::make_shared<std::vector<Product>>(1, Product{weights, bias, nullptr, weights.count, false});
    plan.take(bounds_.tokens * weights.count * 4,
              [logits](uint8_t* p) { (*logits)[0].out = reinterpret_cast<float*>(p); });
    products(in, logits, tokens);
    step(tokens, [=](int64_t t, const Scratch&) {
        choose(r, groups, (*logits)[0].out + t * r.experts, ids + t * r.chosen, factors + t * r.chosen);
        for (int64_t i = t * r.chosen; expert_scale && i < (t + 1) * r.chosen; ++i)
            factors[i] *= expert_scale[ids[i]];
    });
}

void Program::add(float* x, const float* y, int64_t dim, float keep, float scale) {
    step([this] { return count(kTokens); },
         [=](int64_t t, const Scratch&) { k_.add(x + t * dim, y + t * dim, dim, keep, scale); });
}

void Program::gather(const float* x, float* out, int64_t dim) {
    step([this] { return count(kLogits); },
         [this, x, out, dim](int64_t r, const Scratch&) {
             std::memcpy(out + r * dim, x + batch_.logits_rows[r] * dim, size_t(dim) * 4);
         });
}

void Program::softcap(float* logits, int64_t vocab, float cap) {
    step([this] { return count(kLogits); },
         [=](int64_t r, const Scratch&) { k_.softcap(cap, logits + r * vocab, vocab); });
}

}  // namespace hc
