#include "disk/probe.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "disk/disk.h"

namespace hc {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMostDepth = 64;
constexpr int64_t kMostBytes = 64 << 20;

struct Opened {
    explicit Opened(int file) : own(open_again(file, true)) {
        if (own.number < 0)
            throw DiskError(std::string("the file cannot be opened again: ") + strerror(errno));
    }
    ~Opened() { close_file(own.number); }
    Opened(const Opened&) = delete;
    Opened& operator=(const Opened&) = delete;

    const OwnFile own;
};

uint64_t draw(uint64_t& state) {  // splitmix64
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

// Threads that read pieces of a file, as those of a Disk do.
class Probers {
  public:
    Probers(int file, const DiskProbe& probe, int64_t pieces)
        : file_(file),
          probe_(probe),
          pieces_(pieces),
          buffers_(size_t(probe.depth)),
          readers_(open_readers(probe.depth, probe.way)) {}
    Probers(const Probers&) = delete;
    Probers& operator=(const Probers&) = delete;

    // Returns the seconds that it took. DiskError: the file cannot be read.
    double run() {
        const auto start = Clock::now();
        until_ = start +
                 std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(probe_.seconds));
        const int count = int(readers_.each.size());
        std::vector<std::thread> threads;
        threads.reserve(size_t(count));  // so that nothing but a thread can fail from here on
        try {
            for (int i = 0; i < count; ++i) threads.emplace_back([this, i, count] { read_share(i, count); });
        } catch (const std::system_error&) {
            error_ = EAGAIN;
        }
        for (std::thread& each : threads) each.join();
        const double took = std::chrono::duration<double>(Clock::now() - start).count();
        if (error_) throw DiskError(std::string("the file cannot be read: ") + strerror(error_));
        return took;
    }
    int64_t done() const { return done_; }

  private:
    // What a thread has: its share of the pieces under way, with room for each.
    struct Own {
        Reader& reader;
        AlignedBytes& buffer;
        int pieces;
        uint64_t drawn;
    };

    void read_share(int thread, int count) {
        Own own{*readers_.each[size_t(thread)], buffers_[size_t(thread)], (probe_.depth + thread) / count,
                uint64_t(thread)};
        try {
            own.buffer = allocate_aligned(size_t(own.pieces * probe_.bytes + kDiskBlock));
            read(own);
        } catch (...) {  // nothing may leave a thread
            error_ = ENOMEM;
        }
    }
    bool begin(Own& own, int name) {
        if (error_) return false;
        const int64_t piece = (probe_.sequential ? next_++ : int64_t(draw(own.drawn) >> 1)) % pieces_;
        uint8_t* to = first_block(own.buffer) + name * probe_.bytes;
        own.reader.begin(name, file_, to, probe_.bytes, piece * probe_.bytes);
        return true;
    }
    void read(Own& own) {
        int under_way = 0;
        while (under_way < own.pieces && begin(own, under_way)) ++under_way;
        while (under_way) {
            const EndedRead ended = own.reader.wait();
            if (ended.name < 0) continue;
            if (ended.bytes < 0)
                error_ = ended.error;
            else
                done_ += ended.bytes;
            if (Clock::now() >= until_ || !begin(own, ended.name)) --under_way;
        }
    }

    const int file_;
    const DiskProbe probe_;
    const int64_t pieces_;
    std::vector<AlignedBytes> buffers_;
    const Readers readers_;  // they are gone before their rooms
    std::atomic<int64_t> next_{0}, done_{0};
    std::atomic<int> error_{0};
    Clock::time_point until_;
};

}  // namespace

DiskSpeed probe_disk(int file, const DiskProbe& probe) {
    if (probe.bytes < kDiskBlock || probe.bytes % kDiskBlock || probe.bytes > kMostBytes)
        throw std::invalid_argument("a probe reads whole blocks of 4 KiB, at most 64 MiB at once");
    if (probe.depth < 1 || probe.depth > kMostDepth)
        throw std::invalid_argument("a probe has 1 to 64 reads under way");
    const int64_t pieces = state_of(file).bytes / probe.bytes;
    if (pieces < 1) throw std::invalid_argument("the file is shorter than what is read at once");
    const Opened opened(file);
    Probers probers(opened.own.number, probe, pieces);
    const double took = probers.run();
    if (!probers.done()) throw DiskError("the file cannot be read: it has become shorter");
    return {double(probers.done()) / took, opened.own.direct};
}

}  // namespace hc
