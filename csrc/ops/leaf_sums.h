// Sums the neurons of each leaf in the order of the tree: see struct Ffn.
#pragma once
#include "simd/vec.h"

namespace hc {
namespace {

// Sums of up to 2^levels leaves for several tokens, a row of floats each. Neurons of the current leaf add to
// `start(t)`. Each level has one sum, like a digit of a binary counter: two sums of one level are added and
// move up, together with the sums they meet. A row begins when something is added to it, so nothing is
// cleared beforehand. A missing row counts as +0, and adding it changes nothing.
class LeafSums {
  public:
    // Sums rows [tokens, size]: `root` gets the total; `scratch` has `levels` rows for the levels below. The
    // root is free until the end, and holds the lowest level until then.
    LeafSums(float* root, float* scratch, int levels, int tokens, int64_t size)
        : root_(root), scratch_(scratch), levels_(levels), tokens_(tokens), size_(size) {
        current_ = level(0);
    }

    float* current() const { return current_; }
    float* row(int t) const { return current_ + t * size_; }
    // Tokens to which this leaf has added something, a bit each.
    uint64_t added() const { return added_; }
    void add(uint64_t tokens) { added_ |= tokens; }
    // The row of a token, cleared if nothing has been added to it yet.
    float* start(int t) {
        float* to = row(t);
        if (!(added_ >> t & 1))
            for (int64_t i = 0; i < size_; i += Vec::width) Vec::store(to + i, Vec::zero());
        added_ |= uint64_t(1) << t;
        return to;
    }

    void end_leaf() {
        int to = 0;
        for (; leaf_ >> to & 1; ++to) {
        }
        if (to)
            carry(to);
        else
            has_[0] = added_;
        ++leaf_;
        added_ = 0;
        current_ = leaf_ & 1 ? scratch_row(levels_) : level(0);
    }

    // Puts the sum of all leaves into the root; returns the tokens that have one.
    uint64_t end() {
        if (!(leaf_ >> levels_ & 1)) carry(levels_);
        return has_[levels_];
    }

  private:
    float* level(int l) const { return l == 0 || l == levels_ ? root_ : scratch_row(l); }
    float* scratch_row(int n) const { return scratch_ + (n - 1) * tokens_ * size_; }  // counts from 1

    // Adds the levels below `to` and the current leaf to one sum.
    void carry(int to) {
        for (int t = 0; t < tokens_; ++t) {
            const float* from[kMaxLevels + 1];
            int n = 0;
            if (added_ >> t & 1) from[n++] = row(t);
            for (int l = 0; l < to; ++l)
                if (has_[l] >> t & 1) from[n++] = level(l) + t * size_;
            if (!n) continue;
            float* sum = level(to) + t * size_;
            for (int64_t i = 0; i < size_; i += Vec::width) {
                F v = Vec::load(from[0] + i);
                for (int k = 1; k < n; ++k) v = Vec::add(Vec::load(from[k] + i), v);
                Vec::store(sum + i, v);
            }
            has_[to] |= uint64_t(1) << t;
        }
        for (int l = 0; l < to; ++l) has_[l] = 0;
    }

    float *root_, *scratch_, *current_;
    const int levels_, tokens_;
    const int64_t size_;
    int leaf_ = 0;
    uint64_t added_ = 0;
    uint64_t has_[kMaxLevels + 1] = {};  // of each level, the tokens that have a sum
};

}  // namespace
}  // namespace hc
