#include "vulkan/vulkan_link.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "pool/wait.h"

namespace hc::vulkan {

namespace {

constexpr std::chrono::milliseconds kAskEvery(50);
constexpr std::chrono::microseconds kNap(50);  // between checks of a flag that stays unset
constexpr uint64_t kSliceNanoseconds = 50'000'000;
constexpr uint32_t kAnswered = 1, kGaveUp = 2;  // written by the waiting shader

// A word that the device and the host share.
std::atomic<uint32_t>& word(const Memory& memory, int layer) {
    static_assert(sizeof(std::atomic<uint32_t>) == 4);
    return reinterpret_cast<std::atomic<uint32_t>*>(memory.host())[layer];
}

}  // namespace

VulkanLink::VulkanLink(std::shared_ptr<Heap> heap, double timeout_seconds, bool spin, Shaders shaders)
    : device_(heap->device()),
      timeout_(timeout_seconds),
      spin_(spin),
      process_(process_id()),
      shaders_(std::move(shaders)),
      posted_(heap->allocate(kLayers * 4, Where::kDownload)),
      answered_(heap->allocate(kLayers * 4, Where::kUpload)),
      status_(heap->allocate((kLayers + 1) * 4, Where::kDownload)),
      sleepers_(std::make_unique<Sleepers>()) {
    for (const auto& memory : {posted_, answered_, status_})
        std::memset(memory->host(), 0, size_t(memory->size()));
}

VulkanLink::~VulkanLink() {
    if (process_ != process_id()) static_cast<void>(sleepers_.release());  // see struct Sleepers
}

// Spin time before sleeping. While a step is executed, as long as a layer of a large model takes, because
// waking up takes much of that time.
std::chrono::microseconds VulkanLink::patience() const {
    return std::chrono::microseconds(running_.load(std::memory_order_relaxed) ? 1000 : 200);
}

// Cold side

bool VulkanLink::wait_posted(int layer) {
    const auto something = [this] { return !idle() || ended(); };
    while (!ended()) {
        if (!spin_until(something, patience())) {
            Lock lock(sleepers_->mutex);
            sleepers_->wake.wait(lock, something);
        }
        Announced seen;
        {
            Lock lock(sleepers_->mutex);
            seen = last_;
        }
        if (ended() || idle()) continue;
        if (seen.layer != layer) return false;
        try {
            if (!is_posted(seen)) continue;
        } catch (const VulkanError& error) {
            fail(error.what(), std::current_exception());
            return false;
        }
        Lock lock(sleepers_->mutex);
        if (last_.number != seen.number || idle()) continue;
        taken_ = seen.number;
        if (by_host_) takes_.push_back(Marks::now());
        marks.add(kTake, layer);
        return true;
    }
    return false;
}

// Waits for a while only: an announcement may be withdrawn, and the link may end.
bool VulkanLink::is_posted(const Announced& seen) {
    if (seen.by_flag) {
        const std::atomic<uint32_t>& flag = word(*posted_, seen.layer);
        const auto set = [&] { return flag.load(std::memory_order_acquire) == uint32_t(seen.step); };
        if (spin_until([&] { return set() || ended() || idle(); }, patience())) return set();
        std::this_thread::sleep_for(kNap);
        return set();
    }
    const auto full = [&] { return device_->done() >= seen.value; };
    if (spin_until([&] { return full() || ended(); }, patience())) return full();
    return device_->wait_for(seen.value, kSliceNanoseconds);
}

void VulkanLink::answer(int layer) {
    marks.add(kGive, layer);
    try {
        Lock lock(sleepers_->mutex);
        // The device may have waited for long already.
        if (spinning_) {
            order_writes();
            word(*answered_, layer).store(uint32_t(number_), std::memory_order_release);
            order_writes();
        }
        done_.store(announced_.load());
        if (step_ && spinning_)
            answered_spinning(lock);
        else if (step_)
            begin_rounds(lock);
    } catch (const VulkanError& error) {
        fail(error.what(), std::current_exception());
    }
    wake();
}

void VulkanLink::answered_spinning(const Lock& lock) {
    const int next = step_->rounds[begun_].posts;
    ++begun_;
    if (next >= 0) announce(lock, {0, next, true, 0, number_});
}

void VulkanLink::fail(const std::string& reason) { fail(reason, nullptr); }

void VulkanLink::fail(const std::string& reason, std::exception_ptr error) {
    if (process_ == process_id()) {
        Lock lock(sleepers_->mutex);
        if (!ended()) {
            sleepers_->reason = reason;
            sleepers_->error = std::move(error);
        }
        ended_.store(true);
    }
    ended_.store(true);
    wake();
}

// Hot side

size_t VulkanLink::run(const LinkedStep& step, int32_t number, Form form, const CheckInterrupt& check) {
    device_->check_usable();
    if (step.rounds.front().posts >= 0) wait_idle(step.rounds.front().posts, check);
    steps_.fetch_add(1);
    size_t seen = 0;
    try {
        {
            Lock lock(sleepers_->mutex);
            by_host_ = marks.taking() && !form.timed;
            ends_.clear();
            takes_.clear();
            step_ = &step;
            running_.store(true);
            number_ = number;
            begun_ = 0;
            spinning_ = form.spin && still_spins() && !step.whole.empty() && !by_host_;
            if (!spinning_) begin_rounds(lock);
        }
        if (spinning_) seen = run_spinning(check);
        if (by_host_) follow_rounds(check);
        wait_for_rounds(step.rounds.size(), check);
        spin_until([this] { return device_->done() >= finished_; }, patience());
        device_->wait(finished_, check);
    } catch (...) {
        leave(true);
        throw;
    }
    leave(false);
    return seen;
}

// Submits rounds until one needs an answer that has not arrived.
void VulkanLink::begin_rounds(const Lock& lock) {
    while (begun_ < step_->rounds.size() && (!begun_ || idle())) {
        const Round& round = step_->rounds[begun_];
        for (const auto& batches : round.submits) finished_ = device_->submit(batches);
        ends_.push_back(finished_);
        ++begun_;
        if (round.posts >= 0) announce(lock, {0, round.posts, false, finished_ - round.after_post, number_});
    }
}

void VulkanLink::announce(const Lock&, Announced next) {
    next.number = announced_.load() + 1;
    last_ = next;
    announced_.store(next.number);
    sleepers_->wake.notify_all();
}

size_t VulkanLink::run_spinning(const CheckInterrupt& check) {
    {
        Lock lock(sleepers_->mutex);
        for (int layer : step_->collects) word(*status_, layer).store(0);
        word(*status_, kLayers).store(0);
        for (const auto& batches : step_->whole) finished_ = device_->submit(batches);
        begun_ = 1;
        announce(lock, {0, step_->rounds.front().posts, true, 0, number_});
    }
    device_->wait(finished_, check);
    const size_t seen = rounds_seen();
    seen_.fetch_add(int64_t(seen));
    Lock lock(sleepers_->mutex);
    spinning_ = false;
    if (seen == step_->collects.size()) {
        in_a_row_.store(0);
        return seen;
    }
    gave_up_.fetch_add(1);
    in_a_row_.fetch_add(1);
    if (begun_ > seen + 1) done_.store(announced_.load());  // the next post was announced and never came
    begun_ = seen + 1;
    finished_ = device_->submit(step_->restore);
    begin_rounds(lock);
    return seen;
}

void VulkanLink::follow_rounds(const CheckInterrupt& check) {
    for (size_t i = 0; i < step_->collects.size(); ++i) {
        wait_for_rounds(i + 1, check);
        const uint64_t end = [&] {
            Lock lock(sleepers_->mutex);
            return ends_[i];
        }();
        device_->wait(end - step_->rounds[i].after_post, check);
        int64_t posted = Marks::now();
        {
            Lock lock(sleepers_->mutex);
            if (i < takes_.size()) posted = std::min(posted, takes_[i]);  // the cold side saw it first
        }
        marks.add_at(kPost, step_->collects[i], posted);
        device_->wait(end, check);
        marks.add(kWait, step_->collects[i]);
        wait_for_rounds(i + 2, check);
        marks.add(kWaited, step_->collects[i]);
    }
}

// Returns the number of answers that the shaders received.
size_t VulkanLink::rounds_seen() const {
    size_t seen = 0;
    for (int layer : step_->collects) {
        const uint32_t status = word(*status_, layer).load(std::memory_order_acquire);
        if (status == kGaveUp) return seen;
        if (status != kAnswered)
            throw VulkanError("layer " + std::to_string(layer) + ": the shader that waits for it wrote " +
                              std::to_string(status) +
                              ", which it never does: run with --gpu off, and report "
                              "this device: " +
                              device_->info().name);
        ++seen;
    }
    return seen;
}

// An interrupted step may have left the cold side running.
void VulkanLink::wait_idle(int layer, const CheckInterrupt& check) {
    const Clock::time_point start = Clock::now();
    while (!ended() && !idle()) {
        if (check) check();
        if (Clock::now() - start > timeout_) raise_late(last_.layer);
        Lock lock(sleepers_->mutex);
        sleepers_->wake.wait_for(lock, kAskEvery, [this] { return idle() || ended(); });
    }
    if (ended()) raise_ended(layer);
}

// Waits until `count` rounds have been submitted.
void VulkanLink::wait_for_rounds(size_t count, const CheckInterrupt& check) {
    uint64_t asked = 0;  // the announcement whose timeout runs
    Clock::time_point since = Clock::now();
    for (;;) {
        Announced now;
        {
            Lock lock(sleepers_->mutex);
            const auto submitted = [&] { return begun_ >= count; };
            sleepers_->wake.wait_for(lock, kAskEvery, [&] { return submitted() || ended(); });
            if (submitted()) return;
            now = last_;
        }
        if (ended()) raise_ended(now.layer);
        if (check) check();
        device_->check_progress();
        const bool full = now.by_flag || device_->done() >= now.value;
        if (now.number != asked || !full) since = Clock::now();
        asked = now.number;
        if (Clock::now() - since > timeout_) raise_late(now.layer);
    }
}

void VulkanLink::leave(bool failed) {
    Lock lock(sleepers_->mutex);
    step_ = nullptr;
    running_.store(false);
    // A device that has given up will not post a layer that was announced but not taken.
    if (failed && spinning_ && taken_ != last_.number) done_.store(announced_.load());
    spinning_ = false;
}

void VulkanLink::wake() {
    if (process_ != process_id()) return;
    Lock lock(sleepers_->mutex);
    sleepers_->wake.notify_all();
}

void VulkanLink::raise_ended(int layer) const {
    Lock lock(sleepers_->mutex);
    if (sleepers_->error) std::rethrow_exception(sleepers_->error);
    throw LinkError("layer " + std::to_string(layer) + ": the cold side has ended: " + sleepers_->reason);
}

void VulkanLink::raise_late(int layer) const {
    throw LinkError("layer " + std::to_string(layer) + ": the cold side has given no answer for " +
                    std::to_string(int64_t(timeout_.count() * 1000)) + " ms");
}

}  // namespace hc::vulkan
