// A layer's experts, of which not all lies in memory, as a step uses them: wave by wave, as they come.
#pragma once
#include <cstdint>
#include <vector>

#include "disk/disk.h"

namespace hc {

// What a step does with them: it begins with what its rows need, uses those that are at hand (the first wave)
// while others are read, and then, wave by wave, those that have come. Each expert is used in one wave.
//
// Which wave that is depends on what steps need alone, never on a time. Bits depend on nothing of this: every
// expert's sum is made of the same weights, and sums are added in the order of experts.
//
// Called by one thread at a time, that of a step of one piece; in_wave() and place() by any.
class LoadBatches {
  public:
    struct Counts {
        int64_t hits = 0, misses = 0;      // of what steps needed: at hand, and read
        int64_t stalls = 0, stall_ns = 0;  // waves that were waited for
    };
    // What is read: whole experts, rows of up and down of neurons whose gates fire (all gates lie in memory),
    // or all rows of neurons that a mask names.
    enum Unit { kExperts, kFiring, kNamed };

    virtual ~LoadBatches() = default;
    LoadBatches(const LoadBatches&) = delete;
    LoadBatches& operator=(const LoadBatches&) = delete;

    virtual Unit unit() const = 0;
    // The experts that a step needs, ascending, and, unless the unit is an expert, their neurons: each has
    // words of bits, one expert's after another's. Gives up where an earlier step's reads are waited for.
    virtual void begin(const std::vector<int32_t>& experts, const uint64_t* neurons, const Disk::GiveUp&) = 0;
    // Waits for the next wave, once the last one's experts were used. DiskError: one cannot be read.
    void next(const Disk::GiveUp&);
    // Once the last wave's experts were used.
    virtual void end() {}
    virtual bool unfinished() const = 0;
    virtual int64_t most_load_batches() const = 0;
    int64_t load_batch() const { return load_batch_; }
    bool in_load_batch(int64_t expert) const { return load_batch_of_[size_t(expert)] == load_batch_; }
    int64_t experts() const { return int64_t(load_batch_of_.size()); }
    // Where an expert lies, counted in experts; of one that is not at hand, anywhere.
    virtual int64_t slot(int64_t expert) const { return expert; }
    const Counts& counts() const { return counts_; }

  protected:
    explicit LoadBatches(int64_t experts) : load_batch_of_(size_t(experts), -1) {}
    // Turns to the next wave, and asks for what can be read now.
    virtual void turn() = 0;
    // Waits for what that wave needs. Whether any of it had not come.
    virtual bool await(const Disk::GiveUp&) = 0;

    std::vector<int64_t> load_batch_of_;  // by expert; -1: none
    int64_t load_batch_ = 0;
    Counts counts_;
};

}  // namespace hc
