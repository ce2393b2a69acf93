// The experts that a step's rows chose: pairs of a row and one of its choices, sorted by expert.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hc {

// Experts of a layer, whose neurons are consecutive, and the choices of a step's rows.
struct Experts {
    std::vector<int64_t> ends;       // of each expert's neurons
    std::vector<int64_t> words;      // first word of each expert in a row of a mask, and the end
    int64_t chosen = 0;              // by each row
    const int32_t* ids = nullptr;    // [T, chosen], ascending in each row
    const float* factors = nullptr;  // [T, chosen]; predictors do not use them

    Experts(std::vector<int64_t> ends, int64_t chosen);
    int64_t count() const { return int64_t(ends.size()); }
    int64_t first(int64_t expert) const { return expert ? ends[size_t(expert) - 1] : 0; }
    int64_t neurons(int64_t expert) const { return ends[size_t(expert)] - first(expert); }
    int64_t most_neurons() const;
};

// The pairs of some rows, by expert, then by row: each pair is one row of work.
class Routing {
  public:
    // The rows of one expert: pairs [begin, end).
    struct Part {
        int64_t expert;
        int begin, end;
        int token;        // of the first row
        bool neighbours;  // rows are adjacent, so that they can be read in place
        int rows() const { return end - begin; }
    };

    // `most`: maximum number of rows of a step.
    Routing(const Experts&, int64_t most);

    // Sorts rows [t0, t1). Throws std::invalid_argument if ids are out of range or do not ascend.
    void sort(int t0, int t1);
    int pairs() const { return pairs_; }
    const std::vector<Part>& parts() const { return parts_; }
    bool scattered() const { return scattered_; }  // some part's rows are not adjacent
    const int32_t* tokens(const Part& part) const { return tokens_.data() + part.begin; }
    int token(int pair) const { return tokens_[size_t(pair)]; }
    const Part& part_of(int pair) const { return parts_[size_t(part_of_[size_t(pair)])]; }
    int64_t number(const Part& part) const { return &part - parts_.data(); }
    // The pair of row t and its choice.
    int pair(int t, int64_t choice) const { return pair_of_[size_t((t - t0_) * experts_.chosen + choice)]; }

  private:
    void check(int t0, int t1) const;

    const Experts& experts_;
    std::vector<int32_t> tokens_, pair_of_, part_of_, begins_;
    std::vector<Part> parts_;
    int pairs_ = 0, t0_ = 0;
    bool scattered_ = false;
};

// Pieces of work of several parts, one part after another.
class Cut {
  public:
    explicit Cut(size_t most_parts) { begins_.reserve(most_parts + 1); }
    // `count` returns the pieces of a part; returns their sum.
    template <class Count> int64_t over(const Routing& routing, Count count) {
        begins_.assign(1, 0);
        for (const Routing::Part& part : routing.parts()) begins_.push_back(begins_.back() + count(part));
        return begins_.back();
    }
    int64_t pieces() const { return begins_.empty() ? 0 : begins_.back(); }
    // Returns the part of a piece and replaces `piece` by its number in the part.
    size_t part(int64_t& piece) const;

  private:
    std::vector<int64_t> begins_;
};

}  // namespace hc
