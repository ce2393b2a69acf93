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

// A copy of the file's descriptor, closed at the end.
struct Opened {
    explicit Opened(int file) : number(open_direct(file)), direct(number >= 0) {
        if (!direct) number = duplicate(file);
        if (number < 0) throw DiskError(std::string("the file cannot be opened again: ") + strerror(errno));
    }
    ~Opened() { close_file(number); }
    Opened(const Opened&) = delete;
    Opened& operator=(const Opened&) = delete;
    // Some file systems open a file past the cache and then refuse to read it.
    void read_through_cache(int file) {
        close_file(number);
        number = duplicate(file);
        direct = false;
        if (number < 0) throw DiskError(std::string("the file cannot be opened again: ") + strerror(errno));
    }

    int number;
    bool direct;
};

struct Room {
    explicit Room(int64_t bytes) : memory(allocate_aligned(size_t(bytes + kDiskBlock))) {
        const auto at = reinterpret_cast<uintptr_t>(memory.get());
        data = memory.get() + (uintptr_t(kDiskBlock) - at % uintptr_t(kDiskBlock)) % uintptr_t(kDiskBlock);
    }
    AlignedBytes memory;
    uint8_t* data;
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
    Opened opened(file);
    if (opened.direct) {
        const Room room(kDiskBlock);
        if (read_at(opened.number, room.data, kDiskBlock, 0) < 0) opened.read_through_cache(file);
    }
    std::atomic<int64_t> next{0}, done{0};
    std::atomic<int> error{0};
    const auto start = Clock::now();
    const auto until =
        start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(probe.seconds));
    const auto read = [&](int thread) {
        try {
            const Room room(probe.bytes);
            uint64_t state = uint64_t(thread);
            do {
                const int64_t piece = (probe.sequential ? next++ : int64_t(draw(state) >> 1)) % pieces;
                const int64_t n = read_at(opened.number, room.data, probe.bytes, piece * probe.bytes);
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
    return {double(done) / std::chrono::duration<double>(Clock::now() - start).count(), opened.direct};
}

}  // namespace hc
