#include "program/link.h"

#include <algorithm>

#include "pool/wait.h"

namespace hc {

namespace {

constexpr std::chrono::milliseconds kAskEvery(50);

}  // namespace

void Marks::start(size_t capacity) {
    stop();
    ring_.assign(capacity, Mark{});
    next_.store(0);
    ring_size_.store(capacity);
}

int64_t Marks::now() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void Marks::record(int moment, int layer, int64_t nanoseconds) {
    ring_[next_.fetch_add(1) % ring_.size()] = {moment, layer, nanoseconds};
}

std::vector<Mark> Marks::taken() const {
    std::vector<Mark> marks(ring_.begin(), ring_.begin() + std::min(next_.load(), ring_.size()));
    std::stable_sort(marks.begin(), marks.end(),
                     [](const Mark& a, const Mark& b) { return a.nanoseconds < b.nanoseconds; });
    return marks;
}

void serve(Link& link, const ColdLayers& layers) {
    try {
        while (!link.ended()) {
            size_t answered = 0;
            for (const auto& [layer, run] : layers) {
                if (!link.wait_posted(layer)) break;
                run();
                link.answer(layer);
                ++answered;
            }
            if (!answered && !link.ended()) link.fail("a step began with a layer that is not its first one");
        }
    } catch (const std::exception& error) {
        link.fail(error.what());
    } catch (...) {
        link.fail("unknown error");
    }
}

FlagLink::FlagLink(double timeout_seconds)
    : timeout_(timeout_seconds), process_(process_id()), sleepers_(std::make_unique<Sleepers>()) {}

FlagLink::~FlagLink() {
    if (process_ != process_id()) static_cast<void>(sleepers_.release());  // see struct Sleepers
}

bool FlagLink::wait_posted(int layer) {
    const auto done = [this] { return !idle() || ended(); };
    while (!spin_until(done)) sleep(done, std::chrono::hours(1));
    if (ended() || int32_t(posted_.load()) != layer) return false;
    marks.add(kTake, layer);
    return true;
}

void FlagLink::answer(int layer) {
    marks.add(kGive, layer);
    done_.store(posted_.load() >> 32);
    wake();
}

void FlagLink::fail(const std::string& reason) {
    if (process_ == process_id()) {
        std::lock_guard<std::mutex> lock(sleepers_->mutex);
        if (!ended()) sleepers_->reason = reason;
    }
    ended_.store(true);
    wake();
}

void FlagLink::wait_idle(int layer, const GiveUp& give_up) {
    check_process();
    if (ended()) raise_ended(layer);
    wait_for_answer(layer, give_up);
}

void FlagLink::post(int layer) {
    marks.add(kPost, layer);
    posted_.store(((posted_.load() >> 32) + 1) << 32 | uint32_t(layer));
    wake();
}

bool FlagLink::wait_answered(int layer, const GiveUp& give_up) {
    check_process();
    marks.add(kWait, layer);
    const bool answered = wait_for_answer(layer, give_up);
    marks.add(kWaited, layer);
    return answered;
}

bool FlagLink::wait_for_answer(int layer, const GiveUp& give_up) {
    const auto done = [this] { return idle() || ended(); };
    if (!spin_until(done)) {
        const Clock::time_point start = Clock::now();
        while (!done()) {
            if (give_up && give_up()) return false;
            if (Clock::now() - start > timeout_)
                throw LinkError("layer " + std::to_string(int32_t(posted_.load())) +
                                ": the cold side has given no answer for " +
                                std::to_string(int64_t(timeout_.count() * 1000)) + " ms");
            sleep(done, kAskEvery);
        }
    }
    if (!idle()) raise_ended(layer);
    return true;
}

template <class Done> void FlagLink::sleep(Done done, std::chrono::milliseconds most) {
    std::unique_lock<std::mutex> lock(sleepers_->mutex);
    sleeping_.fetch_add(1);
    sleepers_->wake.wait_for(lock, most, done);
    sleeping_.fetch_sub(1);
}

void FlagLink::wake() {
    if (!sleeping_.load() || process_ != process_id()) return;
    std::lock_guard<std::mutex> lock(sleepers_->mutex);
    sleepers_->wake.notify_all();
}

void FlagLink::check_process() const {
    if (process_ != process_id())
        throw LinkError(
            "this process was forked from the one that loaded the model, which has the cold side: load the "
            "model "
            "in this process");
}

void FlagLink::raise_ended(int layer) const {
    std::lock_guard<std::mutex> lock(sleepers_->mutex);
    throw LinkError("layer " + std::to_string(layer) + ": the cold side has ended: " + sleepers_->reason);
}

}  // namespace hc
