// Programs and their ops.
#include <algorithm>

#include "bind/bind.h"
#include "ops/scratch.h"
#include "program/step_scratch.h"

namespace hc {
namespace {

Index array_of(const nb::handle& batch, const char* name) {
    Index array;
    if (!nb::try_cast(nb::object(batch.attr(name)), array, false))
        throw nb::type_error((std::string("a batch's ") + name + " must be an array of int32").c_str());
    return array;
}

void make_program(BoundProgram* self, const std::string& isa, std::shared_ptr<Pool> pool,
                  const nb::object& batch, int math) {
    const BatchArrays arrays(batch);
    const BatchBounds bounds = arrays.bounds();
    const Kernels& kernels = kernels_of(isa);
    if (math < kSameMath || math > kFastMath || (math != kSameMath && !kernels.tile_input))
        refuse("math " + std::to_string(math) + " of prompt rows: " + kernels.name + " has no tiles for it");
    new (self) BoundProgram{Program(kernels, std::move(pool), arrays.view(), bounds, PromptMath(math)),
                            bounds, arrays};
}

// A weight [groups, n] has a row for each group of n values.
void bind_norm(BoundProgram& p, const Floats& x, const Floats& out, const Maybe<const float>& weight,
               const Maybe<const float>& bias, float eps, bool centre, int of) {
    const int64_t last = x.ndim() ? axis(x, x.ndim() - 1) : 0, width = width_of(x);
    const bool grouped = weight && weight->ndim() == 2;
    const int64_t groups = grouped ? axis(*weight, 0) : 1, size = weight ? int64_t(weight->size()) : last;
    if (size < 1 || x.ndim() < 2 || !(width == size || (!grouped && last == size)))
        refuse("norm: neither the last axis nor a whole row matches the weight");
    if (bias && (int64_t(bias->size()) != size || (weight && bias->ndim() != weight->ndim())))
        refuse("norm: bias and weight differ in shape");
    const RowsOf rows = rows_of(of);
    const float* from = data_of(x, "norm: x", p.rows(rows), width);
    const int64_t dim = size / groups;
    const NormArgs args{weight ? weight->data() : nullptr, bias ? bias->data() : nullptr, eps, centre, dim};
    p.program.norm(args, from, data_of(out, "norm: out", p.rows(rows), width), width / dim, rows, groups);
}

void bind_linear(BoundProgram& p, const Floats& x, const std::vector<const WeightRows*>& weights,
                 const std::vector<Maybe<const float>>& biases, const std::vector<Floats>& outs,
                 bool accumulate, int of, const Maybe<const float>& where, const Maybe<int64_t>& stats) {
    if (weights.empty() || weights.size() != outs.size() || weights.size() != biases.size())
        refuse("linear: as many outs and biases as weights are needed");
    const RowsOf rows = rows_of(of);
    if (where && (weights.size() > 1 || accumulate || rows != kTokens))
        refuse("linear: where is for one weight and all rows, without accumulate");
    if (stats && !where) refuse("linear: rows are counted by where");
    std::vector<Product> products;
    for (size_t i = 0; i < weights.size(); ++i) {
        if (!weights[i]) refuse("linear: a weight is None");
        const Rows& r = plain_rows(*weights[i], "linear");
        if (r.cols != weights[0]->rows.cols) refuse("linear: the weights differ in width");
        products.push_back({r, vector_of(biases[i], "linear: bias", r.count),
                            data_of(outs[i], "linear: out", p.rows(rows), r.count), r.count, accumulate});
    }
    if (where) {
        products[0].where = data_of(*where, "linear: where", p.rows(rows), products[0].stride);
        products[0].stats =
            reinterpret_cast<FfnCounts*>(vector_of(stats, "linear: stats", sizeof(FfnCounts) / 8));
    }
    p.program.linear(data_of(x, "linear: x", p.rows(rows), weights[0]->rows.cols), products, rows);
}

void bind_linear_heads(BoundProgram& p, const Floats& x, const WeightRows& weights, const Floats& out) {
    const Rows& w = plain_rows(weights, "linear_heads");
    const int64_t rows = p.rows(kTokens);
    if (x.ndim() != 3 || out.ndim() != 3) refuse("linear_heads: x and out must be [T, H, values]");
    const int64_t heads = axis(x, 1), width = axis(x, 2), head_rows = axis(out, 2);
    if (heads < 1 || head_rows < 1 || heads * head_rows != w.count || width < w.cols)
        refuse("linear_heads: weights must be [H * rows, columns], x no narrower than the columns");
    p.program.linear_heads(data_of(x, "linear_heads: x", rows, heads * width), width, w, heads,
                           data_of(out, "linear_heads: out", rows, w.count));
}

void bind_join_heads(BoundProgram& p, const Floats& x, const Floats& y, const Floats& out) {
    if (x.ndim() != 3 || y.ndim() != 3) refuse("join_heads: x and y must be [T, H, values]");
    const int64_t rows = p.rows(kTokens), heads = axis(x, 1), n = axis(x, 2), m = axis(y, 2);
    p.program.join_heads(data_of(x, "join_heads: x", rows, heads * n),
                         data_of(y, "join_heads: y", rows, heads * m),
                         data_of(out, "join_heads: out", rows, heads * (n + m)), heads, n, m);
}

void bind_rope(BoundProgram& p, const Floats& x, const Array<const float>& cos, const Array<const float>& sin,
               bool interleaved) {
    if (x.ndim() != 3 || cos.ndim() != 2)
        refuse("rope: x must be [T, H, head_dim], cos and sin [P, rotary / 2]");
    const int64_t heads = int64_t(x.shape(1)), head_dim = int64_t(x.shape(2)), half = int64_t(cos.shape(1));
    if (2 * half > head_dim) refuse("rope: the table is wider than a head");
    const int64_t positions = int64_t(cos.shape(0));
    const RopeArgs args{cos.data(), data_of(sin, "rope: sin", positions, half), half, interleaved};
    p.program.rope(args, positions, data_of(x, "rope: x", p.rows(kTokens), heads * head_dim), heads,
                   head_dim);
}

// Caches are [page, K, kPage, head_dim]: float32, float16 passed as uint16, or Q8_0 blocks as bytes.
using CacheArray = nb::ndarray<nb::c_contig, nb::device::cpu, nb::ndim<4>>;

Cache cache_of(const CacheArray& k, const CacheArray& v) {
    const auto is = [&](nb::dlpack::dtype type) { return k.dtype() == type; };
    if (k.dtype() != v.dtype() ||
        !(is(nb::dtype<float>()) || is(nb::dtype<uint16_t>()) || is(nb::dtype<uint8_t>())))
        throw nb::type_error("the KV cache must be float16, float32 or uint8");
    const Type type = is(nb::dtype<float>()) ? F32 : is(nb::dtype<uint16_t>()) ? F16 : Q8_0;
    if (k.shape(2) != size_t(kPage)) refuse("the KV cache must be [page, K, 32, head_dim]");
    for (size_t i = 0; i < 4; ++i) {
        if (k.shape(i) != v.shape(i)) refuse("the K and V caches differ in shape");
        if (k.shape(i) < 1)
            refuse("the KV cache has no values: its axis " + std::to_string(i) +
                   " is 0, at least 1 is needed");
    }
    const auto width = int64_t(k.shape(3)), block = int64_t(block_size(Q8_0).bytes);
    if (type == Q8_0 && width % block) refuse("a row of the Q8_0 KV cache must be blocks of 34 bytes");
    const int64_t head_dim = type == Q8_0 ? width / block * kBlock : width;
    auto *k_data = static_cast<uint8_t*>(k.data()), *v_data = static_cast<uint8_t*>(v.data());
    return {k_data, v_data, type, int64_t(k.shape(0)), int64_t(k.shape(1)), head_dim};
}

void bind_store_kv(BoundProgram& p, const Floats& k, const Floats& v, const CacheArray& k_cache,
                   const CacheArray& v_cache) {
    const Cache c = cache_of(k_cache, v_cache);
    const int64_t rows = p.rows(kTokens), width = c.kv_heads * c.head_dim;
    p.program.store_kv(data_of(k, "store_kv: k", rows, width), data_of(v, "store_kv: v", rows, width), c);
}

void bind_attention(BoundProgram& p, const Floats& q, const CacheArray& k_cache, const CacheArray& v_cache,
                    const Floats& out, float scale, std::optional<int> window, bool chunked,
                    const Maybe<const float>& sinks, std::optional<float> softcap) {
    const Cache c = cache_of(k_cache, v_cache);
    const int64_t heads = axis(q, 1), group = heads / c.kv_heads;
    if (q.ndim() != 3 || axis(q, 2) != c.head_dim || group < 1 || heads % c.kv_heads || heads > INT32_MAX)
        refuse("attention: q must be [T, H, head_dim] with H a multiple of the cache's heads");
    check_scratch(attention_scratch(group, c.head_dim), "attention: " + std::to_string(group) + " heads of " +
                                                            std::to_string(c.head_dim) +
                                                            " that share a kv head");
    const int64_t rows = p.rows(kTokens), width = heads * c.head_dim;
    Attention a{};
    a.q = data_of(q, "attention: q", rows, width);
    a.out = data_of(out, "attention: out", rows, width);
    a.k_cache = c.k;
    a.v_cache = c.v;
    a.cache_type = c.type;
    a.heads = int(heads);
    a.kv_heads = int(c.kv_heads);
    a.head_dim = int(c.head_dim);
    a.scale = scale;
    if (window && *window < 1) refuse("attention: a window of less than one position");
    if (softcap && !(*softcap > 0)) refuse("attention: a softcap that is not above 0");
    if (window) a.window = *window;
    a.chunked = chunked;
    if (softcap) a.softcap = *softcap;
    a.sinks = vector_of(sinks, "attention: sinks", heads);
    p.program.attention(a, c.pages);
}

void bind_embed(BoundProgram& p, const WeightRows& table, const Floats& out, int by, bool accumulate) {
    const Rows& rows = plain_rows(table, "embed");
    if (by != kByToken && by != kByPosition)
        refuse("embed: by " + std::to_string(by) + ": choose 0 (tokens) or 1 (positions)");
    check_scratch(embed_scratch(rows.type, rows.cols, accumulate),
                  "embed: rows of " + std::to_string(rows.cols) + " columns in this block type");
    p.program.embed(rows, data_of(out, "embed: out", p.rows(kTokens), rows.cols), IndexedBy(by), accumulate);
}

void bind_add(BoundProgram& p, const Floats& x, const Floats& y, float keep, float scale) {
    const int64_t dim = width_of(x), rows = p.rows(kTokens);
    p.program.add(data_of(x, "add: x", rows, dim), data_of(y, "add: y", rows, dim), dim, keep, scale);
}

void bind_gather(BoundProgram& p, const Floats& x, const Floats& out) {
    const int64_t dim = width_of(x);
    const float* from = data_of(x, "gather: x", p.rows(kTokens), dim);
    p.program.gather(from, data_of(out, "gather: out", p.rows(kLogits), dim), dim);
}

void bind_softcap(BoundProgram& p, const Floats& logits, float cap) {
    if (!(cap > 0)) refuse("softcap: a cap that is not above 0");
    const int64_t vocab = width_of(logits);
    p.program.softcap(data_of(logits, "softcap: logits", p.rows(kLogits), vocab), vocab, cap);
}

int64_t bind_scratch(const std::string& isa, int64_t tokens, int64_t logits, int64_t pages_per_sequence,
                     int64_t dim, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t neurons,
                     int64_t experts, int64_t chosen, int64_t shared, bool by_output, int math) {
    for (const int64_t count : {tokens, dim, kv_heads, head_dim, neurons, experts, chosen})
        if (count < 1) refuse("scratch of a step: at least one of everything is needed");
    const StepShape shape{
        tokens, logits,    pages_per_sequence, dim, heads, kv_heads, head_dim, neurons, experts, chosen,
        shared, by_output, PromptMath(math)};
    return int64_t(step_scratch_bytes(kernels_of(isa), shape));
}

// Runs without the GIL.
void bind_run(BoundProgram& p, const Maybe<int64_t>& nanoseconds) {
    const std::function<void()> check = check_signals();
    int64_t* spent = vector_of(nanoseconds, "run: nanoseconds", int64_t(p.program.steps()));
    nb::gil_scoped_release release;
    p.program.run(check, spent);
}

}  // namespace

BatchArrays::BatchArrays(const nb::handle& batch)
    : counts(array_of(batch, "counts")),
      tokens(array_of(batch, "tokens")),
      positions(array_of(batch, "positions")),
      sequence(array_of(batch, "sequence")),
      slots(array_of(batch, "slots")),
      pages(array_of(batch, "pages")),
      lengths(array_of(batch, "lengths")),
      logits_rows(array_of(batch, "logits_rows")),
      first_rows(array_of(batch, "first_rows")),
      row_counts(array_of(batch, "row_counts")),
      state_from(array_of(batch, "state_from")),
      state_to(array_of(batch, "state_to")) {
    if (pages.ndim() != 2) refuse("a batch's pages must be [sequences, pages per sequence]");
    if (!tokens.size()) refuse("a batch has room for 0 tokens: at least 1 is needed");
    bool agree = counts.size() == 4 && lengths.size() == pages.shape(0);
    for (const Index* array : {&positions, &sequence, &slots, &state_to})
        agree &= array->size() == tokens.size();
    for (const Index* array : {&first_rows, &row_counts, &state_from})
        agree &= array->size() == lengths.size();
    if (!agree) refuse("a batch's arrays disagree about its limits");
}

Batch BatchArrays::view() const {
    Batch b{};
    b.counts = counts.data();
    b.tokens = tokens.data();
    b.positions = positions.data();
    b.sequence = sequence.data();
    b.slots = slots.data();
    b.pages = pages.data();
    b.lengths = lengths.data();
    b.logits_rows = logits_rows.data();
    b.pages_per_sequence = axis(pages, 1);
    b.first_rows = first_rows.data();
    b.row_counts = row_counts.data();
    b.state_from = state_from.data();
    b.state_to = state_to.data();
    return b;
}

nb::class_<BoundProgram> bind_ops(nb::module_& m) {
    nb::class_<BoundProgram> program(m, "Program");
    program
        .def("__init__", &make_program, "isa"_a, "pool"_a, "batch"_a, "math"_a = 0,
             nb::sig("def __init__(self, isa: str, pool: Pool, batch: hotcold.kernels.backend.Batch, "
                     "math: int = 0) -> None"))
        .def("embed", &bind_embed, "table"_a, "out"_exact, "by"_a, "accumulate"_a)
        .def("norm", &bind_norm, "x"_exact, "out"_exact, "weight"_maybe, "bias"_maybe, "eps"_a, "centre"_a,
             "rows"_a)
        .def("linear", &bind_linear, "x"_exact, "weights"_a, "biases"_exact, "outs"_exact, "accumulate"_a,
             "rows"_a, "where"_maybe, "stats"_maybe)
        .def("linear_heads", &bind_linear_heads, "x"_exact, "weights"_a, "out"_exact)
        .def("join_heads", &bind_join_heads, "x"_exact, "y"_exact, "out"_exact)
        .def("rope", &bind_rope, "x"_exact, "cos"_exact, "sin"_exact, "interleaved"_a)
        .def("store_kv", &bind_store_kv, "k"_exact, "v"_exact, "k_cache"_exact, "v_cache"_exact)
        .def("attention", &bind_attention, "q"_exact, "k_cache"_exact, "v_cache"_exact, "out"_exact,
             "scale"_a, "window"_a.none(), "chunked"_a, "sinks"_maybe, "softcap"_a.none())
        .def("add", &bind_add, "x"_exact, "y"_exact, "keep"_a, "scale"_a)
        .def("gather", &bind_gather, "x"_exact, "out"_exact)
        .def("softcap", &bind_softcap, "logits"_exact, "cap"_a)
        .def_prop_ro("scratch_bytes", [](BoundProgram& p) { return p.program.scratch_bytes(); })
        .def_prop_ro("steps", [](BoundProgram& p) { return p.program.steps(); })
        .def("run", &bind_run, "nanoseconds"_maybe = nb::none());
    m.def("step_scratch_bytes", &bind_scratch, nb::kw_only(), "isa"_a, "tokens"_a, "logits"_a,
          "pages_per_sequence"_a, "dim"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "neurons"_a, "experts"_a,
          "chosen"_a, "shared"_a, "by_output"_a, "math"_a);
    return program;
}

}  // namespace hc
