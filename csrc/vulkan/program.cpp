#include "vulkan/program.h"

#include <cstring>
#include <stdexcept>

namespace hc::vulkan {

namespace {

constexpr size_t kPolledDispatches = 32;  // of a step whose last dispatch has its own batch

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

std::vector<Span> spans(const std::vector<Range>& ranges, bool written) {
    std::vector<Span> found;
    for (const Range& r : ranges)
        if (r.written == written) found.push_back(span_of(*r.memory, r.offset, r.bytes));
    return found;
}

}  // namespace

uint64_t BatchPlace::words() const {
    uint64_t n = kHeader;
    for (const auto& [values, size] : arrays) n += size;
    return n;
}

void Recorder::check_range(const Range& r) const {
    if (!r.memory) refuse("a range has no memory");
    const uint64_t size = (r.memory->size() + 3) / 4 * 4;  // memory has whole words
    if (r.offset > size || r.bytes > size - r.offset || !r.bytes || r.bytes % 4 || r.offset % 4)
        refuse("bytes " + std::to_string(r.offset) + " to " + std::to_string(r.offset + r.bytes) +
               " of a memory of " + std::to_string(r.memory->size()) + ": whole words inside it are needed");
}

void Recorder::batch(BatchPlace place) {
    check_range({place.memory, 0, place.words() * 4, true});
    if (batch_.memory) refuse("a program has one batch");
    place.header.back() = int32_t(place.batch.pages_per_sequence);
    batch_ = std::move(place);
}

void Recorder::dispatch(std::shared_ptr<Pipeline> pipeline, std::vector<Range> ranges,
                        std::vector<uint8_t> push, std::array<uint32_t, 3> groups) {
    if (ranges.size() != pipeline->ranges() || push.size() != pipeline->push_bytes())
        refuse(std::to_string(ranges.size()) + " ranges and " + std::to_string(push.size()) +
               " bytes of push constants: the pipeline takes " + std::to_string(pipeline->ranges()) +
               " and " + std::to_string(pipeline->push_bytes()));
    const uint64_t most = heap_->device()->info().max_range;
    const uint64_t alignment = heap_->device()->limits().minStorageBufferOffsetAlignment;
    for (const Range& r : ranges) {
        check_range(r);
        if (r.bytes > most)
            refuse("a range of " + std::to_string(r.bytes) + " bytes: this device allows " +
                   std::to_string(most));
        if (r.offset % alignment)
            refuse("a range begins at byte " + std::to_string(r.offset) + ": multiples of " +
                   std::to_string(alignment) + " are needed");
    }
    for (uint32_t n : groups)
        if (n < 1 || n > 65535) refuse(std::to_string(n) + " workgroups: 1 to 65535 are possible");
    steps_.push_back(Dispatch{std::move(pipeline), std::move(ranges), std::move(push), groups});
}

void Recorder::copy(Range source, Range target) {
    check_range(source);
    check_range(target);
    steps_.push_back(Copy{std::move(source), std::move(target)});
}

void Recorder::post(std::shared_ptr<VulkanLink> link, int layer) {
    take_link(std::move(link), layer);
    steps_.push_back(
        Post{layer, of_link(link_->shaders().post, link_->answered(), link_->posted(), layer, false)});
}

void Recorder::collect(std::shared_ptr<VulkanLink> link, int layer) {
    take_link(std::move(link), layer);
    steps_.push_back(
        Collect{layer, of_link(link_->shaders().wait, link_->answered(), link_->status(), layer, true)});
}

void Recorder::take_link(std::shared_ptr<VulkanLink> link, int layer) {
    if (!batch_.memory) refuse("post and collect: a program's batch comes first");
    if (layer < 0 || layer >= VulkanLink::kLayers)
        refuse("layer " + std::to_string(layer) + ": 0 to " + std::to_string(VulkanLink::kLayers - 1) +
               " are possible");
    if (link_ && link_ != link) refuse("a program has one link");
    link_ = std::move(link);
}

// The shader reads the batch, two words of the layer, and the layer's number. `writes_batch`: later readers
// of the batch must wait for the shader.
Recorder::Dispatch Recorder::of_link(const std::shared_ptr<Pipeline>& shader,
                                     const std::shared_ptr<Memory>& read,
                                     const std::shared_ptr<Memory>& written, int layer,
                                     bool writes_batch) const {
    const uint32_t slot = uint32_t(layer);
    std::vector<uint8_t> push(sizeof slot);
    std::memcpy(push.data(), &slot, sizeof slot);
    return {shader,
            {{batch_.memory, 0, batch_.words() * 4, writes_batch},
             {read, 0, read->size(), false},
             {written, 0, written->size(), true}},
            push,
            {1, 1, 1}};
}

void Recorder::clear(std::shared_ptr<Memory> memory) {
    if (!memory->host()) refuse("memory that is cleared before each run must be upload or download");
    cleared_.push_back(std::move(memory));
}

void Recorder::cut() { steps_.push_back(Cut{}); }

std::shared_ptr<Program> Recorder::finish() { return std::make_shared<Program>(std::move(*this)); }

// Returns the dispatch of a step, including a link's.
const Recorder::Dispatch* Recorder::dispatch_of(const Step& step) {
    if (const auto* d = std::get_if<Dispatch>(&step)) return d;
    if (const auto* p = std::get_if<Post>(&step)) return &p->flag;
    if (const auto* c = std::get_if<Collect>(&step)) return &c->wait;
    return nullptr;
}

// Writes command buffers, with barriers between commands that need them.
class Program::Writer {
  public:
    Writer(Program& program, VkQueryPool times) : p_(program), f_(program.device_->f()), times_(times) {}

