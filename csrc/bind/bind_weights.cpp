// Weights: memory, rows and panels in it, filled from a file or an array.
#include <cerrno>

#include "bind/bind.h"
#include "pack/fill.h"
#include "pack/pack.h"

namespace hc {
namespace {

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

// A matrix (dim, neurons) as panels that fill a memory of their own.
WeightRows panel_rows(std::shared_ptr<Memory> memory, int64_t dim, int64_t neurons, int type) {
    if (dim < 1 || neurons < 1 || panels_size(dim, neurons, type) > int64_t(memory->size()))
        refuse("panels lie outside their memory");
    const Panels panels = panels_of(Type(type), dim);
    const int64_t outputs = (dim + kBlock - 1) / kBlock * kBlock;
    const Rows rows{memory->data(), panels.row, neurons, outputs, Type(type)};
    return {std::move(memory), rows, panels};
}

// Rows [first, first + count) of weights; of panels, whole panels.
WeightRows part_of(const WeightRows& w, int64_t first, int64_t count) {
    if (first < 0 || count < 1 || count > w.rows.count - first) refuse("no such part of the weights");
    WeightRows part = w;
    part.rows.count = count;
    if (!w.panels.neurons) {
        part.rows.base = w.rows.row(first);
        if (w.rows.factors) part.rows.factors += first;
        return part;
    }
    if (first % w.panels.neurons || count % w.panels.neurons) refuse("a part of panels must be whole ones");
    part.rows.base += first / w.panels.neurons * w.panels.bytes();
    return part;
}

// The same rows, each multiplied by one of `factors`.
WeightRows multiplied(const WeightRows& w, const Array<const float>& factors) {
    if (!is_opened(w.rows.type)) refuse("multiplied: rows of this type have no factors");
    if (factors.ndim() != 1 || int64_t(factors.size()) != w.rows.count)
        refuse("multiplied: as many factors as rows are needed");
    WeightRows rows = w;
    rows.factors =
        std::make_shared<const std::vector<float>>(factors.data(), factors.data() + factors.size());
    rows.rows.factors = rows.factors->data();
    return rows;
}

using Numbers = Maybe<const int64_t>;

// Fills weights from `rows` rows of a tensor, or from the chosen ones; by output, from its columns.
int fill_weights(const WeightRows& to, Source source, bool by_output, const Numbers& chosen, Pool& pool) {
    const Target target{to.rows, to.panels, by_output};
    const Rows& r = to.rows;
    const int64_t block = block_size(r.type).bytes, per_column = by_output ? block_size(r.type).weights : 1;
    // Units to fill: file rows, or columns of blocks.
    const int64_t wanted = r.count / per_column,
                  available = by_output ? source.row_bytes / block : source.rows;
    if (to.panels.neurons ? !by_output || (source.rows + kBlock - 1) / kBlock * kBlock != r.cols
                          : by_output && (is_quantised(r.type) || source.rows != r.cols))
        refuse("the tensor does not fit the panels or rows");
    if (by_output ? source.row_bytes % block : source.row_bytes != row_size(r.type, r.cols))
        refuse("the tensor's rows do not fit the weights");
    if (chosen ? int64_t(chosen->size()) != wanted : available != wanted)
        refuse("the tensor does not have as many rows as the weights");
    for (int64_t i = 0; chosen && i < wanted; ++i) {
        const int64_t seen = chosen->data()[i];
        if (seen < 0 || seen >= available || (i && seen <= chosen->data()[i - 1]))
            refuse("chosen rows must be those of the tensor, in ascending order");
    }
    source.chosen = chosen ? chosen->data() : nullptr;
    const std::function<void()> check = check_signals();
    nb::gil_scoped_release release;
    return fill(target, source, pool, check);
}

// Packs file rows [rows, row_bytes] in memory.
void pack_tensor(const WeightRows& to, const Array<const uint8_t>& from, Pool& pool, bool by_output,
                 const Numbers& chosen) {
    if (from.ndim() != 2) refuse("tensor: [rows, row_bytes] is needed");
    Source source;
    source.data = from.data();
    source.rows = int64_t(from.shape(0));
    source.row_bytes = int64_t(from.shape(1));
    fill_weights(to, source, by_output, chosen, pool);
}

// The same from an open file, starting at byte `offset`. Raises OSError if a read fails, EOFError if the file
// ends.
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

// For tests: the bytes in memory, of the rows one after another or of the panels.
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

}  // namespace

void bind_weights(nb::module_& m) {
    nb::class_<Memory>(m, "Memory")
        .def_prop_ro("nbytes", &Memory::size)
        .def_prop_ro("address", [](const Memory& memory) { return uintptr_t(memory.data()); });
    nb::class_<Arena>(m, "Arena")
        .def(nb::init<Nodes, bool>(), "nodes"_a = Nodes(), "huge"_a = true)
        .def("take", &Arena::take, "nbytes"_a);
    nb::class_<WeightRows>(m, "WeightRows")
        .def(nb::new_(&weight_rows), "memory"_a, "offset"_a, "stride"_a, "count"_a, "cols"_a, "type"_a)
        .def_static("panels", &panel_rows, "memory"_a, "dim"_a, "neurons"_a, "type"_a)
        .def("part", &part_of, "first"_a, "count"_a)
        .def("multiplied", &multiplied, "factors"_exact)
        .def("pack", &pack_tensor, "tensor"_exact, "pool"_a, "by_output"_a = false,
             "chosen"_maybe = nb::none())
        .def("read", &read_tensor, "file"_a, "offset"_a, "rows"_a, "row_bytes"_a, "pool"_a,
             "by_output"_a = false, "chosen"_maybe = nb::none())
        .def("packed", &packed);
    m.def("row_size", [](int type, int64_t cols) { return row_size(Type(type), cols); }, "type"_a, "cols"_a);
    m.def("panels_size", &panels_size, "dim"_a, "neurons"_a, "type"_a);
}

}  // namespace hc
