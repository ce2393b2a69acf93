// One persistent pool of threads that runs programs: lists of steps, each cut into pieces that any thread
// claims.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace hc {

// Scratch of a running program: one buffer that all threads see, one of the calling thread's own.
struct Scratch {
    uint8_t* shared;
    uint8_t* local;
};

struct Span {
    const uint8_t* at = nullptr;
    int64_t bytes = 0;
};

// One step: `pieces` is asked when the step or one before it starts; pieces run in any order on any thread.
// `reads`, where given, tells what pieces [first, end) read first, in one stretch of memory.
struct Step {
    std::function<int64_t()> pieces;
    std::function<void(int64_t piece, const Scratch&)> run;
    std::function<Span(int64_t first, int64_t end)> reads = {};
};

struct AlignedDelete {
    void operator()(uint8_t* p) const;
};
using AlignedBytes = std::unique_ptr<uint8_t[], AlignedDelete>;
AlignedBytes allocate_aligned(size_t bytes);  // 64-byte aligned, not cleared

// Each thread starts with a run of neighbouring pieces of its own, so that what it reads goes on in memory,
// and when these are done takes others' from their end. A step ends when all its pieces are done, whoever did
// them: a descheduled thread that holds no piece delays nobody. The thread that did the last one goes on with
// steps of one piece by itself.
//
// Threads wait for one word, which whoever opens a step or ends a run changes. They spin, and meanwhile bring
// what they will read next into their L2; then they sleep. Within a run they spin for as long as a barrier
// may take. Between two runs they spin for twice as long as the last time between two runs was, so that they
// are awake when a model's next step comes, and soon offer the core to others; they sleep sooner where that
// was long, where another pool shares the cores, and where they are more than the processors. Those who sleep
// are woken by a tree, as many as there are pieces.
class Pool {
  public:
    // std::invalid_argument where fewer threads can start; those that did are ended.
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return int(claims_.size()); }
    // Runs the steps in order on the pool and the calling thread; returns when all are done. One caller at a
    // time. What a step throws ends the run: pieces that nobody claimed are dropped, and it is thrown here.
    // The calling thread calls `check_interrupt` about every kAskEvery; what that throws ends the run, too.
    // std::runtime_error in a process forked from the one that made the pool: its threads are not there.
    // `nanoseconds`, where given, one for each step: adds what each takes, from the end of the one before it
    // to its own.
    void run(const std::vector<Step>& steps, uint8_t* shared,
             const std::function<void()>& check_interrupt = {}, int64_t* nanoseconds = nullptr);
    // For a step that waits: whether the run ends early, so that it shall not wait on. Called by its thread.
    bool ending();
    // From now on whoever waits offers the core to others, and sleeps soon: another pool shares the cores
    // with this one.
    void share_cores() { shares_cores_.store(true, std::memory_order_relaxed); }
    // A buffer for what runs, of which there is one at a time: as large as the largest that was asked for.
    std::shared_ptr<uint8_t> shared_scratch(size_t bytes);

  private:
    using Clock = std::chrono::steady_clock;

    // Words that different threads write lie so far apart: two cache lines, as Intel's cores fetch them in
    // pairs and Apple's are as long.
    static constexpr size_t kLine = 128;

    // The word that pieces of one thread's run are claimed from: the end in its high half, the next piece in
    // its low one. It need not say whose step they are. A claim is one compare-exchange of the word alone:
    // where that succeeds, the word was what the thread had read, so the piece was to be had at that moment,
    // whichever step it belongs to; and that step stays the current one until the piece is done. What a
    // thread read before (of an earlier step with the same numbers, perhaps) decides nothing: steps_,
    // current_ and pieces_ are read after.
    static constexpr int kBits = 32;
    static constexpr uint64_t kMask = (uint64_t(1) << kBits) - 1;
    struct alignas(kLine) Claim {
        std::atomic<uint64_t> word{0};
        // Where the thread's run of the next step that reads begins. Both are hints: they may belong to two
        // steps, or to a program that is gone.
        std::atomic<const uint8_t*> next{nullptr};
        std::atomic<int64_t> bytes{0};
    };
    // How much a waiting thread has fetched of the run where its claim's `next` was `base`. Each is written
    // by its thread alone.
    struct alignas(kLine) Fetched {
        const uint8_t* base = nullptr;
        int64_t bytes = 0;
    };
    // Where one thread sleeps.
    struct alignas(kLine) Seat {
        std::atomic<bool> asleep{false};
        std::mutex mutex;
        std::condition_variable wake;
    };
    // The parts that a process forked from the pool's can neither use nor destroy: destroying a condition
    // variable waits for those who wait for it, and they are not there.
    struct Threads {
        explicit Threads(size_t count) : seats(count) {}
        std::vector<Seat> seats;
        std::vector<std::thread> started;
    };

    void start(int threads);
    void stop();
    int64_t claim(int of, bool last);
    int64_t steal(int thread);
    bool work(int thread, uint64_t seen);  // claims and runs pieces; false when there was none
    void advance(size_t next, int thread);
    int64_t run_single(size_t& next, int thread);
    void announce(size_t next);
    void clock(size_t step);  // that has just ended
    void fetch_ahead(int thread);
    void change_epoch(int64_t pieces, int thread);
    void rouse(uint64_t epoch, int thread);
    void wake(int thread);
    void fail();  // ends the run with the exception that is being caught
    void ask();
    Scratch scratch(int thread) const { return {shared_, local_[size_t(thread)].get()}; }
    void loop(int thread);
    void wait(int thread, uint64_t seen);
    void sleep(int thread, uint64_t seen);

    // Written when the pool is made, and then only read.
    std::vector<Claim> claims_;
    std::vector<Fetched> fetched_;
    std::vector<AlignedBytes> local_;
    const bool crowded_;     // more threads than processors
    const int64_t process_;  // that the threads belong to
    std::unique_ptr<Threads> threads_;

    // The word that threads wait for: in its high half how often it was changed, then who did and how many
    // the current step has pieces for. None: no run is under way.
    alignas(kLine) std::atomic<uint64_t> epoch_{0};
    alignas(kLine) std::atomic<int64_t> done_{0};  // pieces of the current step

    // Read by threads in each step, and changed by hardly anything but the next step.
    alignas(kLine) const std::vector<Step>* steps_ = nullptr;
    size_t current_ = 0;
    int64_t pieces_ = 0;  // of the current step
    uint8_t* shared_ = nullptr;
    size_t announced_ = 0;  // the step that the claims name as the next to read
    int64_t* nanoseconds_ = nullptr;
    Clock::time_point clocked_;  // when the last step ended, where that is asked for
    std::atomic<bool> stop_{false};
    std::atomic<bool> shares_cores_{false};
    std::atomic<bool> dropping_{false};    // the run ends early: pieces are claimed, but not run
    std::atomic<Clock::rep> patience_{0};  // how long threads spin after the run
    std::thread::id caller_;
    std::exception_ptr error_;  // what a step threw; belongs to whoever set dropping_

    // Used by the calling thread alone, which counts in it.
    alignas(kLine) int look_in_ = 0;   // so many calls of ask() later the clock is read again
    Clock::time_point asked_, ended_;  // `ended_`: the last run
    const std::function<void()>* check_interrupt_ = nullptr;
    std::exception_ptr interrupt_;  // what that threw
    std::mutex run_mutex_;

    std::mutex scratch_mutex_;
    std::shared_ptr<uint8_t> shared_scratch_;
    size_t shared_bytes_ = 0;
};

}  // namespace hc
