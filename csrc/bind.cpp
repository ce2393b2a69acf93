// The only file that knows nanobind: it checks dtypes, shapes, contiguity, and hands pointers to the program.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>

#include "fill.h"
#include "kernels.h"
#include "memory.h"
#include "pack.h"
#include "program.h"
#include "scratch.h"
#include "top_k.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hc {
namespace {

template <class T> using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;
template <class T> using Maybe = std::optional<Array<T>>;
using Floats = Array<float>;

// Arguments that are taken exactly as they are, nothing is converted or copied; and those that may be None.
auto operator""_exact(const char* name, size_t) { return nb::arg(name).noconvert(); }
auto operator""_maybe(const char* name, size_t) { return nb::arg(name).none().noconvert(); }

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

// Of an axis; 0 where there is none.
template <class A> int64_t axis(const A& a, size_t i) { return i < a.ndim() ? int64_t(a.shape(i)) : 0; }

// Values of one row of an array [rows, ...].
template <class A> int64_t width_of(const A& a) {
    int64_t width = 1;
    for (size_t i = 1; i < a.ndim(); ++i) width *= int64_t(a.shape(i));
    return width;
}

void check_scratch(int64_t bytes, const std::string& what) {
    if (bytes > int64_t(kLocalBytes))
        refuse(what + " take " + std::to_string(bytes) + " bytes of a thread's scratch; allowed: up to " +
               std::to_string(kLocalBytes));
}

// The data of an array [>= rows, ...] whose further axes hold `width` values.
template <class T> T* data_of(const Array<T>& a, const char* name, int64_t rows, int64_t width) {
    const int64_t inner = width_of(a);
    if (axis(a, 0) < rows || inner != width)
        refuse(std::string(name) + ": expected at least " + std::to_string(rows) + " rows of " +
               std::to_string(width) + ", got " + std::to_string(axis(a, 0)) + " of " +
               std::to_string(inner));
    return a.data();
}

template <class T> T* vector_of(const Maybe<T>& a, const char* name, int64_t n) {
    return a ? data_of(*a, name, n, 1) : nullptr;
}

// The thread on which Python calls signal handlers; set when the module is loaded.
unsigned long main_thread;

// What a pool's run may ask without the GIL, so that Ctrl-C soon ends it with what Python's handler raises.
// Nothing on other threads, where Python calls no handler.
std::function<void()> check_signals() {
    if (PyThread_get_thread_ident() != main_thread) return {};
    return [] {
        nb::gil_scoped_acquire acquire;
        if (PyErr_CheckSignals()) nb::raise_python_error();
    };
}

// Rows that live in a Memory, perhaps in panels; keeps it alive.
struct WeightRows {
    std::shared_ptr<Memory> memory;
    Rows rows;
    Panels panels;
};

WeightRows weight_rows(std::shared_ptr<Memory> memory, int64_t offset, int64_t stride, int64_t count,
                       int64_t cols, int type) {
    const int64_t bytes = row_size(Type(type), cols);
    if (offset < 0 || count < 1 || stride < bytes ||
        offset + (count - 1) * stride + bytes > int64_t(memory->size()))
        refuse("rows lie outside their memory");
    const Rows rows{memory->data() + offset, stride, count, cols, Type(type)};
    return {std::move(memory), rows, {}};
}

// Bytes of a matrix (dim, neurons) in panels.
int64_t panels_size(int64_t dim, int64_t neurons, int type) {
    row_size(Type(type), neurons);
    const Panels panels = panels_of(Type(type), dim);
    return neurons / panels.neurons * panels.bytes();
}

// A matrix (dim, neurons) as panels, which fill a memory of their own.
WeightRows panel_rows(std::shared_ptr<Memory> memory, int64_t dim, int64_t neurons, int type) {
    if (dim < 1 || neurons < 1 || panels_size(dim, neurons, type) > int64_t(memory->size()))
        refuse("panels lie outside their memory");
    const Panels panels = panels_of(Type(type), dim);
    const int64_t outputs = (dim + kBlock - 1) / kBlock * kBlock;
    const Rows rows{memory->data(), panels.row, neurons, outputs, Type(type)};
    return {std::move(memory), rows, panels};
}

using Numbers = Maybe<const int64_t>;

// Fills weights from `rows` rows of a tensor, or from those chosen of them; by output, from its columns.
int fill_weights(const WeightRows& to, Source source, bool by_output, const Numbers& chosen, Pool& pool) {
    const Target target{to.rows, to.panels, by_output};
    const Rows& r = to.rows;
    const int64_t block = block_size(r.type).bytes, per_column = by_output ? block_size(r.type).weights : 1;
    // Of what is filled: file rows, or columns of blocks.
    const int64_t wanted = r.count / per_column, there = by_output ? source.row_bytes / block : source.rows;
    if (to.panels.neurons ? !by_output || (source.rows + kBlock - 1) / kBlock * kBlock != r.cols
                          : by_output && (is_quantised(r.type) || source.rows != r.cols))
        refuse("the tensor does not fit the panels or rows");
    if (by_output ? source.row_bytes % block : source.row_bytes != row_size(r.type, r.cols))
        refuse("the tensor's rows do not fit the weights");
    if (chosen ? int64_t(chosen->size()) != wanted : there != wanted)
        refuse("the tensor does not have as many rows as the weights");
    for (int64_t i = 0; chosen && i < wanted; ++i) {
        const int64_t seen = chosen->data()[i];
        if (seen < 0 || seen >= there || (i && seen <= chosen->data()[i - 1]))
            refuse("chosen rows must be those of the tensor, in ascending order");
    }
    source.chosen = chosen ? chosen->data() : nullptr;
    const std::function<void()> check = check_signals();
    nb::gil_scoped_release release;
    return fill(target, source, pool, check);
}

// Packs file rows [rows, row_bytes] that lie in memory.
void pack_tensor(const WeightRows& to, const Array<const uint8_t>& from, Pool& pool, bool by_output,
                 const Numbers& chosen) {
    if (from.ndim() != 2) refuse("tensor: [rows, row_bytes] is needed");
    Source source;
    source.data = from.data();
    source.rows = int64_t(from.shape(0));
    source.row_bytes = int64_t(from.shape(1));
    fill_weights(to, source, by_output, chosen, pool);
}

// The same of an open file from byte `offset` on. OSError: a read failed; EOFError: the file ended.
void read_tensor(const WeightRows& to, int file, int64_t offset, int64_t rows, int64_t row_bytes, Pool& pool,
                 bool by_output, const Numbers& chosen) {
    if (file < 0 || offset < 0 || rows < 1 || row_bytes < 1) refuse("no such part of a file");
    Source source;
    source.file = file;
    source.offset = offset;
    source.rows = rows;
    source.row_bytes = row_bytes;
    const int error = fill_weights(to, source, by_output, chosen, pool);
    if (!error) return;
    if (error == kEnded) {
        PyErr_SetString(PyExc_EOFError, "the file ended while being read");
    } else {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    throw nb::python_error();
}

// The bytes as they lie in memory, for tests: those of the rows one after another, or of the panels.
nb::bytes packed(const WeightRows& w) {
    const Rows& r = w.rows;
    if (w.panels.neurons)
        return nb::bytes(reinterpret_cast<const char*>(r.base),
                         size_t(r.count / w.panels.neurons * w.panels.bytes()));
    std::string rows;
    for (int64_t i = 0; i < r.count; ++i)
        rows.append(reinterpret_cast<const char*>(r.row(i)), size_t(row_bytes(r.type, r.cols)));
    return nb::bytes(rows.data(), rows.size());
}

// Of weights that must not lie in panels.
const Rows& plain_rows(const WeightRows& weights, const char* op) {
    if (weights.panels.neurons) refuse(std::string(op) + ": these weights lie in panels, rows are needed");
    return weights.rows;
}

// A program and the sizes that its arguments are checked against.
struct BoundProgram {
    Program program;
    BatchBounds bounds;
    int64_t rows(RowsOf of) const { return of == kTokens ? bounds.tokens : bounds.logits; }
};

RowsOf rows_of(int of) {
    if (of != kTokens && of != kLogits)
        refuse("rows " + std::to_string(of) + ": choose 0 (tokens) or 1 (logits)");
    return RowsOf(of);
}

const Kernels& kernels_of(const std::string& isa) {
    const Kernels* k = find_kernels(isa.c_str());
    if (!k) refuse("this processor or this build has no kernels for ISA '" + isa + "'");
    return *k;
}

using Index = Array<const int32_t>;

void make_program(BoundProgram* self, const std::string& isa, std::shared_ptr<Pool> pool,
                  const std::vector<Index>& arrays) {
    if (arrays.size() != 8) refuse("a batch has eight arrays");
    const Index& pages = arrays[5];
    if (pages.ndim() != 2) refuse("a batch's pages must be [sequences, pages per sequence]");
    const int64_t tokens = int64_t(arrays[1].size()), sequences = axis(pages, 0);
    const int64_t logits = int64_t(arrays[7].size());
    if (tokens < 1) refuse("a batch has room for 0 tokens: at least 1 is needed");
    const int64_t sizes[] = {4, tokens, tokens, tokens, tokens, int64_t(pages.size()), sequences, logits};
    const int32_t* p[8];
    for (size_t i = 0; i < 8; ++i) {
        if (int64_t(arrays[i].size()) != sizes[i]) refuse("a batch's arrays disagree about its limits");
        p[i] = arrays[i].data();
    }
    const Batch batch{p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], axis(pages, 1)};
    const BatchBounds bounds{tokens, sequences, logits};
    new (self) BoundProgram{Program(kernels_of(isa), std::move(pool), batch, bounds), bounds};
}

void bind_norm(BoundProgram& p, const Floats& x, const Floats& out, const Array<const float>& weight,
               const Maybe<const float>& bias, float eps, bool centre, int of) {
    const int64_t dim = int64_t(weight.size()), width = width_of(x);
    if (dim < 1 || x.ndim() < 2 || axis(x, x.ndim() - 1) != dim)
        refuse("norm: the last axis does not match the weight");
    const RowsOf rows = rows_of(of);
    const float* from = data_of(x, "norm: x", p.rows(rows), width);
    const NormArgs args{weight.data(), vector_of(bias, "norm: bias", dim), eps, centre, dim};
    p.program.norm(args, from, data_of(out, "norm: out", p.rows(rows), width), width / dim, rows);
}

void bind_linear(BoundProgram& p, const Floats& x, const std::vector<const WeightRows*>& weights,
                 const std::vector<Maybe<const float>>& biases, const std::vector<Floats>& outs,
                 bool accumulate, int of) {
    if (weights.empty() || weights.size() != outs.size() || weights.size() != biases.size())
        refuse("linear: as many outs and biases as weights are needed");
    const RowsOf rows = rows_of(of);
    std::vector<Product> products;
    for (size_t i = 0; i < weights.size(); ++i) {
        if (!weights[i]) refuse("linear: a weight is None");
        const Rows& r = plain_rows(*weights[i], "linear");
        if (r.cols != weights[0]->rows.cols) refuse("linear: the weights differ in width");
        products.push_back({r, vector_of(biases[i], "linear: bias", r.count),
                            data_of(outs[i], "linear: out", p.rows(rows), r.count), r.count, accumulate});
    }
    p.program.linear(data_of(x, "linear: x", p.rows(rows), weights[0]->rows.cols), products, rows);
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

// Caches are [page, K, kPage, head_dim], float32, or float16 handed over as uint16; or Q8_0 blocks as bytes.
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
                    const Floats& out, float scale) {
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
    p.program.attention(a, c.pages);
}

void bind_predict(BoundProgram& p, const Floats& x, const WeightRows& first, const WeightRows& second,
                  bool relu, const Array<const float>& threshold, const Array<uint64_t>& mask) {
    const Rows &one = plain_rows(first, "predict"), &two = plain_rows(second, "predict");
    if (two.cols != one.count) refuse("predict: the factors do not fit each other");
    const int64_t n = two.count, rows = std::min<int64_t>(p.rows(kTokens), kMaxDecodeRows);
    p.program.predict(data_of(x, "predict: x", rows, one.cols), one, two, relu,
                      data_of(threshold, "predict: threshold", n, 1),
                      data_of(mask, "predict: mask", rows, (n + 63) / 64));
}

// One layer's FFN as the backend holds it.
struct FfnWeights {
    std::optional<WeightRows> gate;
    WeightRows up, down;
    Maybe<const float> gate_bias, up_bias, down_bias;
    bool by_output;
    int activation;
    float threshold;
};

void bind_ffn(BoundProgram& p, const Floats& x, const FfnWeights& w, const Floats& out, bool skip,
              const Maybe<uint64_t>& mask, const Maybe<uint64_t>& fired, const Maybe<int64_t>& stats,
              bool accumulate) {
    Ffn f{};
    if (w.gate) f.gate = w.gate->rows;
    f.up = w.up.rows;
    f.down = w.down.rows;
    f.panels = w.down.panels;
    const int64_t n = f.neurons(), dim = f.dim(), rows = p.rows(kTokens);
    const int64_t decode = std::min<int64_t>(rows, kMaxDecodeRows);
    f.gate_bias = vector_of(w.gate_bias, "ffn: gate_bias", n);
    f.up_bias = vector_of(w.up_bias, "ffn: up_bias", n);
    f.down_bias = vector_of(w.down_bias, "ffn: down_bias", dim);
    f.by_output = w.by_output;
    f.activation = Activation(w.activation);
    f.threshold = w.threshold;
    f.skip = skip;
    f.accumulate = accumulate;
    f.mask = mask ? data_of(*mask, "ffn: mask", decode, f.words()) : nullptr;
    f.fired = fired ? data_of(*fired, "ffn: fired", decode, f.words()) : nullptr;
    f.stats = reinterpret_cast<FfnCounts*>(vector_of(stats, "ffn: stats", sizeof(FfnCounts) / 8));
    f.out = data_of(out, "ffn: out", rows, dim);
    p.program.ffn(f, data_of(x, "ffn: x", rows, dim));
}

FfnWeights ffn_weights(std::optional<WeightRows> gate, const WeightRows& up_rows, const WeightRows& down_rows,
                       Maybe<const float> gate_bias, Maybe<const float> up_bias, Maybe<const float> down_bias,
                       bool by_output, int activation, float threshold) {
    const Rows &up = plain_rows(up_rows, "ffn: up"), &down = down_rows.rows;
    if (gate) plain_rows(*gate, "ffn: gate");
    const int64_t cols = down_rows.panels.neurons ? (up.cols + kBlock - 1) / kBlock * kBlock : up.cols;
    const bool fits = by_output ? down.count == up.cols && down.cols == up.count && !down_rows.panels.neurons
                                : down.count == up.count && down.cols == cols;
    if (!fits || (gate && (gate->rows.count != up.count || gate->rows.cols != up.cols)))
        refuse("ffn: gate, up and down do not fit each other");
    if (activation < 0 || activation > kGelu) refuse("ffn: unknown activation");
    if (activation == kDRelu && !gate) refuse("ffn: this activation multiplies two: it needs a gate");
    if (up.count > kMaxNeurons)
        refuse("ffn: a layer of " + std::to_string(up.count) + " neurons; allowed: up to " +
               std::to_string(kMaxNeurons));
    return {gate, up_rows, down_rows, gate_bias, up_bias, down_bias, by_output, activation, threshold};
}

void bind_embed(BoundProgram& p, const WeightRows& table, const Floats& out) {
    const Rows& rows = plain_rows(table, "embed");
    check_scratch(decode_row_scratch(rows.type, rows.cols),
                  "embed: rows of " + std::to_string(rows.cols) + " columns in this block type");
    p.program.embed(rows, data_of(out, "embed: out", p.rows(kTokens), rows.cols));
}

void bind_add(BoundProgram& p, const Floats& x, const Floats& y) {
    const int64_t dim = width_of(x), rows = p.rows(kTokens);
    p.program.add(data_of(x, "add: x", rows, dim), data_of(y, "add: y", rows, dim), dim);
}

void bind_gather(BoundProgram& p, const Floats& x, const Floats& out) {
    const int64_t dim = width_of(x);
    const float* from = data_of(x, "gather: x", p.rows(kTokens), dim);
    p.program.gather(from, data_of(out, "gather: out", p.rows(kLogits), dim), dim);
}

// Without the GIL.
void bind_run(BoundProgram& p, size_t segment) {
    const std::function<void()> check = check_signals();
    nb::gil_scoped_release release;
    p.program.run(segment, check);
}

// How many of `ids` and `values` are found.
size_t bind_top_k(const Array<const float>& logits, const Maybe<const float>& bias,
                  const Maybe<const uint64_t>& allowed, const Array<int32_t>& ids, const Floats& values) {
    const int64_t n = int64_t(logits.size()), k = int64_t(std::min(ids.size(), values.size()));
    const auto best = top_k(logits.data(), n, k, vector_of(bias, "top_k: bias", n),
                            vector_of(allowed, "top_k: allowed", (n + 63) / 64));
    for (size_t i = 0; i < best.size(); ++i) {
        values.data()[i] = best[i].first;
        ids.data()[i] = best[i].second;
    }
    return best.size();
}

// GB/s at which the pool's threads stream through a memory, for about `seconds`.
double read_bandwidth(const std::string& isa, Pool& pool, const Memory& memory, double seconds) {
    const Kernels& k = kernels_of(isa);
    constexpr size_t kPiece = 1 << 20;
    const auto pieces = int64_t(memory.size() / kPiece);
    if (pieces < 1) refuse("the bandwidth probe needs at least 1 MiB");
    std::atomic<int64_t> kept{0};  // keeps the reads from being optimised away
    const std::vector<Step> steps{{[=] { return pieces; },
                                   [&](int64_t piece, const Scratch&) {
                                       if (k.read(memory.data() + size_t(piece) * kPiece, kPiece) > 0) ++kept;
                                   }}};
    const std::function<void()> check = check_signals();
    nb::gil_scoped_release release;
    const auto start = std::chrono::steady_clock::now();
    double elapsed = 0, bytes = 0;
    do {
        pool.run(steps, nullptr, check);
        bytes += double(pieces) * kPiece;
        elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    } while (elapsed < seconds);
    return bytes / elapsed / 1e9;
}

}  // namespace
}  // namespace hc

