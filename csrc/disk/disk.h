// Reads parts of files on threads of its own, and packs what they have read into weights.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "disk/read_at.h"
#include "pack/fill.h"
#include "pool/threads.h"

namespace hc {

// A descriptor of one's own for an open file, and whether its reads go past the system's cache.
struct OwnFile {
    int number = -1;  // -1: it cannot be opened again, and errno says why
    bool direct = false;
};
// Past the cache where `direct` is wished and the file system allows it.
OwnFile open_again(int file, bool direct);

// The first address of `room` at which direct reads may be put; it has kDiskBlock bytes more than they fill.
uint8_t* first_block(const AlignedBytes& room);

// A file cannot be read any more.
class DiskError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

constexpr int64_t kRead = 2 << 20;  // bytes at once: enough for a disk's full rate, with few in flight
constexpr int kChanged = -2, kDropped = -3;  // as kEnded: errors that no call has
std::string why_not_read(int error);

// Reads that belong together. The disk alone changes it.
struct Arrival {
    int left = 0;   // reads that are not done
    int error = 0;  // the first one
};

// Rows [first, end) of a tensor of an open file, and where they go.
struct DiskRead {
    Target to;
    Source from;  // whose `file` is a number of the disk
    int64_t first, end;
    std::shared_ptr<Arrival> arrival;
};

class Disk {
  public:
    // Whether the one who waits shall give up.
    using GiveUp = std::function<bool()>;
    struct Counts {
        int64_t bytes = 0, reads = 0, busy_ns = 0;  // `busy_ns`: of all threads, with packing
    };

    // `direct`: past the system's cache where the file system allows it.
    Disk(int threads, bool direct);
    ~Disk();
    Disk(const Disk&) = delete;
    Disk& operator=(const Disk&) = delete;

    // Keeps an open file of its own: its number here. DiskError: it cannot.
    int add(int file);
    bool direct(int number) const { return files_[size_t(number)].direct; }
    int files() const { return int(files_.size()); }
    int threads() const { return int(threads_->started.size()); }
    bool forked() const;  // this process was forked from the one that has the threads

    // Rows of a tensor that are read at once: some MiB of them.
    static int64_t rows_at_once(int64_t row_bytes, bool by_output);
    // Bytes that each thread takes, for tensors of such rows.
    static int64_t staging_bytes(int64_t row_bytes, bool by_output);

    void read(std::vector<DiskRead> reads);
    // Waits until all are done, whether well or not; false where the wait was given up.
    bool wait(const Arrival&, const GiveUp& give_up);
    bool arrived(const Arrival&);
    // Drops the reads that no thread has begun.
    void drop(const Arrival&);
    int error_of(const Arrival&);
    Counts counts();
    // As long as it holds, no thread begins a read: for tests, a disk that has other work.
    void hold(bool holds);

  private:
    struct File {
        int number;
        bool direct;
        FileState state;
    };
    struct Staging {
        AlignedBytes bytes, local;
        int64_t size = 0;
    };
    // As Pool's: a forked process can neither use nor destroy these.
    struct Threads {
        std::mutex mutex;
        std::condition_variable work, done;
        std::vector<std::thread> started;
    };

    void loop();
    int perform(const DiskRead&, Staging&, int64_t& bytes) const;
    void stop();

    const bool direct_;
    const int64_t process_;
    std::deque<File> files_;
    std::unique_ptr<Threads> threads_;
    std::deque<DiskRead> queue_;
    Counts counts_;
    bool stop_ = false, holds_ = false;
};

}  // namespace hc
