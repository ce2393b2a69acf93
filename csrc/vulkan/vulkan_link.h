// The link between a GPU as the hot side and the CPU as the cold side of a layer.
#pragma once
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "program/link.h"
#include "vulkan/commands.h"
#include "vulkan/pipeline.h"

namespace hc::vulkan {

// The part of a step up to the point where an answer is needed; the next round begins with the use of the
// answer.
struct Round {
    std::vector<std::vector<VkCommandBuffer>> submits;  // each is one vkQueueSubmit with these batches
    int posts = -1;                                     // a layer, or -1
    uint64_t after_post = 0;                            // batches after the one that posts
};

struct LinkedStep {
    std::vector<Round> rounds;
    std::vector<int> collects;  // rounds[i + 1] begins with the answer of layer collects[i]
    // All rounds in one, for the bounded spin, or empty. `restore` then sets the batch's numbers again.
    std::vector<std::vector<VkCommandBuffer>> whole;
    std::vector<VkCommandBuffer> restore;

    // Returns true if each posted layer is collected in this step, and vice versa.
    bool is_balanced() const {
        for (size_t i = 0; i < collects.size(); ++i)
            if (rounds[i].posts != collects[i]) return false;
        return rounds.back().posts < 0;
    }
};

// Works in one of two forms. Submit on answer: a step is submitted up to the point where it needs an answer;
// the thread that brings the answer submits the next round. A mailbox is full when the timeline reaches a
// value. Bounded spin: the whole step is submitted. The device sets a flag in host memory when a mailbox is
// full. To receive an answer, a shader polls a flag, up to a fixed number of times. If it gives up, it sets
// the step's counts to 0, so that the following commands do nothing; the rest of the step is then submitted
// in the first form. After three steps in a row in which shaders gave up, the link stays with the first form.
class VulkanLink final : public Link {
  public:
    static constexpr int kLayers = 1024;

    // The shaders of the bounded spin: one sets a layer's flag, and one waits for an answer.
    struct Shaders {
        std::shared_ptr<Pipeline> post, wait;
    };

    VulkanLink(std::shared_ptr<Heap> heap, double timeout_seconds, bool spin, Shaders shaders);
    ~VulkanLink() override;

    // Cold side.
    bool wait_posted(int layer) override;
    void answer(int layer) override;
    void fail(const std::string& reason) override;
    void stop() override { fail("it was closed"); }
    bool ended() const override { return ended_.load(std::memory_order_acquire); }

    struct Form {
        bool spin;   // only if the link spins and the step can
        bool timed;  // the device records the times, so the host need not mark them
    };
    // Hot side: executes a step and returns the number of answers that shaders received. Throws LinkError
    // like Link, and VulkanError from either side. Without `timed`, while marks are recorded, a step is
    // submitted on answer, because a waiting shader reports nothing to the host.
    size_t run(const LinkedStep& step, int32_t number, Form form, const CheckInterrupt& check);

    bool spins() const { return spin_; }
    bool still_spins() const { return spin_ && in_a_row_.load() < kMostInARow; }
    const Shaders& shaders() const { return shaders_; }
    // Words by layer: the step for which it was posted, the step for which it was answered, and the result of
    // the waiting shader. The last array has one more word: the unsuccessful polls of the step's shaders.
    const std::shared_ptr<Memory>& posted() const { return posted_; }
    const std::shared_ptr<Memory>& answered() const { return answered_; }
    const std::shared_ptr<Memory>& status() const { return status_; }

    struct Counts {
        int64_t steps, answered, gave_up;  // collects: answer received by a shader, or not
        bool spins;                        // still spins
    };
    Counts counts() const { return {steps_.load(), seen_.load(), gave_up_.load(), still_spins()}; }

  private:
    static constexpr int kMostInARow = 3;
    using Clock = std::chrono::steady_clock;
    // A layer whose input is or will be in the mailbox: at a timeline value, or when its flag is set.
    struct Announced {
        uint64_t number = 0;
        int layer = -1;
        bool by_flag = false;
        uint64_t value = 0;
        int32_t step = 0;
    };
    // Parts that a forked process can neither use nor destroy.
    struct Sleepers {
        std::mutex mutex;
        std::condition_variable wake;
        std::string reason;        // why the link ended
        std::exception_ptr error;  // error of the device that the cold side met
    };
    using Lock = std::unique_lock<std::mutex>;

    bool idle() const { return done_.load() == announced_.load(); }
    std::chrono::microseconds patience() const;
    bool is_posted(const Announced&);
    void announce(const Lock&, Announced);
    void begin_rounds(const Lock&);
    void answered_spinning(const Lock&);
    void wait_idle(int layer, const CheckInterrupt&);
    void wait_for_rounds(size_t count, const CheckInterrupt&);
    void follow_rounds(const CheckInterrupt&);
    size_t run_spinning(const CheckInterrupt&);
    size_t rounds_seen() const;
    void leave(bool failed);
    void wake();
    void fail(const std::string& reason, std::exception_ptr error);
    [[noreturn]] void raise_ended(int layer) const;
    [[noreturn]] void raise_late(int layer) const;

    const std::shared_ptr<Device> device_;
    const std::chrono::duration<double> timeout_;
    const bool spin_;
    const int64_t process_;
    const Shaders shaders_;
    std::shared_ptr<Memory> posted_, answered_, status_;

    std::atomic<uint64_t> announced_{0}, done_{0};  // numbers of layers
    std::atomic<bool> ended_{false}, running_{false};
    std::atomic<int64_t> steps_{0}, seen_{0}, gave_up_{0};
    std::atomic<int> in_a_row_{0};  // steps in which shaders gave up
    std::unique_ptr<Sleepers> sleepers_;

    // Protected by the mutex of sleepers_.
    Announced last_;
    uint64_t taken_ = 0;                // the last announcement that the cold side has taken
    const LinkedStep* step_ = nullptr;  // being executed
    int32_t number_ = 0;
    bool spinning_ = false;
    size_t begun_ = 0;            // rounds that are submitted, or that the device may have reached
    bool by_host_ = false;        // the host records the device's marks
    std::vector<uint64_t> ends_;  // of each round, on the timeline
    std::vector<int64_t> takes_;  // times when the cold side took each layer
    uint64_t finished_ = 0;       // timeline value when all submitted work is done
};

}  // namespace hc::vulkan
