// Shared by the binding files: arrays from Python and their checks. Only files named bind* know nanobind.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa/table.h"
#include "pack/memory.h"
#include "pool/local_bytes.h"
#include "program/program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hc {

template <class T> using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;
template <class T> using Maybe = std::optional<Array<T>>;
using Floats = Array<float>;
using Index = Array<const int32_t>;

// Arguments without conversion or copy (_exact); _maybe also allows None.
inline auto operator""_exact(const char* name, size_t) { return nb::arg(name).noconvert(); }
inline auto operator""_maybe(const char* name, size_t) { return nb::arg(name).none().noconvert(); }

[[noreturn]] inline void refuse(const std::string& problem) { throw std::invalid_argument(problem); }

// Length of an axis; 0 if it does not exist.
template <class A> int64_t axis(const A& a, size_t i) { return i < a.ndim() ? int64_t(a.shape(i)) : 0; }

// Values of one row of an array [rows, ...].
template <class A> int64_t width_of(const A& a) {
    int64_t width = 1;
    for (size_t i = 1; i < a.ndim(); ++i) width *= int64_t(a.shape(i));
    return width;
}

inline void check_scratch(int64_t bytes, const std::string& subject) {
    if (bytes > int64_t(kLocalBytes))
        refuse(subject + " take " + std::to_string(bytes) + " bytes of a thread's scratch; allowed: up to " +
               std::to_string(kLocalBytes));
}

// The data of an array [>= rows, ...] whose other axes hold `width` values.
template <class T> T* data_of(const Array<T>& a, const char* name, int64_t rows, int64_t width) {
    const int64_t values = width_of(a);
    if (axis(a, 0) < rows || values != width)
        refuse(std::string(name) + ": expected at least " + std::to_string(rows) + " rows of " +
               std::to_string(width) + ", got " + std::to_string(axis(a, 0)) + " of " +
               std::to_string(values));
    return a.data();
}

template <class T> T* vector_of(const Maybe<T>& a, const char* name, int64_t n) {
    return a ? data_of(*a, name, n, 1) : nullptr;
}

// Returns the check_interrupt of a run without the GIL: Ctrl-C soon ends the run with the exception of
// Python's handler. Empty on other threads, where Python calls no handler.
std::function<void()> check_signals();

// Rows in a Memory, perhaps in panels; keeps the Memory alive.
struct WeightRows {
    std::shared_ptr<Memory> memory;
    Rows rows;
    Panels panels;
    std::shared_ptr<const std::vector<float>> factors = nullptr;  // of the rows
};

// Returns the rows of weights; refuses panels.
inline const Rows& plain_rows(const WeightRows& weights, const char* op) {
    if (weights.panels.neurons)
        refuse(std::string(op) + ": these weights are packed in panels, rows are needed");
    return weights.rows;
}

// The arrays of a hotcold.kernels.backend.Batch, with the same names, kept alive while a program reads them.
struct BatchArrays {
    // Throws std::invalid_argument if the arrays disagree about the batch's limits.
    explicit BatchArrays(const nb::handle& batch);
    Index counts, tokens, positions, sequence, slots, pages, lengths, logits_rows;
    Index first_rows, row_counts, state_from, state_to;
    Batch view() const;
    BatchBounds bounds() const {
        return {int64_t(tokens.size()), axis(pages, 0), int64_t(logits_rows.size())};
    }
};

// A program and the sizes that its arguments are checked against.
struct BoundProgram {
    Program program;
    BatchBounds bounds;
    BatchArrays arrays;
    int64_t rows(RowsOf kind) const { return kind == kTokens ? bounds.tokens : bounds.logits; }
};

inline RowsOf rows_of(int kind) {
    if (kind != kTokens && kind != kLogits)
        refuse("rows " + std::to_string(kind) + ": choose 0 (tokens) or 1 (logits)");
    return RowsOf(kind);
}

inline const Kernels& kernels_of(const std::string& isa) {
    const Kernels* k = find_kernels(isa.c_str());
    if (!k) refuse("this processor or this build has no kernels for ISA '" + isa + "'");
    return *k;
}

// Each file adds its part to the module.
void bind_weights(nb::module_&);
void bind_disk(nb::module_&);
nb::class_<BoundProgram> bind_ops(nb::module_&);
void bind_ffn(nb::module_&, nb::class_<BoundProgram>&);
void bind_link(nb::module_&, nb::class_<BoundProgram>&);
void bind_quantise(nb::module_&);
void bind_router(nb::class_<BoundProgram>&);
void bind_states(nb::class_<BoundProgram>&);
void bind_vulkan(nb::module_&);

}  // namespace hc
