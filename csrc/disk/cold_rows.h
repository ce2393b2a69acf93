// Rows of up and down of a layer's experts, of which each expert's first neurons, the hot ones, lie in
// memory. The others, the cold ones, have addresses there, and memory only while a step uses them: they lie
// in the model's file and are read when a step names them.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "disk/shelf.h"

namespace hc {

// What a step does with them: it begins with the neurons that its rows need, uses the experts of which all
// are hot (the first wave) while others are read, and then, wave by wave, those that have come. Each expert's
// are used in one wave; a wave has as many experts as its room has for what is read of them, one at least.
//
// Which wave an expert is in depends on what steps name alone, never on a time. Bits depend on nothing of
// this.
//
// Called by one thread at a time, that of a step of one piece; in_wave() by any.
class ColdRows {
  public:
    // `name` says in errors what it holds. Each expert has so many neurons, the first hot[e] of which are
    // hot. `room`: neurons of a wave that are read; all of one expert's may be more.
    ColdRows(std::shared_ptr<Disk>, std::string name, int64_t neurons, std::vector<int64_t> hot,
             int64_t room);
    ~ColdRows();
    ColdRows(const ColdRows&) = delete;
    ColdRows& operator=(const ColdRows&) = delete;

    // All parts lie in one memory, side by side: a neuron's rows have the same stride in each.
    void add(ShelfPart part) { parts_.push_back(std::move(part)); }
    // Reads the hot ones, once all parts are known and before any step. DiskError: one cannot be read.
    void fill(const Disk::GiveUp&);
    int64_t experts() const { return int64_t(hot_.size()); }
    int64_t neurons() const { return neurons_; }

    // The experts that a step needs, ascending, and their neurons: each expert has words of bits, one
    // expert's after another's. Gives up where an earlier step's reads are waited for.
    void begin(const std::vector<int32_t>& experts, const uint64_t* wanted, const Disk::GiveUp&);
    // Waits for the next wave, once the last one's experts were used. DiskError: one cannot be read.
    void next(const Disk::GiveUp&);
    // Gives back the last wave's memory.
    void end();
    bool unfinished() const { return wave_ < last_; }
    int64_t wave() const { return wave_; }
    int64_t most_waves() const { return 1 + experts(); }
    bool in_wave(int64_t expert) const { return wave_of_[size_t(expert)] == wave_; }
    // In neurons, in place of experts.
    const Shelf::Counts& counts() const { return counts_; }

  private:
    struct Run {
        int64_t first, end;
    };
    struct Expert {
        std::vector<Run> runs;  // of neurons that a step needs and that are not hot
        std::shared_ptr<Arrival> arrival;
    };

    int64_t find_runs(int64_t expert, const uint64_t* wanted);
    void ask(int64_t expert);
    void ask_wave();
    void give_back(int64_t expert);
    bool settle(const Disk::GiveUp&);
    void take(int64_t expert, const Disk::GiveUp&);

    const std::shared_ptr<Disk> disk_;
    const std::string name_;
    const int64_t neurons_, words_, room_;
    const std::vector<int64_t> hot_;
    std::vector<ShelfPart> parts_;
    std::vector<Expert> state_;     // by expert
    std::vector<int64_t> wave_of_;  // by expert; -1: none
    std::vector<int32_t> named_;    // of this step
    int64_t wave_ = 0, last_ = 0;
    Shelf::Counts counts_;
};

}  // namespace hc
