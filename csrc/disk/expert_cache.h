// Places in memory for some of a layer's experts. The others lie in the model's file and are read when a step
// names them.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "disk/load_batches.h"
#include "pack/memory.h"

namespace hc {

// Experts of a wave that were read, at most: enough for many threads, few enough to be used while the next
// ones are read.
constexpr int64_t kMostLoads = 4;

// One matrix of each expert, as the file has it and as places hold it.
struct CachePart {
    std::shared_ptr<Memory> memory;  // that the places lie in
    Target slot;                     // of the first one
    int64_t stride;                  // bytes from one place to the next
    int file;                        // of the disk
    std::vector<int64_t> offsets;    // of each expert's rows in the file
    int64_t rows, row_bytes;         // of an expert, in the file
    // Where a neuron has several rows side by side: how many of them these are, and how many there are.
    int64_t each = 1, pitch = 1;

    // Appends reads of an expert's neurons (by output: of its rows) [first, end) into a place, in pieces of
    // what a disk reads at once.
    void add_reads(int64_t at, int64_t expert, int64_t first, int64_t end,
                   const std::shared_ptr<Arrival>& arrival, std::vector<DiskRead>& reads) const;
};

// Which expert lies in which place depends on the experts that steps named alone: the absent ones take, in
// ascending order, the place of the expert that was named least recently, of several the one with the
// smallest number; one that a wave is yet to use stays, and so do those that keep their places.
class ExpertCache : public LoadBatches {
  public:
    // `name` says in errors what it holds. There are two places at least.
    ExpertCache(std::shared_ptr<Disk>, std::string name, int64_t experts, int64_t slots);
    ~ExpertCache() override;

    void add(CachePart part) { parts_.push_back(std::move(part)); }
    // Reads these experts now, once all parts are known and before any step: the one that is wanted most
    // first. The first `pinned` of them keep their places for good. DiskError: one cannot be read.
    void fill(const std::vector<int32_t>& experts, int64_t pinned, const Disk::GiveUp&);
    int64_t slots() const { return int64_t(slots_.size()); }

    Unit unit() const override { return kExperts; }
    void begin(const std::vector<int32_t>& experts, const uint64_t* neurons, const Disk::GiveUp&) override;
    bool unfinished() const override { return !coming_.empty() || asked_ < absent_.size(); }
    int64_t most_load_batches() const override;
    int64_t slot(int64_t expert) const override {
        const int64_t at = slot_of_[size_t(expert)];
        return at < 0 ? 0 : at;
    }

  private:
    struct Slot {
        int64_t expert = -1;  // none
        int64_t named = -1;   // the last step that named it
        bool needed = false;  // a wave is yet to use it
        std::shared_ptr<Arrival> arrival;
        bool pinned = false;  // it is nobody else's, ever
    };

    void turn() override;
    bool await(const Disk::GiveUp&) override;
    int64_t loads_in_batch() const;
    bool settle(const Disk::GiveUp&);
    void ask();
    int64_t victim() const;
    void empty(Slot&);
    void read_into(int64_t slot, int64_t expert);
    [[noreturn]] void raise(int64_t expert, int error) const;

    const std::shared_ptr<Disk> disk_;
    const std::string name_;
    std::vector<CachePart> parts_;
    std::vector<Slot> slots_;
    std::vector<int64_t> slot_of_;  // by expert; -1: none
    std::vector<int32_t> absent_;   // of this step
    size_t asked_ = 0;              // how many of them are being read, or have come
    std::deque<int64_t> coming_;    // their places, in this order, before their wave
    int64_t step_ = 0, pinned_ = 0;
};

}  // namespace hc
