// Quantises floats to blocks: rows are cut among the pool's threads.
#include "bind/bind.h"
#include "quantise/quantise.h"

namespace hc {
namespace {

// values [rows, n] into out [rows, row bytes]. Raises ValueError for a value that the type cannot hold.
void bind_quantise_rows(const std::string& isa, int type, const Array<const float>& values,
                        const Maybe<const float>& importance, const Array<uint8_t>& out, Pool& pool) {
    kernels_of(isa);  // refuses an instruction set that this processor lacks
    const BlockWriter* writer = find_writer(type, isa.c_str());
    if (!writer) refuse("quantise: no type of number " + std::to_string(type) + " is written");
    if (values.ndim() != 2 || out.ndim() != 2 || !values.size())
        refuse("quantise: values [rows, n] and out [rows, row bytes] are needed");
    const int64_t rows = axis(values, 0), n = axis(values, 1);
    if (n % writer->weights || axis(out, 0) != rows || axis(out, 1) != n / writer->weights * writer->bytes)
        refuse("quantise: whole blocks, and as many bytes as they take, are needed");
    const float* weights = vector_of(importance, "quantise: importance", n);
    const std::function<void()> check = check_signals();
    nb::gil_scoped_release release;
    quantise(*writer, values.data(), weights, rows, n, out.data(), pool, check);
}

}  // namespace

void bind_quantise(nb::module_& m) {
    m.def("quantise_rows", &bind_quantise_rows, "isa"_a, "type"_a, "values"_exact, "importance"_maybe,
          "out"_exact, "pool"_a);
    m.def("can_quantise", [](int type) { return find_writer(type, "scalar") != nullptr; }, "type"_a);
}

}  // namespace hc
