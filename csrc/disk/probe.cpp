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

}  // namespace

DiskSpeed probe_disk(int file, const DiskProbe& probe) {
    if (probe.bytes < kDiskBlock || probe.bytes % kDiskBlock || probe.bytes > kMostBytes)
        throw std::invalid_argument("a probe reads whole blocks of 4 KiB, at most 64 MiB at once");
    if (probe.depth < 1 || probe.depth > kMostDepth)
        throw std::invalid_argument("a probe has 1 to 64 reads under way");
    const int64_t pieces = state_of(file).bytes / probe.bytes;
    if (pieces < 1) throw std::invalid_argument("the file is shorter than what is read at once");
    const Opened opened(file);
    std::atomic<int64_t> next{0}, done{0};
    std::atomic<int> error{0};
    const auto start = Clock::now();
    const auto until =
        start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(probe.seconds));
    const auto read = [&](int thread) {
        try {
            const AlignedBytes room = allocate_aligned(size_t(probe.bytes + kDiskBlock));
            uint8_t* to = first_block(room);
            uint64_t state = uint64_t(thread);
            do {
                const int64_t piece = (probe.sequential ? next++ : int64_t(draw(state) >> 1)) % pieces;
                const int64_t n = read_at(opened.own.number, to, probe.bytes, piece * probe.bytes);
                if (n < 0) {
                    error = errno ? errno : EIO;
                    return;
                }
                done += n;
            } while (Clock::now() < until && !error);
        } catch (...) {  // nothing may leave a thread
            error = ENOMEM;
        }
    };
    std::vector<std::thread> threads;
    threads.reserve(size_t(probe.depth));  // so that nothing but a thread can fail from here on
    try {
        for (int i = 1; i < probe.depth; ++i) threads.emplace_back(read, i);
    } catch (const std::system_error&) {
        error = EAGAIN;
    }
    if (!error) read(0);
    for (std::thread& each : threads) each.join();
    if (error) throw DiskError(std::string("the file cannot be read: ") + strerror(error));
    if (!done) throw DiskError("the file cannot be read: it has become shorter");
    return {double(done) / std::chrono::duration<double>(Clock::now() - start).count(), opened.own.direct};
}

}  // namespace hc
