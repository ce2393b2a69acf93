// Rows of a layer's experts, of which each expert's first neurons, the hot ones, have theirs in memory. The
// others, the cold ones, have addresses there, and memory only while a step uses them: they lie in the
// model's file and are read when a step names their neurons.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "disk/expert_cache.h"

namespace hc {

// The first wave has the experts of which a step needs hot neurons alone. Of the others each has a wave of
// its own; as many are read at a time as there is room for, one at least.
class ColdRows : public LoadBatches {
  public:
    // `name` says in errors what it holds. Each expert has so many neurons, the first hot[e] of which are
    // hot. `neurons_at_once`: neurons that are read at a time; all of one expert's may be more. `gates`:
    // whether rows of gates are among these, else all gates lie in memory.
    ColdRows(std::shared_ptr<Disk>, std::string name, int64_t neurons, std::vector<int64_t> hot,
             int64_t neurons_at_once, bool gates);
    ~ColdRows() override;

    // All parts lie in one memory, side by side: a neuron's rows have the same stride in each.
    void add(CachePart part) { parts_.push_back(std::move(part)); }
    // Reads the hot ones, once all parts are known and before any step. DiskError: one cannot be read.
    void fill(const Disk::GiveUp&);
    int64_t neurons() const { return neurons_; }

    Unit unit() const override { return gates_ ? kNamed : kFiring; }
    void begin(const std::vector<int32_t>& experts, const uint64_t* neurons, const Disk::GiveUp&) override;
    void end() override;  // gives back the last wave's memory
    bool unfinished() const override { return size_t(load_batch_) < coming_.size(); }
    int64_t most_load_batches() const override { return 1 + experts(); }

  private:
    struct Run {
        int64_t first, end;
    };
    struct Expert {
        std::vector<Run> runs;  // of neurons that a step needs and that are not hot, and gaps
        int64_t rows = 0;       // in these
        std::shared_ptr<Arrival> arrival;
    };

    void find_runs(int64_t expert, const uint64_t* wanted);
    int64_t bytes_of(int64_t neurons) const;
    void turn() override;
    bool await(const Disk::GiveUp&) override;
    void ask(int64_t expert);
    void ask_some();
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
    std::vector<int32_t> coming_;  // of this step, those that are read: wave by wave from wave 1 on
    size_t asked_ = 0;             // how many of them are being read, or have come
    int64_t taken_ = 0;            // of the room
};

}  // namespace hc