    void begin() {
        commands_ = p_.commands_.make();
        p_.commands_.begin(commands_);
    }
    VkCommandBuffer end() {
        p_.commands_.end(commands_);
        return commands_;
    }
    // Adds a barrier and clears the recorded hazards.
    void order(Barrier barrier) {
        hazards_.clear();
        put_barrier(f_, commands_, barrier);
        ++counts.barriers;
    }
    void batch() {
        const BatchPlace& batch = p_.recorded_.batch_;
        if (!batch.memory) return;
        const uint64_t bytes = batch.words() * 4;
        copy({p_.upload_, 0, bytes, false}, {batch.memory, 0, bytes, true});
    }
    void copy(const Range& from, const Range& to) {
        note({from}, {to});
        const VkBufferCopy range{from.memory->offset() + from.offset, to.memory->offset() + to.offset,
                                 from.bytes};
        f_.vkCmdCopyBuffer(commands_, from.memory->buffer(), to.memory->buffer(), 1, &range);
    }
    void forget_times(size_t first, size_t count) {
        if (times_ && count) f_.vkCmdResetQueryPool(commands_, times_, uint32_t(first), uint32_t(count));
    }
    // Records the time when all earlier commands are done.
    void time(size_t query) {
        if (times_)
            f_.vkCmdWriteTimestamp(commands_, VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT, times_, uint32_t(query));
    }
    void dispatch(const Recorder::Dispatch& d, VkDescriptorSet set) {
        note(d.ranges, d.ranges);
        const Pipeline& pipeline = *d.pipeline;
        f_.vkCmdBindPipeline(commands_, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline.get());
        f_.vkCmdBindDescriptorSets(commands_, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline.layout(), 0, 1, &set,
                                   0, nullptr);
        if (!d.push.empty())
            f_.vkCmdPushConstants(commands_, pipeline.layout(), VK_SHADER_STAGE_COMPUTE_BIT, 0,
                                  uint32_t(d.push.size()), d.push.data());
        f_.vkCmdDispatch(commands_, d.groups[0], d.groups[1], d.groups[2]);
        ++counts.dispatches;
    }

