// Shared by the files of Program: how rows are cut into pieces, and how an op's scratch is laid out.
#pragma once
#include <algorithm>

#include "ops/scratch.h"
#include "pack/pack.h"
#include "program/even_cut.h"
#include "program/program.h"

namespace hc {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows that prompt kernels compute together.
inline int64_t unit_rows(const Rows& rows) { return is_quantised(rows.type) ? kDecodedRows : kArrangedRows; }

// Rows of one piece of a product: about 64 KB of quantised weights, so that a piece stays in L2 for all its
// tokens. Plain weights take more: their tokens do not stay in L2 and are read again for each piece. A
// multiple of unit_rows().
inline int64_t piece_rows(const Rows& rows) {
    const int64_t most = (is_quantised(rows.type) ? 64 << 10 : kPlainPiece) /
                         std::max<int64_t>(1, row_size(rows.type, rows.cols));
    const int64_t unit = unit_rows(rows);
    return std::clamp<int64_t>((most + unit / 2) / unit, 1, kMaxPieceRows / unit) * unit;
}

// Cuts rows into such pieces, or smaller ones.
inline EvenCut::Part part_of(const Rows& rows) {
    return {rows.count, row_size(rows.type, rows.cols), unit_rows(rows), piece_rows(rows)};
}

// Rows [first, end), if they are contiguous.
inline Span stretch(const Rows& rows, int64_t first, int64_t end) {
    const int64_t bytes = row_bytes(rows.type, rows.cols);
    if (rows.stride != bytes) return {};
    return {rows.row(first), (std::min(end, rows.count) - first) * bytes};
}

inline std::shared_ptr<Input> input_of(const float* x, int64_t cols) {
    return std::make_shared<Input>(Input{x, cols, nullptr, cols});
}

// Chooses how decode rows are cut into pieces. Each piece has its own sums, which are added later, so pieces
// are as large as possible: enough of them must keep all threads busy to the end, and one must fit a thread's
// scratch. `chosen` such layers are computed together.
void cut_into_pieces(Ffn& f, int max_rows, int threads, int chosen = 1);
// For decode rows with down by output: clears neurons outside the mask, reports active neurons, and counts
// the rows read.
void account_by_output(const Ffn& f, int decode, bool count);
// For the same rows, afterwards: marks the tenth of the neurons with the largest coefficients by magnitude.
// `scratch` has one integer per neuron.
void mark_strongest(const Ffn& f, int decode, const Masks& strongest, uint32_t* scratch);

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

}  // namespace hc
