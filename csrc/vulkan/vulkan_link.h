// The two sides of a layer, the hot one of which is a GPU.
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

// The part of a step that can be executed before an answer is needed; the next begins with what needs it.
struct Round {
    std::vector<std::vector<VkCommandBuffer>> submits;  // each a vkQueueSubmit, whose batches they are
    int posts = -1;                                     // a layer, or none
    uint64_t after_post = 0;                            // how many batches follow the one that posts
};

struct LinkedStep {
    std::vector<Round> rounds;
    std::vector<int> collects;  // the layer whose answer rounds[i + 1] begins with
    // All rounds in one, for the bounded spin, or empty. Then `restore` sets the batch's numbers again.
    std::vector<std::vector<VkCommandBuffer>> whole;
    std::vector<VkCommandBuffer> restore;

    // Whether every layer that is posted is collected here, and the other way round.
    bool is_balanced() const {
        for (size_t i = 0; i < collects.size(); ++i)
            if (rounds[i].posts != collects[i]) return false;
        return rounds.back().posts < 0;
    }
};

// In one of two forms. Submit on answer: a step is submitted up to where it needs an answer; whoever brings
// the answer submits the next round. A mailbox is full once the timeline says so. Bounded spin: the whole
// step is submitted. The device sets a flag in host memory when a mailbox is full, and where it needs an
// answer, a shader reads the flag that says that it is there, up to so many times. If it gives up, it sets
// the step's counts to 0, so that what follows does nothing; the rest of the step is then submitted in the
// first form. A link whose shaders give up in three steps in a row keeps to the first form from then on.
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
        bool spin;   // if the link does, and the step can
        bool timed;  // by the device, so that marks need not tell when the host saw that it was there
    };
    // Hot side: executes a step, and returns how many answers shaders have seen. LinkError, as Link has it;
    // VulkanError, whichever side it comes from. Marks of a step that is not timed are those of a step that
    // is submitted on answer, as a waiting shader tells the host nothing.
    size_t run(const LinkedStep& step, int32_t number, Form form, const CheckInterrupt& check);

    bool spins() const { return spin_; }
    bool still_spins() const { return spin_ && in_a_row_.load() < kMostInARow; }
    const Shaders& shaders() const { return shaders_; }
    // Words by layer: the step for which it was posted, answered, and what the waiting shader wrote; one more
    // of the last is how often the step's shaders have looked in vain.
    const std::shared_ptr<Memory>& posted() const { return posted_; }
    const std::shared_ptr<Memory>& answered() const { return answered_; }
    const std::shared_ptr<Memory>& status() const { return status_; }

    struct Counts {
        int64_t steps, answered, gave_up;  // of collects, those whose answer a shader saw, and the others
        bool spins;                        // still
    };
    Counts counts() const { return {steps_.load(), seen_.load(), gave_up_.load(), still_spins()}; }

  private:
    static constexpr int kMostInARow = 3;
    using Clock = std::chrono::steady_clock;
    // A layer whose input is in the mailbox, or will be: at a value of the timeline, or by a flag.
    struct Announced {
        uint64_t number = 0;
        int layer = -1;
        bool by_flag = false;
        uint64_t value = 0;
        int32_t step = 0;
    };
    // The parts that a forked process can neither use nor destroy.
    struct Sleepers {
        std::mutex mutex;
        std::condition_variable wake;
        std::string reason;        // why the link ended
        std::exception_ptr error;  // of the device, which the cold side met
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

    std::atomic<uint64_t> announced_{0}, done_{0};  // how many layers
    std::atomic<bool> ended_{false}, running_{false};
    std::atomic<int64_t> steps_{0}, seen_{0}, gave_up_{0};
    std::atomic<int> in_a_row_{0};  // steps in which shaders gave up
    std::unique_ptr<Sleepers> sleepers_;

    // Under its mutex.
    Announced last_;
    uint64_t taken_ = 0;                // the last announcement that the cold side has taken
    const LinkedStep* step_ = nullptr;  // that is being executed
    int32_t number_ = 0;
    bool spinning_ = false;
    size_t begun_ = 0;            // rounds that are submitted, or that the device may be at
    bool by_host_ = false;        // marks of the device's are the host's
    std::vector<uint64_t> ends_;  // of each round, on the timeline
    std::vector<int64_t> takes_;  // when the cold side took each layer
    uint64_t finished_ = 0;       // value of the timeline when all that is submitted is done
};

}  // namespace hc::vulkan