    StepCounts counts;

  private:
    void note(const std::vector<Range>& reads, const std::vector<Range>& writes) {
        if (!hazards_.add(spans(reads, false), spans(writes, true))) return;
        put_barrier(f_, commands_);
        ++counts.barriers;
    }

    Program& p_;
    const Functions& f_;
    const VkQueryPool times_;
    Hazards hazards_;
    VkCommandBuffer commands_ = VK_NULL_HANDLE;
};

Program::Program(Recorder recorder)
    : device_(recorder.heap_->device()),
      recorded_(std::move(recorder)),
      sets_pool_(device_, device_->f().vkDestroyDescriptorPool),
      commands_(device_) {
    if (recorded_.batch_.memory)
        upload_ = recorded_.heap_->allocate(recorded_.batch_.words() * 4, Where::kUpload);
    make_sets();
    polls_ = !recorded_.link_ && sets_.size() >= kPolledDispatches;
    record_rounds(step_);
    if (recorded_.link_ && recorded_.link_->spins() && step_.step.is_balanced()) record_whole(step_);
}

// Waits only for this program: others may run for long.
Program::~Program() {
    if (!last_) return;
    try {
        device_->wait(last_);
    } catch (const VulkanError&) {
        device_->wait_idle();
    }
}

void Program::make_sets() {
    const Functions& f = device_->f();
    std::vector<const Recorder::Dispatch*> dispatches;
    std::vector<VkDescriptorSetLayout> layouts;
    uint32_t ranges = 0;
    for (const Recorder::Step& step : recorded_.steps_) {
        const Recorder::Dispatch* d = Recorder::dispatch_of(step);
        if (!d) continue;
        dispatches.push_back(d);
        layouts.push_back(d->pipeline->set_layout());
        ranges += d->pipeline->ranges();
    }
    if (layouts.empty()) return;
    const VkDescriptorPoolSize size{VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, ranges};
    const VkDescriptorPoolCreateInfo create{
        VK_STRUCTURE_TYPE_DESCRIPTOR_POOL_CREATE_INFO, nullptr, 0, uint32_t(layouts.size()), 1, &size};
    device_->call(f.vkCreateDescriptorPool, device_->handle(), &create, nullptr, sets_pool_.put());
    sets_.resize(layouts.size());
    const VkDescriptorSetAllocateInfo allocate{VK_STRUCTURE_TYPE_DESCRIPTOR_SET_ALLOCATE_INFO, nullptr,
                                               sets_pool_.get(), uint32_t(layouts.size()), layouts.data()};
    device_->call(f.vkAllocateDescriptorSets, device_->handle(), &allocate, sets_.data());

    std::vector<VkDescriptorBufferInfo> buffers;
    buffers.reserve(ranges);
    std::vector<VkWriteDescriptorSet> writes;
    for (const Recorder::Dispatch* d : dispatches) {
        VkWriteDescriptorSet write{};
        write.sType = VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET;
        write.dstSet = sets_[writes.size()];
        write.descriptorCount = uint32_t(d->ranges.size());
        write.descriptorType = VK_DESCRIPTOR_TYPE_STORAGE_BUFFER;
        write.pBufferInfo = buffers.data() + buffers.size();
        for (const Range& r : d->ranges)
            buffers.push_back({r.memory->buffer(), r.memory->offset() + r.offset, r.bytes});
        writes.push_back(write);
    }
    f.vkUpdateDescriptorSets(device_->handle(), uint32_t(writes.size()), writes.data(), 0, nullptr);
}

void Program::make_times(Recorded& to) {
    to.times = Owned<VkQueryPool>(device_, device_->f().vkDestroyQueryPool);
    VkQueryPoolCreateInfo create{};
    create.sType = VK_STRUCTURE_TYPE_QUERY_POOL_CREATE_INFO;
    create.queryType = VK_QUERY_TYPE_TIMESTAMP;
    create.queryCount = uint32_t(2 * kTimes * step_.step.collects.size());
    device_->call(device_->f().vkCreateQueryPool, device_->handle(), &create, nullptr, to.times.put());
}

void Program::record_rounds(Recorded& to) {
    Writer writer(*this, to.times.get());
    LinkedStep& made = to.step;
    Round round;
    std::vector<VkCommandBuffer> batches;
    const auto end_batch = [&] {
        batches.push_back(writer.end());
        if (round.posts >= 0) ++round.after_post;
    };
    const auto end_submit = [&] {
        round.submits.push_back(std::exchange(batches, {}));
        ++writer.counts.submits;
    };
    writer.begin();
    writer.forget_times(0, kTimes * step_.step.collects.size());
    writer.order(Barrier::kWork);  // after earlier submits
    writer.batch();
    auto set = sets_.begin();
    for (const Recorder::Step& step : recorded_.steps_) {
        const size_t times = kTimes * made.collects.size();
        if (const auto* d = std::get_if<Recorder::Dispatch>(&step)) {
            if (polls_ && set + 1 == sets_.end()) {
                end_batch();
                writer.begin();
            }
            writer.dispatch(*d, *set);
        } else if (const auto* c = std::get_if<Recorder::Copy>(&step)) {
            writer.copy(c->source, c->target);
        } else if (const auto* post = std::get_if<Recorder::Post>(&step)) {
            if (round.posts >= 0) refuse("a second layer is posted before the first one's answer");
            writer.order(Barrier::kToHost);
            writer.time(times + kPosted);
            end_batch();
            round.posts = post->layer;
            writer.begin();
        } else if (const auto* collect = std::get_if<Recorder::Collect>(&step)) {
            writer.time(times + kWaits);
            end_batch();
            end_submit();
            made.rounds.push_back(std::exchange(round, {}));
            made.collects.push_back(collect->layer);
            writer.begin();
            writer.time(times + kGoesOn);
            writer.order(Barrier::kWork);
        } else {
            end_batch();
            end_submit();
            writer.begin();
        }
        if (Recorder::dispatch_of(step)) ++set;
    }
    writer.order(Barrier::kToHost);  // a signal of the timeline makes nothing visible to the host
    end_batch();
    end_submit();
    made.rounds.push_back(std::move(round));
    counts_ = writer.counts;
}

void Program::record_whole(Recorded& to) {
    Writer writer(*this, to.times.get());
    LinkedStep& made = to.step;
    const size_t all = kTimes * made.collects.size();
    writer.begin();
    writer.forget_times(all, all);
    writer.order(Barrier::kWork);
    writer.batch();
    auto set = sets_.begin();
    size_t times = all;
    for (const Recorder::Step& step : recorded_.steps_) {
        if (const auto* d = std::get_if<Recorder::Dispatch>(&step)) {
            writer.dispatch(*d, *set);
        } else if (const auto* c = std::get_if<Recorder::Copy>(&step)) {
            writer.copy(c->source, c->target);
        } else if (const auto* post = std::get_if<Recorder::Post>(&step)) {
            writer.order(Barrier::kToHost);  // the mailbox must be visible before the flag
            writer.time(times + kPosted);
            writer.dispatch(post->flag, *set);
        } else if (const auto* collect = std::get_if<Recorder::Collect>(&step)) {
            writer.order(Barrier::kFromHost);
            writer.time(times + kWaits);
            writer.dispatch(collect->wait, *set);
            writer.order(Barrier::kFromHost);
            writer.time(times + kGoesOn);
            times += kTimes;
        } else {
            made.whole.push_back({writer.end()});
            writer.begin();
        }
        if (Recorder::dispatch_of(step)) ++set;
    }
    writer.order(Barrier::kToHost);
    made.whole.push_back({writer.end()});
    writer.begin();
    writer.forget_times(0, all);
    writer.order(Barrier::kWork);
    writer.batch();
    writer.order(Barrier::kWork);
    made.restore = {writer.end()};
}

void Program::take_batch() {
    BatchPlace& place = recorded_.batch_;
    if (!place.memory) return;
    check_batch(place.batch, place.bounds);
    if (place.bounds.states >= 0) check_states(place.batch, place.bounds, with_rows_);
    std::memcpy(place.header.data(), place.batch.counts, 4 * sizeof(int32_t));
    place.header[4] = device_->next_step();
    uint8_t* to = upload_->host();
    std::memcpy(to, place.header.data(), sizeof place.header);
    to += sizeof place.header;
    for (const auto& [values, size] : place.arrays) {
        std::memcpy(to, values, size * sizeof(int32_t));
        to += size * sizeof(int32_t);
    }
}

void Program::run(const CheckInterrupt& check) {
    std::lock_guard<std::mutex> lock(mutex_);
    try {
        run_once(check);
        last_ = 0;
    } catch (...) {
        last_ = device_->submitted();
        throw;
    }
}

void Program::run_once(const CheckInterrupt& check) {
    device_->wait(device_->submitted(), check);  // an interrupted run may still be executing
    take_batch();
    for (const auto& memory : recorded_.cleared_) std::memset(memory->host(), 0, size_t(memory->size()));
    if (recorded_.link_) return run_linked(check);
    uint64_t value = 0;
    for (const auto& batches : step_.step.rounds.front().submits) value = device_->submit(batches);
    if (polls_)
        device_->wait_for_last(value, check);
    else
        device_->wait(value, check);
}

void Program::run_linked(const CheckInterrupt& check) {
    const BatchPlace& place = recorded_.batch_;
    if (!place.batch.tokens_count()) return;
    VulkanLink& link = *recorded_.link_;
    const bool timed = link.marks.taking() && device_->has_clock() && !step_.step.collects.empty();
    // Cold neurons of a prompt take longer than a shader may wait.
    const VulkanLink::Form form{place.batch.prompt_count() == 0 && link.still_spins(), timed};
    if (timed && !timed_) {
        auto made = std::make_unique<Recorded>();
        make_times(*made);
        record_rounds(*made);
        if (!step_.step.whole.empty()) record_whole(*made);
        timed_ = std::move(made);
    }
    const Recorded& chosen = timed ? *timed_ : step_;
    const size_t seen = link.run(chosen.step, place.header[4], form, check);
    if (timed) mark_times(chosen, form.spin, seen);
}

// `seen`: answers that shaders received. The rounds have the times of the other answers, except that the
// device reached the first of them before it gave up.
void Program::mark_times(const Recorded& from, bool spun, size_t seen) {
    const std::vector<int>& layers = from.step.collects;
    constexpr Moment kMoments[kTimes] = {kPost, kWait, kWaited};
    std::vector<uint64_t> stamps;
    for (size_t i = 0; i < layers.size(); ++i) {
        for (uint32_t time = 0; time < kTimes; ++time) {
            const bool whole =
                spun && !from.step.whole.empty() && (i < seen || (i == seen && time != kGoesOn));
            const uint32_t query = uint32_t(kTimes * (i + (whole ? layers.size() : 0))) + time;
            uint64_t stamp = 0;
            device_->call(device_->f().vkGetQueryPoolResults, device_->handle(), from.times.get(), query, 1u,
                          sizeof stamp, &stamp, sizeof stamp, VkQueryResultFlags(VK_QUERY_RESULT_64_BIT));
            stamps.push_back(stamp);
        }
    }
    const std::vector<int64_t> times = device_->host_times(stamps);
    for (size_t i = 0; i < times.size(); ++i)
        recorded_.link_->marks.add_at(kMoments[i % kTimes], layers[i / kTimes], times[i]);
}

}  // namespace hc::vulkan
