// How the two sides of a hybrid model tell each other what lies in a layer's mailbox.
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

// The other side has failed, was stopped, is not in this process, or gives no answer in time.
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

// The last moments, from both sides; nothing is recorded before start().
class Marks {
  public:
    void start(size_t capacity);
    void stop() { ring_size_.store(0); }
    void add(int moment, int layer) {
        if (taking()) record(moment, layer, now());
    }
    // At another time than now, of the same clock.
    void add_at(int moment, int layer, int64_t nanoseconds) {
        if (taking()) record(moment, layer, nanoseconds);
    }
    bool taking() const { return ring_size_.load(std::memory_order_acquire) != 0; }
    // In the order of their times. While neither side is at work.
    std::vector<Mark> taken() const;

    static int64_t now();

  private:
    void record(int moment, int layer, int64_t nanoseconds);

    std::vector<Mark> ring_;
    std::atomic<size_t> ring_size_{0}, next_{0};
};

// The link as the cold side sees it. The hot side posts a layer when its input lies in the mailbox; at most
// one layer is out at a time. How the hot side posts and learns of answers belongs to its backend: nothing
// here says that it reads host memory.
class Link {
  public:
    virtual ~Link() = default;
    // Returns when a layer is posted: whether it is this one. If it is another one, the step has begun anew,
    // and that layer stays posted. Also false once the link is stopped or has failed.
    virtual bool wait_posted(int layer) = 0;
    virtual void answer(int layer) = 0;                // the layer's answer lies in the mailbox
    virtual void fail(const std::string& reason) = 0;  // nothing will be answered any more
    virtual void stop() = 0;                           // ends whoever waits
    virtual bool ended() const = 0;                    // stopped or failed

    Marks marks;
};

// Answers layers, for each of which it has what computes it, in this order, until the link ends. What a layer
// throws is told to the other side.
using ColdLayers = std::vector<std::pair<int, std::function<void()>>>;
void serve(Link& link, const ColdLayers& layers);

// Two numbers in memory that both sides see. A wait spins for some microseconds, gives its core to others for
// some more, and then sleeps.
class FlagLink final : public Link {
  public:
    // Whether the one who waits shall give up; asked about every 50 ms. What it throws ends the wait, too.
    using GiveUp = std::function<bool()>;

    // A layer without an answer for so long is a LinkError.
    explicit FlagLink(double timeout_seconds);
    ~FlagLink() override;

    bool wait_posted(int layer) override;
    void answer(int layer) override;
    void fail(const std::string& reason) override;
    void stop() override { fail("it was closed"); }
    bool ended() const override { return ended_.load(std::memory_order_acquire); }

    // Hot side, before it fills a mailbox: an interrupted step may have left the cold side at work.
    void wait_idle(int layer, const GiveUp& give_up = {});
    void post(int layer);
    // Whether the answer lies there; false where the wait was given up.
    bool wait_answered(int layer, const GiveUp& give_up = {});

  private:
    using Clock = std::chrono::steady_clock;
    // The parts that a process forked from the link's can neither use nor destroy, as those who wait are not
    // there.
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
        0};  // how many layers in the high half, the last one in the low one
    alignas(64) std::atomic<uint64_t> done_{0};  // how many of them are answered
    alignas(64) std::atomic<bool> ended_{false};
    std::atomic<int> sleeping_{0};
    std::unique_ptr<Sleepers> sleepers_;
};

}  // namespace hc
