#include "disk/uring.h"

#include <cerrno>

// Android kills a process that calls io_uring_setup.
#if defined(__linux__) && !defined(__ANDROID__)
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "os/read_at.h"

namespace hc {

namespace {

// The kernel's interface as in linux/io_uring.h, which many compilers' headers lack.
#if defined(SYS_io_uring_setup)
constexpr long kSetup = SYS_io_uring_setup, kEnter = SYS_io_uring_enter;
#else
constexpr long kSetup = 425, kEnter = 426;
#endif
constexpr uint8_t kNop = 0, kPoll = 6, kReadOp = 22;
constexpr uint32_t kWaits = 1;           // flag of enter: wait for a number of completions
constexpr uint32_t kNeeded = 1 | 2 | 8;  // features: one mapping, no lost completions, kReadOp (Linux 5.6)
constexpr off_t kRingsAt = 0, kAsksAt = 0x10000000;

struct AskOffsets {
    uint32_t head, tail, mask, entries, flags, dropped, array, unused[3];
};
struct EndOffsets {
    uint32_t head, tail, mask, entries, overflow, ends, flags, unused[3];
};
struct Setup {
    uint32_t asks, ends, flags, cpu, idle, features, other, unused[3];
    AskOffsets ask;
    EndOffsets end;
};
struct Ask {
    uint8_t op, flags;
    uint16_t priority;
    int32_t file;
    uint64_t offset, to;
    uint32_t bytes, events;
    uint64_t name, unused[3];
};
struct End {
    uint64_t name;
    int32_t result;
    uint32_t flags;
};
static_assert(sizeof(Setup) == 120 && sizeof(Ask) == 64 && sizeof(End) == 16);

constexpr uint64_t kWoken = ~uint64_t(0);
constexpr int64_t kMostBytes = 1 << 30;  // of one read; the rest is requested when it has ended

struct Mapping {
    uint8_t* at = nullptr;
    size_t bytes = 0;

