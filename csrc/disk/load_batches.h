// Batches of a layer's experts that are not all in memory: a step computes each batch when its loads arrive.
#pragma once
#include <cstdint>
#include <vector>

#include "disk/disk.h"

namespace hc {

// A step calls begin() with the experts it needs and computes the experts in memory (the first batch) while
// others are read. It then computes batch after batch as they arrive. Each expert is in one batch.
//
// The assignment to batches depends only on what steps need, never on time. Results do not depend on it: each
// expert's sum uses the same weights, and sums are added in the order of experts.
//
// Called by one thread at a time, the thread of a single-piece step; any thread may call in_wave() and
// place().
class LoadBatches {
  public:
    struct Counts {
        int64_t hits = 0, misses = 0;      // of what steps needed: in memory, and read
        int64_t stalls = 0, stall_ns = 0;  // batches that a step waited for
    };
    // What is read: whole experts, rows of up and down of active neurons (all gates are in memory), or all
    // rows of the neurons that a mask names.
    enum Unit { kExperts, kFiring, kNamed };

    virtual ~LoadBatches() = default;
    LoadBatches(const LoadBatches&) = delete;
    LoadBatches& operator=(const LoadBatches&) = delete;

    virtual Unit unit() const = 0;
    // `experts`: the experts that a step needs, ascending. `neurons`: unless the unit is kExperts, a bit mask
    // of neurons for each expert, in whole words. Gives up while it waits for reads of an earlier step.
    virtual void begin(const std::vector<int32_t>& experts, const uint64_t* neurons, const Disk::GiveUp&) = 0;
    // Waits for the next batch; called after the last batch was computed. Throws DiskError if a read fails.
    void next(const Disk::GiveUp&);
    // Called after the last batch was computed.
    virtual void end() {}
    virtual bool unfinished() const = 0;
    virtual int64_t most_load_batches() const = 0;
    int64_t load_batch() const { return load_batch_; }
    bool in_load_batch(int64_t expert) const { return load_batch_of_[size_t(expert)] == load_batch_; }
    int64_t experts() const { return int64_t(load_batch_of_.size()); }
    // Position of an expert in memory, counted in experts; arbitrary for an expert that is not in memory.
    virtual int64_t slot(int64_t expert) const { return expert; }
    const Counts& counts() const { return counts_; }

  protected:
    explicit LoadBatches(int64_t experts) : load_batch_of_(size_t(experts), -1) {}
    // Advances to the next batch and requests what can be read now.
    virtual void turn() = 0;
    // Waits for the reads of the current batch. Returns true if any had not arrived.
    virtual bool await(const Disk::GiveUp&) = 0;

    std::vector<int64_t> load_batch_of_;  // by expert; -1: none
    int64_t load_batch_ = 0;
    Counts counts_;
};

}  // namespace hc