NB_MODULE(_cpu, m) {
    using namespace hc;
    main_thread =
        nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident"));
    nb::class_<Pool>(m, "Pool").def(nb::init<int>(), "threads"_a).def_prop_ro("threads", &Pool::threads);
    nb::class_<Memory>(m, "Memory")
        .def_prop_ro("nbytes", &Memory::size)
        .def_prop_ro("address", [](const Memory& memory) { return uintptr_t(memory.data()); });
    nb::class_<Arena>(m, "Arena").def(nb::init<>()).def("take", &Arena::take, "nbytes"_a);
    nb::class_<WeightRows>(m, "WeightRows")
        .def(nb::new_(&weight_rows), "memory"_a, "offset"_a, "stride"_a, "count"_a, "cols"_a, "type"_a)
        .def_static("panels", &panel_rows, "memory"_a, "dim"_a, "neurons"_a, "type"_a)
        .def("pack", &pack_tensor, "tensor"_exact, "pool"_a, "by_output"_a = false,
             "chosen"_maybe = nb::none())
        .def("read", &read_tensor, "file"_a, "offset"_a, "rows"_a, "row_bytes"_a, "pool"_a,
             "by_output"_a = false, "chosen"_maybe = nb::none())
        .def("packed", &packed);
    nb::class_<FfnWeights>(m, "FfnWeights")
        .def(nb::new_(&ffn_weights), "gate"_maybe, "up"_a, "down"_a, "gate_bias"_maybe, "up_bias"_maybe,
             "down_bias"_maybe, "by_output"_a, "activation"_a, "threshold"_a);
    nb::class_<BoundProgram>(m, "Program")
        .def("__init__", &make_program, "isa"_a, "pool"_a, "batch"_exact)
        .def("embed", &bind_embed, "table"_a, "out"_exact)
        .def("norm", &bind_norm, "x"_exact, "out"_exact, "weight"_exact, "bias"_maybe, "eps"_a, "centre"_a,
             "rows"_a)
        .def("linear", &bind_linear, "x"_exact, "weights"_a, "biases"_exact, "outs"_exact, "accumulate"_a,
             "rows"_a)
        .def("rope", &bind_rope, "x"_exact, "cos"_exact, "sin"_exact, "interleaved"_a)
        .def("store_kv", &bind_store_kv, "k"_exact, "v"_exact, "k_cache"_exact, "v_cache"_exact)
        .def("attention", &bind_attention, "q"_exact, "k_cache"_exact, "v_cache"_exact, "out"_exact,
             "scale"_a)
        .def("predict", &bind_predict, "x"_exact, "first"_a, "second"_a, "relu"_a, "threshold"_exact,
             "mask"_exact)
        .def("ffn", &bind_ffn, "x"_exact, "weights"_a, "out"_exact, "skip"_a, "mask"_maybe, "fired"_maybe,
             "stats"_maybe, "accumulate"_a)
        .def("add", &bind_add, "x"_exact, "y"_exact)
        .def("gather", &bind_gather, "x"_exact, "out"_exact)
        .def("cut", [](BoundProgram& p) { p.program.cut(); })
        .def_prop_ro("scratch_bytes", [](BoundProgram& p) { return p.program.scratch_bytes(); })
        .def("run", &bind_run, "segment"_a);
    m.def("row_size", [](int type, int64_t cols) { return row_size(Type(type), cols); }, "type"_a, "cols"_a);
    m.def("panels_size", &panels_size, "dim"_a, "neurons"_a, "type"_a);
    m.def("top_k", &bind_top_k, "logits"_exact, "bias"_maybe, "allowed"_maybe, "ids"_exact, "values"_exact);
    m.def("has_isa", [](const std::string& isa) { return find_kernels(isa.c_str()) != nullptr; }, "isa"_a);
    m.def("best_isa", [] { return std::string(find_kernels("")->name); });
    m.def("read_bandwidth", &read_bandwidth, "isa"_a, "pool"_a, "memory"_a, "seconds"_a);
}
