// Cuts the rows of products over the same input into pieces.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hc {

// Pieces read about equally many bytes, and their number is a multiple of the threads: with the few pieces of
// a small matrix, a thread would otherwise wait for the last piece of another. Pieces begin at whole units of
// rows. A piece may end one product and begin the next, or be empty. No sum depends on the cut.
class EvenCut {
  public:
    // The rows of a product. A piece begins at a multiple of `unit`. If there is only one product, a piece
    // has at most `most` rows, also a multiple of `unit`.
    struct Part {
        int64_t rows, row_bytes, unit, most;
    };

    EvenCut(const std::vector<Part>& parts, int threads) {
        int64_t bytes = 0, most = 1;
        for (const Part& p : parts) {
            counts_.push_back(p.rows);
            bytes += p.rows * p.row_bytes;
            most = std::max(most, p.most * p.row_bytes);
        }
        const int64_t small = std::min<int64_t>(bytes * kSmall / most, kPiecesPerThread * threads);
        int64_t pieces = std::max<int64_t>({(bytes + most - 1) / most, small, 1});
        if (pieces >= threads) pieces = (pieces + threads - 1) / threads * threads;
        size_t part = 0;
        int64_t before = 0;  // bytes of the previous parts
        for (int64_t i = 0; i < pieces; ++i) {
            const int64_t at = bytes / pieces * i + bytes % pieces * i / pieces;
            while (part + 1 < parts.size() && at >= before + parts[part].rows * parts[part].row_bytes) {
                before += parts[part].rows * parts[part].row_bytes;
                ++part;
            }
            const Part& p = parts[part];
            const int64_t unit = std::max<int64_t>(1, p.unit * p.row_bytes);
            begins_.push_back({part, std::min(p.rows, (at - before + unit - 1) / unit * p.unit)});
        }
        begins_.push_back({parts.size(), 0});
    }

    int64_t pieces() const { return int64_t(begins_.size()) - 1; }

    // Calls run(product, first, count) for the rows of each product in a piece.
    template <class Run> void each(int64_t piece, Run run) const {
        const Begin &from = begins_[size_t(piece)], &to = begins_[size_t(piece) + 1];
        for (size_t i = from.part; i < counts_.size() && i <= to.part; ++i) {
            const int64_t first = i == from.part ? from.row : 0, end = i == to.part ? to.row : counts_[i];
            if (first < end) run(i, first, end - first);
        }
    }

    // The rows of pieces [piece, end) in the first product they contain.
    struct Stretch {
        size_t part;
        int64_t first, end;
    };
    Stretch stretch(int64_t piece, int64_t end) const {
        Begin from = begins_[size_t(piece)];
        const Begin& to = begins_[size_t(end)];
        if (from.row == counts_[from.part] && from.part + 1 < counts_.size()) from = {from.part + 1, 0};
        return {from.part, from.row, from.part == to.part ? to.row : counts_[from.part]};
    }

  private:
    static constexpr int64_t kSmall = 4;            // the smallest pieces read 1/kSmall of the largest
    static constexpr int64_t kPiecesPerThread = 4;  // so that all threads end together
    struct Begin {
        size_t part;
        int64_t row;
    };
    std::vector<Begin> begins_;  // of each piece, and the end
    std::vector<int64_t> counts_;
};

}  // namespace hc
