// The handshake between the two sides of a hybrid model about a layer's mailbox.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace hc {

// The other side has failed, was stopped, is not in this process, or does not answer in time.
class LinkError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// Events at a link, in the order of hotcold.sparse.timeline.MOMENTS, which adds more.
enum Moment : int { kPost = 0, kTake = 1, kWait = 2, kGive = 3, kWaited = 4 };

struct Mark {
    int32_t moment, layer;
    int64_t nanoseconds;  // of a steady clock
};

// The last events of both sides; records nothing before start().
class Marks {
  public:
    void start(size_t capacity);
    void stop() { ring_size_.store(0); }
    void add(int moment, int layer) {
        if (taking()) record(moment, layer, now());
    }
    // Records an event at another time of the same clock.
    void add_at(int moment, int layer, int64_t nanoseconds) {
        if (taking()) record(moment, layer, nanoseconds);
    }
    bool taking() const { return ring_size_.load(std::memory_order_acquire) != 0; }
    // Returns the events by time. Neither side may run.
    std::vector<Mark> taken() const;

    static int64_t now();

  private:
    void record(int moment, int layer, int64_t nanoseconds);

    std::vector<Mark> ring_;
    std::atomic<size_t> ring_size_{0}, next_{0};
};

// The link as the cold side sees it. The hot side posts a layer when the mailbox holds its input; at most one
// layer is outstanding. The hot side's backend decides how to post and how to learn of answers; it need not
// read host memory.
class Link {
  public:
    virtual ~Link() = default;
    // Returns when a layer is posted: true if it is `layer`. If it is another one, a new step has begun and
    // that layer stays posted. Also returns false once the link is stopped or has failed.
    virtual bool wait_posted(int layer) = 0;
    virtual void answer(int layer) = 0;                // the mailbox holds the layer's answer
    virtual void fail(const std::string& reason) = 0;  // no more answers will come
    virtual void stop() = 0;                           // ends all waits
    virtual bool ended() const = 0;                    // stopped or failed

    Marks marks;
};

// Answers layers in this order until the link ends, each with its function. An exception fails the link with
// its message.
using ColdLayers = std::vector<std::pair<int, std::function<void()>>>;
void serve(Link& link, const ColdLayers& layers);

// A link of two numbers in memory that both sides share. A wait spins for some microseconds, yields for some
// more, and then sleeps.
class FlagLink final : public Link {
  public:
    // Returns true if the waiting thread should give up; called about every 50 ms. An exception ends the wait
    // too.
    using GiveUp = std::function<bool()>;

    // A layer without an answer after the timeout throws LinkError.
    explicit FlagLink(double timeout_seconds);
    ~FlagLink() override;

    bool wait_posted(int layer) override;
    void answer(int layer) override;
    void fail(const std::string& reason) override;
    void stop() override { fail("it was closed"); }
    bool ended() const override { return ended_.load(std::memory_order_acquire); }

    // Hot side, before it fills a mailbox: an interrupted step may have left the cold side running.
    void wait_idle(int layer, const GiveUp& give_up = {});
    void post(int layer);
    // Returns true if the answer has arrived, false if the wait was given up.
    bool wait_answered(int layer, const GiveUp& give_up = {});

  private:
    using Clock = std::chrono::steady_clock;
    // Parts that a forked process can neither use nor destroy, because the waiting threads are not in it.
    struct Sleepers {
        std::mutex mutex;
        std::condition_variable wake;
        std::string reason;  // why the link ended
    };

    bool idle() const { return done_.load() == posted_.load() >> 32; }
    template <class Done> void sleep(Done done, std::chrono::milliseconds most);
    bool wait_for_answer(int layer, const GiveUp& give_up);
    void wake();
    void check_process() const;
    [[noreturn]] void raise_ended(int layer) const;

    const std::chrono::duration<double> timeout_;
    const int64_t process_;
    alignas(64) std::atomic<uint64_t> posted_{
        0};  // posted layers in the high half, the last one in the low half
    alignas(64) std::atomic<uint64_t> done_{0};  // answered layers
    alignas(64) std::atomic<bool> ended_{false};
    std::atomic<int> sleeping_{0};
    std::unique_ptr<Sleepers> sleepers_;
};

}  // namespace hc
