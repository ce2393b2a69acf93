// The steps of a program on a device: recorded once, submitted for every step.
#pragma once
#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <variant>
#include <vector>

#include "program/batch.h"
#include "vulkan/commands.h"
#include "vulkan/pipeline.h"
#include "vulkan/vulkan_link.h"

namespace hc::vulkan {

struct Range {
    std::shared_ptr<Memory> memory;
    uint64_t offset, bytes;
    bool written;
};

// The step's numbers: the host's arrays, and their place in device memory after a header.
struct BatchPlace {
    static constexpr size_t kHeader = 17;
    std::shared_ptr<Memory> memory;
    Batch batch{};
    BatchBounds bounds{};
    std::array<int32_t, kHeader> header{};
    std::vector<std::pair<const int32_t*, size_t>> arrays;  // in their order after the header
    uint64_t words() const;
    // Header words 5 to 15 hold the start of each array.
    void add(const int32_t* values, size_t size) {
        header[5 + arrays.size()] = int32_t(words());
        arrays.emplace_back(values, size);
    }
};

class Program;

class Recorder {
  public:
    explicit Recorder(std::shared_ptr<Heap> heap) : heap_(std::move(heap)) {}

    // These functions throw std::invalid_argument for invalid arguments.
    void batch(BatchPlace place);
    void dispatch(std::shared_ptr<Pipeline> pipeline, std::vector<Range> ranges, std::vector<uint8_t> push,
                  std::array<uint32_t, 3> groups);
    void copy(Range source, Range target);
    void cut();
    // The host clears it before each run, after the device has done all earlier work.
    void clear(std::shared_ptr<Memory> memory);
    // Goes after the commands that fill a layer's mailbox; collect() goes before commands that read its
    // answer.
    void post(std::shared_ptr<VulkanLink> link, int layer);
    void collect(std::shared_ptr<VulkanLink> link, int layer);
    std::shared_ptr<Program> finish();

  private:
    friend class Program;
    struct Dispatch {
        std::shared_ptr<Pipeline> pipeline;
        std::vector<Range> ranges;
        std::vector<uint8_t> push;
        std::array<uint32_t, 3> groups;
    };
    struct Copy {
        Range source, target;
    };
    struct Cut {};
    struct Post {
        int layer;
        Dispatch flag;  // in the bounded spin
    };
    struct Collect {
        int layer;
        Dispatch wait;
    };
    using Step = std::variant<Dispatch, Copy, Cut, Post, Collect>;
    static const Dispatch* dispatch_of(const Step&);
    void check_range(const Range&) const;
    void take_link(std::shared_ptr<VulkanLink>, int layer);
    Dispatch of_link(const std::shared_ptr<Pipeline>&, const std::shared_ptr<Memory>& read,
                     const std::shared_ptr<Memory>& written, int layer, bool writes_batch) const;

    std::shared_ptr<Heap> heap_;
    BatchPlace batch_;
    std::shared_ptr<VulkanLink> link_;
    std::vector<Step> steps_;
    std::vector<std::shared_ptr<Memory>> cleared_;
};

// What a step costs besides its shaders' work; without a link's spinning form.
struct StepCounts {
    int dispatches = 0, barriers = 0, submits = 0;
};

class Program {
  public:
    explicit Program(Recorder recorder);
    ~Program();
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;

    // Copies the batch to the device, submits, and waits. An exception of `check` ends only the wait: the
    // next run first waits until the device is idle.
    void run(const CheckInterrupt& check = {});
    const StepCounts& counts() const { return counts_; }

  private:
    class Writer;
    // A recorded step and, if a timeline is requested, its timestamps.
    struct Recorded {
        LinkedStep step;  // of one round if there is no link
        Owned<VkQueryPool> times;
    };
    // Times of a collect; first of all rounds, then of the whole step.
    enum Time : uint32_t { kPosted = 0, kWaits = 1, kGoesOn = 2, kTimes = 3 };

    void make_sets();
    void make_times(Recorded&);
    void record(Recorded&);
    void record_rounds(Recorded&);
    void record_whole(Recorded&);
    void run_once(const CheckInterrupt&);
    void run_linked(const CheckInterrupt&);
    void mark_times(const Recorded&, bool spun, size_t seen);
    void take_batch();

    std::shared_ptr<Device> device_;
    Recorder recorded_;
    std::shared_ptr<Memory> upload_;  // the batch as the host writes it
    std::vector<int32_t> with_rows_;  // sequences of the step, found by check_states
    Owned<VkDescriptorPool> sets_pool_;
    std::vector<VkDescriptorSet> sets_;  // of the dispatches, in order
    Commands commands_;
    Recorded step_;
    StepCounts counts_;
    // The last dispatch of a long step has its own batch: the host polls once the earlier batch is done.
    bool polls_ = false;
    std::unique_ptr<Recorded> timed_;  // once it is needed
    std::mutex mutex_;                 // of run()
    uint64_t last_ = 0;                // timeline value when an interrupted run is done, or 0
};

}  // namespace hc::vulkan
