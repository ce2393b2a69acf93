// A persistent thread pool that runs programs: lists of steps, each cut into pieces that any thread claims.
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

// Scratch memory of a running program: one buffer that all threads share, and one of the calling thread.
struct Scratch {
    uint8_t* shared;
    uint8_t* local;
};

struct Span {
    const uint8_t* at = nullptr;
    int64_t bytes = 0;
};

// A step. `pieces` is called when the step or one before it starts; pieces run in any order on any thread.
// `reads`, if given, returns the contiguous memory that pieces [first, end) read first.
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

// Each thread starts with a run of neighbouring pieces, so that it reads contiguous memory. When they are
// done it steals pieces from the end of other threads' runs. A step ends when all its pieces are done, so a
// descheduled thread that holds no piece delays no other. The thread that finished the last piece runs the
// following steps of one piece itself.
//
// Threads wait for one word, the epoch, which changes when a thread opens a step or ends a run. They spin and
// prefetch into L2 what they will read next; then they sleep. Within a run they spin for as long as a barrier
// may take. Between two runs they spin for twice the previous gap, so that they are awake when a model's
// next step comes. From kSpin on they yield the core at each check. They sleep sooner if that gap was long,
// if another pool shares the cores, or if there are more threads than processors. A binary tree wakes as many
// sleeping threads as there are pieces.
class Pool {
  public:
    // Throws std::invalid_argument if fewer threads can start; the started threads are ended.
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return int(claims_.size()); }
    // Runs the steps in order on the pool and the calling thread; returns when all are done. One caller at a
    // time. An exception in a step ends the run: unclaimed pieces are dropped, and it is thrown here. The
    // calling thread calls `check_interrupt` about every kAskEvery; its exception ends the run too. Throws
    // std::runtime_error in a process forked from the one that made the pool, which lacks the threads.
    // `nanoseconds`, if given, has one entry a step: adds the time from the end of the previous step to its
    // own end.
    void run(const std::vector<Step>& steps, uint8_t* shared,
             const std::function<void()>& check_interrupt = {}, int64_t* nanoseconds = nullptr);
    // For a step that waits: true if the run ends early and the step should stop waiting. Called by its
    // thread.
    bool ending();
    // From now on waiting threads yield and sleep soon: another pool shares the cores with this one.
    void share_cores() { shares_cores_.store(true, std::memory_order_relaxed); }
    // A buffer for the running program, one at a time: as large as the largest request so far.
    std::shared_ptr<uint8_t> shared_scratch(size_t bytes);

  private:
    using Clock = std::chrono::steady_clock;

    // Distance of words that different threads write: two cache lines, because Intel's cores fetch lines in
    // pairs and Apple's lines are that long.
    static constexpr size_t kLine = 128;

    // The word that pieces of one thread's run are claimed from: the end in its high half, the next piece in
    // its low half. It need not name its step. A claim is one compare-exchange of this word alone. If it
    // succeeds, the word still had the value read, so the piece was available at that moment, whichever step
    // it belongs to. That step stays current until the piece is done. Older reads (perhaps of an earlier step
    // with the same numbers) decide nothing: the thread reads steps_, current_ and pieces_ after the claim.
    static constexpr int kBits = 32;
    static constexpr uint64_t kMask = (uint64_t(1) << kBits) - 1;
    struct alignas(kLine) Claim {
        std::atomic<uint64_t> word{0};
        // Start and size of the thread's run of the next step with `reads`. Both are hints: they may belong
        // to two different steps, or to a program that no longer exists.
        std::atomic<const uint8_t*> next{nullptr};
        std::atomic<int64_t> bytes{0};
    };
    // Bytes that a waiting thread has prefetched of the run with claim.next == base. Each is written by its
    // thread alone.
    struct alignas(kLine) Fetched {
        const uint8_t* base = nullptr;
        int64_t bytes = 0;
    };
    // State of one thread's sleep.
    struct alignas(kLine) Seat {
        std::atomic<bool> asleep{false};
        std::mutex mutex;
        std::condition_variable wake;
    };
    // Parts that a forked process can neither use nor destroy: destroying a condition variable waits for its
    // waiters, and the fork has no such threads.
    struct Threads {
        explicit Threads(size_t count) : seats(count) {}
        std::vector<Seat> seats;
        std::vector<std::thread> started;
    };

    void start(int threads);
    void stop();
    int64_t claim(int owner, bool last);
    int64_t steal(int thread);
    bool work(int thread, uint64_t seen);  // claims and runs pieces; false if there was none
    void advance(size_t next, int thread);
    int64_t run_single(size_t& next, int thread);
    void announce(size_t next);
    void clock(size_t step);  // the step that has just ended
    void fetch_ahead(int thread);
    void change_epoch(int64_t pieces, int thread);
    void wake_children(uint64_t epoch, int thread);
    void wake(int thread);
    void fail();  // ends the run with the exception that is being caught
    void poll_interrupt();
    Scratch scratch(int thread) const { return {shared_, local_[size_t(thread)].get()}; }
    void loop(int thread);
    void wait(int thread, uint64_t seen);
    void sleep(int thread, uint64_t seen);

    // Read-only after construction.
    std::vector<Claim> claims_;
    std::vector<Fetched> fetched_;
    std::vector<AlignedBytes> local_;
    const bool crowded_;     // more threads than processors
    const int64_t process_;  // owner of the threads
    std::unique_ptr<Threads> threads_;

    // The word that threads wait for. High half: number of changes. Low half: the thread that changed it,
    // then the number of threads that the current step has pieces for (0: no run is active).
    alignas(kLine) std::atomic<uint64_t> epoch_{0};
    alignas(kLine) std::atomic<int64_t> done_{0};  // pieces of the current step

    // Read by threads in each step; changed almost only by advance().
    alignas(kLine) const std::vector<Step>* steps_ = nullptr;
    size_t current_ = 0;
    int64_t pieces_ = 0;  // of the current step
    uint8_t* shared_ = nullptr;
    size_t announced_ = 0;  // the step that the claims name as the next to read
    int64_t* nanoseconds_ = nullptr;
    Clock::time_point clocked_;  // end of the last step, if `nanoseconds` is given
    std::atomic<bool> stop_{false};
    std::atomic<bool> shares_cores_{false};
    std::atomic<bool> dropping_{false};    // the run ends early: pieces are claimed but not run
    std::atomic<Clock::rep> patience_{0};  // time that threads spin after the run
    std::thread::id caller_;
    std::exception_ptr error_;  // thrown by a step; written by the thread that set dropping_

    // Used by the calling thread alone, which updates it often.
    alignas(kLine) int look_in_ = 0;   // calls of poll_interrupt() until it reads the clock again
    Clock::time_point asked_, ended_;  // ended_: end of the last run
    const std::function<void()>* check_interrupt_ = nullptr;
    std::exception_ptr interrupt_;  // thrown by check_interrupt
    std::mutex run_mutex_;

    std::mutex scratch_mutex_;
    std::shared_ptr<uint8_t> shared_scratch_;
    size_t shared_bytes_ = 0;
};

}  // namespace hc
