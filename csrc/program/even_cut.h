// How the rows of products over the same input are cut into pieces.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hc {

// Pieces read about as much each, and are as many as the threads share evenly: a small model's matrix makes
// so few that a thread would wait for another's last one. They begin at whole units of rows; one may end a
// product and begin the next, and one may be empty. No sum depends on where they begin.
class EvenCut {
  public:
    // A product's rows. A piece begins at a multiple of `unit`; where there is one product alone, it has
    // `most` rows at most, which is a multiple, too.
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
        int64_t before = 0;  // bytes of the parts before this one
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

    // run(product, first, count) for what a piece has of each product.
    template <class Run> void each(int64_t piece, Run run) const {
        const Begin &from = begins_[size_t(piece)], &to = begins_[size_t(piece) + 1];
        for (size_t i = from.part; i < counts_.size() && i <= to.part; ++i) {
            const int64_t first = i == from.part ? from.row : 0, end = i == to.part ? to.row : counts_[i];
            if (first < end) run(i, first, end - first);
        }
    }

    // What pieces [piece, end) have of the first product that they have rows of.
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
    static constexpr int64_t kSmall = 4;  // times less than the most is what the smallest pieces read
    static constexpr int64_t kPiecesPerThread = 4;  // of these, so that all threads end together
    struct Begin {
        size_t part;
        int64_t row;
    };
    std::vector<Begin> begins_;  // of each piece, and the end
    std::vector<int64_t> counts_;
};

}  // namespace hc