    bool map(int ring, size_t n, off_t offset) {
        void* mapped = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, offset);
        if (mapped == MAP_FAILED) return false;
        at = static_cast<uint8_t*>(mapped);
        bytes = n;
        madvise(at, bytes, MADV_DONTFORK);
        return true;
    }
    uint32_t* word(uint32_t offset) const { return reinterpret_cast<uint32_t*>(at + offset); }
};

// The kernel reads `tail` of submissions and writes `tail` of completions; `head` is the other way round.
uint32_t seen(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void publish(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

class Ring final : public Reader {
  public:
    explicit Ring(int most) : reads_(size_t(most)) {
        names_.reserve(reads_.size() + 1);
        read_here_.reserve(reads_.size());
    }
    ~Ring() override {
        while (under_way_) wait(false);
        if (asks_.at) munmap(asks_.at, asks_.bytes);
        if (rings_.at) munmap(rings_.at, rings_.bytes);
        leave();
    }

    // Returns false and sets errno on failure.
    bool open() {
        Setup setup{};
        ring_ = int(syscall(kSetup, uint32_t(reads_.size() + 1), &setup));  // one more entry polls for wake()
        if (ring_ < 0) return false;
        if ((setup.features & kNeeded) != kNeeded) {
            errno = ENOSYS;
            return false;
        }
        const size_t ask_bytes = setup.ask.array + setup.asks * sizeof(uint32_t);
        const size_t end_bytes = setup.end.ends + setup.ends * sizeof(End);
        if (!rings_.map(ring_, std::max(ask_bytes, end_bytes), kRingsAt)) return false;
        if (!asks_.map(ring_, setup.asks * sizeof(Ask), kAsksAt)) return false;
        ask_head_ = rings_.word(setup.ask.head);
        ask_tail_ = rings_.word(setup.ask.tail);
        ask_mask_ = *rings_.word(setup.ask.mask);
        order_ = rings_.word(setup.ask.array);
        end_head_ = rings_.word(setup.end.head);
        end_tail_ = rings_.word(setup.end.tail);
        end_mask_ = *rings_.word(setup.end.mask);
        ends_ = reinterpret_cast<const End*>(rings_.at + setup.end.ends);
        wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        return wake_ >= 0 && try_out();
    }

    int most() const override { return int(reads_.size()); }

    void begin(int name, int file, uint8_t* to, int64_t bytes, int64_t offset) override {
        reads_[size_t(name)] = {file, to, std::min(bytes, kMostBytes), offset};
        ++under_way_;
        const Read& read = reads_[size_t(name)];
        Ask entry{};
        entry.op = kReadOp;
        entry.file = file;
        entry.offset = uint64_t(offset);
        entry.to = reinterpret_cast<uint64_t>(to);
        entry.bytes = uint32_t(read.bytes);
        entry.name = uint64_t(name);
        enqueue(entry);
    }

    EndedRead wait(bool poll_only) override {
        for (;;) {
            if (!read_here_.empty()) {
                const EndedRead ended = read_here_.back();
                read_here_.pop_back();
                return ended;
            }
            const bool polls = poll_only || has_ends();
            if (!polls && !waits_for_wake_) wait_for_wake();
            if ((!polls || queued()) && !enter(polls ? 0 : 1)) continue;
            if (has_ends()) {
                const uint32_t head = *end_head_;
                const End end = ends_[head & end_mask_];
                publish(end_head_, head + 1);
                return ended(end);
            }
            if (poll_only) return {};
        }
    }

    bool ready() const override { return !read_here_.empty() || has_ends(); }

    void wake() override {
        const uint64_t one = 1;
        const auto written = write(wake_, &one, sizeof one);
        static_cast<void>(written);  // it fails only after 2^64 unread wakes
    }

    void leave() override {
        for (int* descriptor : {&wake_, &ring_}) {
            if (*descriptor >= 0) close(*descriptor);
            *descriptor = -1;
        }
    }

  private:
    struct Read {
        int file = -1;
        uint8_t* to = nullptr;
        int64_t bytes = 0, offset = 0;
    };

    bool has_ends() const { return seen(end_tail_) != *end_head_; }
    uint32_t queued() const { return *ask_tail_ - seen(ask_head_); }

    void enqueue(const Ask& entry) {
        const uint32_t tail = *ask_tail_, at = tail & ask_mask_;
        std::memcpy(asks_.at + at * sizeof(Ask), &entry, sizeof entry);
        order_[at] = at;
        publish(ask_tail_, tail + 1);
    }

    // Some containers let a process create a ring but not use it.
    bool try_out() {
        Ask nothing{};
        nothing.op = kNop;
        enqueue(nothing);
        long n = 0;
        do {
            n = syscall(kEnter, ring_, queued(), 1, kWaits, nullptr, 0);
        } while (n < 0 && errno == EINTR);
        if (n < 0) return false;
        if (!has_ends()) {
            errno = ENOSYS;
            return false;
        }
        publish(end_head_, *end_head_ + 1);
        return true;
    }

    void wait_for_wake() {
        Ask entry{};
        entry.op = kPoll;
        entry.file = wake_;
        entry.events = POLLIN;
        entry.name = kWoken;
        enqueue(entry);
        waits_for_wake_ = true;
    }

    // Submits the queued entries and waits for `least` completions. Returns false if the kernel refused them.
    bool enter(uint32_t least) {
        if (syscall(kEnter, ring_, queued(), least, kWaits, nullptr, 0) >= 0 || errno == EINTR) return true;
        if (!queued()) {  // waiting failed; reads in flight end nevertheless
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            return true;
        }
        // EAGAIN, ENOMEM and the like: take the queued reads back and do them on this thread. The kernel
        // still owns the submitted ones.
        const uint32_t n = queued(), tail = *ask_tail_;
        names_.clear();
        for (uint32_t i = tail - n; i != tail; ++i) {
            Ask entry;
            std::memcpy(&entry, asks_.at + (i & ask_mask_) * sizeof(Ask), sizeof entry);
            names_.push_back(entry.name);
        }
        publish(ask_tail_, tail - n);
        for (const uint64_t name : names_) {
            if (name == kWoken)
                waits_for_wake_ = false;
            else
                read_here_.push_back(read_here(int(name)));
        }
        if (read_here_.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return false;
    }

    EndedRead read_here(int name) {
        const Read& read = reads_[size_t(name)];
        EndedRead result{name, read_at(read.file, read.to, read.bytes, read.offset), 0};
        if (result.bytes < 0) result.error = errno ? errno : EIO;
        --under_way_;
        return result;
    }

    EndedRead ended(const End& end) {
        if (end.name == kWoken) {
            uint64_t count = 0;
            const auto taken = read(wake_, &count, sizeof count);
            static_cast<void>(taken);
            waits_for_wake_ = end.result < 0;  // polling would fail again: only reads wake from now on
            return {};
        }
        // If the kernel refuses a read (EAGAIN, or a file it does not support), pread may succeed; if not,
        // its error counts.
        if (end.result < 0) return read_here(int(end.name));
        --under_way_;
        return {int(end.name), end.result, 0};
    }

    std::vector<Read> reads_;  // by name
    int under_way_ = 0;
    std::vector<EndedRead> read_here_;  // completed reads that wait() has not returned
    std::vector<uint64_t> names_;
    int ring_ = -1, wake_ = -1;
    bool waits_for_wake_ = false;
    Mapping rings_, asks_;
    uint32_t *ask_head_ = nullptr, *ask_tail_ = nullptr, *order_ = nullptr;
    uint32_t *end_head_ = nullptr, *end_tail_ = nullptr;
    uint32_t ask_mask_ = 0, end_mask_ = 0;
    const End* ends_ = nullptr;
};

}  // namespace

std::unique_ptr<Reader> open_ring(int most) {
    auto ring = std::make_unique<Ring>(most);
    if (ring->open()) return ring;
    const int error = errno;
    ring.reset();
    errno = error;
    return nullptr;
}

}  // namespace hc
#else

namespace hc {

std::unique_ptr<Reader> open_ring(int) {
    errno = ENOSYS;
    return nullptr;
}

}  // namespace hc
#endif
