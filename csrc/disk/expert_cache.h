// Slots in memory for some of a layer's experts. The other experts stay in the model's file and are read when
// a step names them.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "disk/load_batches.h"
#include "pack/memory.h"

namespace hc {

// Maximum number of experts read for a batch: enough for many threads, few enough to compute them while the
// next ones are read.
constexpr int64_t kMostLoads = 4;

// One matrix of each expert: its layout in the file and in the slots.
struct CachePart {
    std::shared_ptr<Memory> memory;  // contains the slots
    Target slot;                     // of the first slot
    int64_t stride;                  // bytes from one slot to the next
    int file;                        // number in the Disk
    std::vector<int64_t> offsets;    // of each expert's rows in the file
    int64_t rows, row_bytes;         // of an expert, in the file
    // If a neuron has several interleaved rows: the rows that are read, and all rows.
    int64_t each = 1, pitch = 1;

    // Appends reads of the neurons [first, end) of an expert (by output: of its rows) into a slot, in pieces
    // of Disk::rows_at_once rows.
    void add_reads(int64_t at, int64_t expert, int64_t first, int64_t end,
                   const std::shared_ptr<Arrival>& arrival, std::vector<DiskRead>& reads) const;
};

// The contents of the slots depend only on the experts that steps named. Absent experts, in ascending order,
// replace the expert that was named least recently; ties go to the smallest number. Experts that a batch has
// not used yet and pinned experts stay.
class ExpertCache : public LoadBatches {
  public:
    // `name`: used in errors. `slots`: at least two.
    ExpertCache(std::shared_ptr<Disk>, std::string name, int64_t experts, int64_t slots);
    ~ExpertCache() override;

    void add(CachePart part) { parts_.push_back(std::move(part)); }
    // Reads these experts now, most wanted first; called once all parts are known, before any step. The first
    // `pinned` are pinned. Throws DiskError if a read fails.
    void fill(const std::vector<int32_t>& experts, int64_t pinned, const Disk::GiveUp&);
    int64_t slots() const { return int64_t(slots_.size()); }

    Unit unit() const override { return kExperts; }
    void begin(const std::vector<int32_t>& experts, const uint64_t* neurons, const Disk::GiveUp&) override;
    bool unfinished() const override { return !coming_.empty() || requested_ < absent_.size(); }
    int64_t most_load_batches() const override;
    int64_t slot(int64_t expert) const override {
        const int64_t at = slot_of_[size_t(expert)];
        return at < 0 ? 0 : at;
    }

  private:
    struct Slot {
        int64_t expert = -1;  // -1: empty
        int64_t named = -1;   // last step that named it
        bool needed = false;  // a batch has not used it yet
        std::shared_ptr<Arrival> arrival;
        bool pinned = false;  // pinned: never evicted
    };

    void turn() override;
    bool await(const Disk::GiveUp&) override;
    int64_t loads_in_batch() const;
    bool settle(const Disk::GiveUp&);
    void request_absent();
    int64_t victim() const;
    void empty(Slot&);
    void read_into(int64_t slot, int64_t expert);
    [[noreturn]] void raise(int64_t expert, int error) const;

    const std::shared_ptr<Disk> disk_;
    const std::string name_;
    std::vector<CachePart> parts_;
    std::vector<Slot> slots_;
    std::vector<int64_t> slot_of_;  // by expert; -1: no slot
    std::vector<int32_t> absent_;   // of this step
    size_t requested_ = 0;          // experts of absent_ whose reads were requested
    std::deque<int64_t> coming_;    // slots of requested experts, in order, before their batch
    int64_t step_ = 0, pinned_ = 0;
};

}  // namespace hc
