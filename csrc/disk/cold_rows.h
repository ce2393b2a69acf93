// Rows of a layer's experts. The first neurons of each expert, the hot ones, stay in memory. The other
// neurons, the cold ones, have addresses there too, but memory only while a step uses them: they are read
// from the model's file when a step names them.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "disk/expert_cache.h"

namespace hc {

// The first batch has the experts whose hot neurons are all that a step needs. Each other expert is a batch
// of its own. As many experts are read at a time as the buffer holds, at least one.
class ColdRows : public LoadBatches {
  public:
    // `name`: used in errors. `neurons`: of each expert; the first hot[e] of expert e are hot.
    // `neurons_at_once`: maximum number of neurons read at a time; one expert may exceed it. `gates`: whether
    // gate rows are among these rows; if not, all gates are in memory.
    ColdRows(std::shared_ptr<Disk>, std::string name, int64_t neurons, std::vector<int64_t> hot,
             int64_t neurons_at_once, bool gates);
    ~ColdRows() override;

    // All parts share one memory, interleaved: a neuron's rows have the same stride in each part.
    void add(CachePart part) { parts_.push_back(std::move(part)); }
    // Reads the hot rows; called once all parts are known, before any step. Throws DiskError if a read fails.
    void fill(const Disk::GiveUp&);
    int64_t neurons() const { return neurons_; }

    Unit unit() const override { return gates_ ? kNamed : kFiring; }
    void begin(const std::vector<int32_t>& experts, const uint64_t* neurons, const Disk::GiveUp&) override;
    void end() override;  // gives back the memory of the last batch
    bool unfinished() const override { return size_t(load_batch_) < coming_.size(); }
    int64_t most_load_batches() const override { return 1 + experts(); }

  private:
    struct Run {
        int64_t first, end;
    };
    struct Expert {
        std::vector<Run> runs;  // needed neurons that are not hot, and gaps
        int64_t rows = 0;       // total rows in runs
        std::shared_ptr<Arrival> arrival;
    };

    void find_runs(int64_t expert, const uint64_t* wanted);
    int64_t bytes_of(int64_t neurons) const;
    void turn() override;
    bool await(const Disk::GiveUp&) override;
    void request(int64_t expert);
    void request_next();
    void give_back(int64_t expert);
    bool settle(const Disk::GiveUp&);
    void take(int64_t expert, const Disk::GiveUp&);

    const std::shared_ptr<Disk> disk_;
    const std::string name_;
    const int64_t neurons_, words_, neurons_at_once_;
    const std::vector<int64_t> hot_;
    const bool gates_;
    std::vector<CachePart> parts_;
    std::vector<Expert> state_;    // by expert
    std::vector<int32_t> coming_;  // experts that this step reads, in the order of batches, from batch 1 on
    size_t requested_ = 0;         // experts of coming_ whose reads were requested
    int64_t rows_taken_ = 0;       // neurons being read or in use, at most room_
};

}  // namespace hc
