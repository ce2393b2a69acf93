// Reads parts of files, several at a time, and packs them into weights, on its own threads.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "disk/reader.h"
#include "os/read_at.h"
#include "pack/fill.h"
#include "pool/threads.h"

namespace hc {

// A second descriptor of an open file. `direct`: its reads bypass the page cache.
struct OwnFile {
    int number = -1;  // -1: the file cannot be opened again; errno has the reason
    bool direct = false;
};
// Bypasses the page cache if `direct` is true and the file system allows it.
OwnFile open_again(int file, bool direct);

// Returns the first address of `buffer` that direct reads may use; `buffer` is kDiskBlock bytes larger than
// the reads.
uint8_t* first_block(const AlignedBytes& buffer);

constexpr int64_t kRead = 2 << 20;  // bytes a read: enough for a disk's full rate with few reads in flight
constexpr int kChanged = -2, kDropped = -3;  // like kEnded, errors that no system call returns
std::string why_not_read(int error);

// A group of reads. Only the Disk changes it. So far only tests use the second queue (`read_ahead`).
struct Arrival {
    explicit Arrival(bool is_read_ahead = false) : read_ahead(is_read_ahead) {}
    const bool read_ahead;    // not needed yet: other reads go first, and it may be called off
    bool called_off = false;  // reads in flight are not packed
    int packing = 0;          // speculative reads that are being packed
    int left = 0;             // reads that are not done
    int error = 0;            // the first error
};

// Rows [first, end) of a tensor of an open file, and their target.
struct DiskRead {
    Target to;
    Source from;  // `file` is a number of the Disk
    int64_t first, end;
    std::shared_ptr<Arrival> arrival;
};

// Buffers of a thread's reads until they are packed. Each holds one large read, or small reads until no other
// fits, and is reused when all of them are packed.
class ReadBuffers {
  public:
    explicit ReadBuffers(int count) : read_buffers_(size_t(count)) {}
    // Returns space for `bytes` and the number of its buffer; null if there is none now.
    uint8_t* take(int64_t bytes, int& number);
    void give_back(int number) { --read_buffers_[size_t(number)].reads; }
    static int64_t bytes(int64_t largest);  // size of a buffer for reads of at most `largest` bytes

  private:
    struct ReadBuffer {
        AlignedBytes bytes;
        int64_t size = 0, used = 0;
        int reads = 0;
    };
    std::vector<ReadBuffer> read_buffers_;
};

class Disk {
  public:
    // Returns true if the waiting thread should give up.
    using GiveUp = std::function<bool()>;
    struct Counts {
        int64_t bytes = 0, reads = 0, busy_ns = 0;  // busy_ns: of all threads, including packing
    };

    // `pieces`: reads of kRead bytes at once, and about as many bytes of small reads. `direct`: bypass the
    // page cache if the file system allows it. Throws DiskError if io_uring is requested and missing.
    Disk(int pieces, bool direct, ReadWay = ReadWay::kBest);
    ~Disk();
    Disk(const Disk&) = delete;
    Disk& operator=(const Disk&) = delete;

    // Opens the file again and returns its number here. Throws DiskError if it cannot.
    int add(int file);
    bool direct(int number) const { return files_[size_t(number)].direct; }
    int files() const { return int(files_.size()); }
    int threads() const { return int(threads_->packers.size()); }
    bool rings() const { return rings_; }
    bool forked() const;  // this process was forked from the one that has the threads

    // Rows of a tensor that one read takes: some MiB of them.
    static int64_t rows_at_once(int64_t row_bytes, bool by_output);
    // Bytes of memory that each piece takes, for tensors of such rows.
    static int64_t staging_bytes(int64_t row_bytes, bool by_output);
    // Reads of `bytes` that are in flight at once.
    static int at_once(int pieces, int64_t bytes, bool rings);

    void read(std::vector<DiskRead> reads);
    // Waits until all reads have ended, with success or not; returns false if the wait was given up.
    bool wait(const Arrival&, const GiveUp& give_up);
    bool arrived(const Arrival&);
    // Drops the reads that no thread has begun.
    void drop(const Arrival&);
    // Moves speculative reads to the end of the queue of needed reads.
    void promote(const Arrival&);
    // Drops speculative reads; reads in flight are not packed, so that their target memory is free at once.
    // Returns the bytes that are not read.
    int64_t call_off(Arrival&);
    int error_of(const Arrival&);
    Counts counts();
    // For tests: while it holds, no thread begins a read, as if the disk were busy.
    void hold(bool holds);
    // For tests: limits the bytes of one system call, like a file system that returns short reads.
    void give_at_most(int64_t bytes) { at_most_ = bytes; }

  private:
    struct File {
        int number;
        bool direct;
        FileState state;
    };
    // A read in flight.
    struct Piece {
        DiskRead read;
        const File* file;
        int64_t wanted, end;  // range in the file
        int64_t begin, stop;  // the same range in whole blocks if the file is read directly
        int64_t at;           // end of the bytes that have arrived
        uint8_t* to;
        int read_buffer;
        bool packing;  // counted in its arrival
    };
    struct Packer {
        ReadBuffers read_buffers;
        std::unique_ptr<Reader> reader;          // destroyed before its buffers
        std::vector<Piece> pieces;               // by name
        std::vector<int> free, begun;            // names of no piece, and of the pieces taken last
        std::vector<std::pair<int, int>> ended;  // names and errors that settle() has not handled
        AlignedBytes local;
        bool waits = false;  // sleeps, and could begin another read
        std::thread thread;

        Packer(std::unique_ptr<Reader>, int read_buffers);
        bool idle() const { return free.size() == pieces.size(); }
    };
    // Like Pool's: a forked process can neither use nor destroy these.
    struct Threads {
        std::mutex mutex;
        std::condition_variable work, done;
        std::deque<Packer> packers;
    };

    void loop(Packer&);
    void take(Packer&);
    bool waiting() const { return !queue_.empty() || !reads_ahead_.empty(); }
    int64_t drop(std::deque<DiskRead>&, const Arrival&);
    bool may_pack(Piece&) const;
    Piece piece_of(const DiskRead&) const;
    void begin_read(Packer&, int name) const;
    int64_t wait(Packer&, bool poll_only) const;
    bool has_ended(Packer&, const EndedRead&, int64_t& bytes, int& error) const;
    int pack(Packer&, const Piece&) const;
    void settle(Arrival&, int error);
    void wake_waiting_readers();
    void stop();

    const bool direct_;
    const int64_t process_;
    bool rings_ = false;
    std::deque<File> files_;
    std::unique_ptr<Threads> threads_;
    std::deque<DiskRead> queue_, reads_ahead_;  // guesses_ begin only when queue_ is empty
    Counts counts_;
    std::atomic<int64_t> at_most_{std::numeric_limits<int64_t>::max()};
    bool stop_ = false, holds_ = false;
};

}  // namespace hc
