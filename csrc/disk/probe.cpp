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
    explicit Opened(int file) : reopened(open_again(file, true)) {
        if (reopened.number < 0)
            throw DiskError(std::string("the file cannot be opened again: ") + strerror(errno));
    }
    ~Opened() { close_file(reopened.number); }
    Opened(const Opened&) = delete;
    Opened& operator=(const Opened&) = delete;

    const OwnFile reopened;
};

uint64_t draw(uint64_t& state) {  // splitmix64
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

// Threads that read pieces of a file like the threads of a Disk.
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

    // Returns the seconds taken. Throws DiskError if the file cannot be read.
    double run() {
        const auto start = Clock::now();
        until_ = start +
                 std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(probe_.seconds));
        const int count = int(readers_.each.size());
        std::vector<std::thread> threads;
        threads.reserve(size_t(count));  // from here on only a thread can fail
        try {
            for (int i = 0; i < count; ++i) threads.emplace_back([this, i, count] { read_share(i, count); });
        } catch (const std::system_error&) {
            error_ = EAGAIN;
        }
        for (std::thread& thread : threads) thread.join();
        const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
        if (error_) throw DiskError(std::string("the file cannot be read: ") + strerror(error_));
        return seconds;
    }
    int64_t done() const { return done_; }

  private:
    // One thread's share of the pieces in flight, and the buffer for them.
    struct Share {
        Reader& reader;
        AlignedBytes& buffer;
        int pieces;
        uint64_t drawn;
    };

    void read_share(int thread, int count) {
        Share share{*readers_.each[size_t(thread)], buffers_[size_t(thread)], (probe_.depth + thread) / count,
                    uint64_t(thread)};
        try {
            share.buffer = allocate_aligned(size_t(share.pieces * probe_.bytes + kDiskBlock));
            read(share);
        } catch (...) {  // no exception may leave a thread
            error_ = ENOMEM;
        }
    }
    bool begin(Share& share, int name) {
        if (error_) return false;
        const int64_t piece = (probe_.sequential ? next_++ : int64_t(draw(share.drawn) >> 1)) % pieces_;
        uint8_t* to = first_block(share.buffer) + name * probe_.bytes;
        share.reader.begin(name, file_, to, probe_.bytes, piece * probe_.bytes);
        return true;
    }
    void read(Share& share) {
        int under_way = 0;
        while (under_way < share.pieces && begin(share, under_way)) ++under_way;
        while (under_way) {
            const EndedRead ended = share.reader.wait();
            if (ended.name < 0) continue;
            if (ended.bytes < 0)
                error_ = ended.error;
            else
                done_ += ended.bytes;
            if (Clock::now() >= until_ || !begin(share, ended.name)) --under_way;
        }
    }

    const int file_;
    const DiskProbe probe_;
    const int64_t pieces_;
    std::vector<AlignedBytes> buffers_;
    const Readers readers_;  // destroyed before rooms_
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
    Probers probers(opened.reopened.number, probe, pieces);
    const double seconds = probers.run();
    if (!probers.done()) throw DiskError("the file cannot be read: it has become shorter");
    return {double(probers.done()) / seconds, opened.reopened.direct};
}

}  // namespace hc
