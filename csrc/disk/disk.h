// Reads parts of files, several at a time, and packs them into weights, on threads of its own.
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

// A descriptor of one's own for an open file, and whether its reads go past the system's cache.
struct OwnFile {
    int number = -1;  // -1: it cannot be opened again, and errno says why
    bool direct = false;
};
// Past the cache where `direct` is wished and the file system allows it.
OwnFile open_again(int file, bool direct);

// The first address of `buffer` at which direct reads may be put; it has kDiskBlock bytes more than they
// fill.
uint8_t* first_block(const AlignedBytes& buffer);

constexpr int64_t kRead = 2 << 20;  // bytes at once: enough for a disk's full rate, with few in flight
constexpr int kChanged = -2, kDropped = -3;  // as kEnded: errors that no call has
std::string why_not_read(int error);

// Reads that belong together. The disk alone changes it. Only tests ask for reads of the second queue so far.
struct Arrival {
    explicit Arrival(bool is_read_ahead = false) : read_ahead(is_read_ahead) {}
    const bool read_ahead;    // nobody needs them yet: others go first, and they may be called off
    bool called_off = false;  // what is under way is not packed
    int packing = 0;          // reads of a guess that are being packed
    int left = 0;             // reads that are not done
    int error = 0;            // the first one
};

// Rows [first, end) of a tensor of an open file, and where they go.
struct DiskRead {
    Target to;
    Source from;  // whose `file` is a number of the disk
    int64_t first, end;
    std::shared_ptr<Arrival> arrival;
};

// Where a thread's reads are put until they are packed: each tray has one large read, or small ones until no
// other fits, and is empty when all of these are packed.
class ReadBuffers {
  public:
    explicit ReadBuffers(int count) : read_buffers_(size_t(count)) {}
    // Room for so many bytes, and the number of its tray; null: there is none now.
    uint8_t* take(int64_t bytes, int& number);
    void give_back(int number) { --read_buffers_[size_t(number)].reads; }
    static int64_t bytes(int64_t largest);  // of a tray for reads of at most so many bytes

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
    // Whether the one who waits shall give up.
    using GiveUp = std::function<bool()>;
    struct Counts {
        int64_t bytes = 0, reads = 0, busy_ns = 0;  // `busy_ns`: of all threads, with packing
    };

    // `pieces`: so many reads of kRead at once, and about as many bytes of small ones. `direct`: past the
    // system's cache where the file system allows it. DiskError: there are no rings, and they are wished.
    Disk(int pieces, bool direct, ReadWay = ReadWay::kBest);
    ~Disk();
    Disk(const Disk&) = delete;
    Disk& operator=(const Disk&) = delete;

    // Keeps an open file of its own: its number here. DiskError: it cannot.
    int add(int file);
    bool direct(int number) const { return files_[size_t(number)].direct; }
    int files() const { return int(files_.size()); }
    int threads() const { return int(threads_->packers.size()); }
    bool rings() const { return rings_; }
    bool forked() const;  // this process was forked from the one that has the threads

    // Rows of a tensor that are read at once: some MiB of them.
    static int64_t rows_at_once(int64_t row_bytes, bool by_output);
    // Bytes that each piece takes, for tensors of such rows.
    static int64_t staging_bytes(int64_t row_bytes, bool by_output);
    // Reads of so many bytes that are under way at once.
    static int at_once(int pieces, int64_t bytes, bool rings);

    void read(std::vector<DiskRead> reads);
    // Waits until all are done, whether well or not; false where the wait was given up.
    bool wait(const Arrival&, const GiveUp& give_up);
    bool arrived(const Arrival&);
    // Drops the reads that no thread has begun.
    void drop(const Arrival&);
    // The reads of a guess are needed now: they go behind those that are needed already.
    void promote(const Arrival&);
    // The reads of a guess are not needed: as drop(), and what is under way comes to nothing, so that its
    // room in memory is free at once. Returns the bytes that are not read.
    int64_t call_off(Arrival&);
    int error_of(const Arrival&);
    Counts counts();
    // As long as it holds, no thread begins a read: for tests, a disk that has other work.
    void hold(bool holds);
    // At most so many bytes are asked for at once: for tests, a file system that gives less than was asked
    // for.
    void give_at_most(int64_t bytes) { at_most_ = bytes; }

  private:
    struct File {
        int number;
        bool direct;
        FileState state;
    };
    // A read that is under way.
    struct Piece {
        DiskRead read;
        const File* file;
        int64_t wanted, end;  // in the file
        int64_t begin, stop;  // the same in whole blocks, where it is read directly
        int64_t at;           // up to here it has come
        uint8_t* to;
        int read_buffer;
        bool packing;  // its arrival counts it
    };
    struct Packer {
        ReadBuffers read_buffers;
        std::unique_ptr<Reader> reader;  // is gone before its trays
        std::vector<Piece> pieces;       // by name
        std::vector<int> free, begun;    // names: those of no piece, and of the last ones that were taken
        std::vector<std::pair<int, int>>
            ended;  // names and errors of those that settle() is yet to be told of
        AlignedBytes local;
        bool waits = false;  // and could begin another read
        std::thread thread;

        Packer(std::unique_ptr<Reader>, int read_buffers);
        bool idle() const { return free.size() == pieces.size(); }
    };
    // As Pool's: a forked process can neither use nor destroy these.
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
    void ask(Packer&, int name) const;
    int64_t wait(Packer&, bool more) const;
    bool has_ended(Packer&, const EndedRead&, int64_t& bytes, int& error) const;
    int pack(Packer&, const Piece&) const;
    void settle(Arrival&, int error);
    void wake_those_that_wait();
    void stop();

    const bool direct_;
    const int64_t process_;
    bool rings_ = false;
    std::deque<File> files_;
    std::unique_ptr<Threads> threads_;
    std::deque<DiskRead> queue_, reads_ahead_;  // the latter are begun where the former is empty
    Counts counts_;
    std::atomic<int64_t> at_most_{std::numeric_limits<int64_t>::max()};
    bool stop_ = false, holds_ = false;
};

}  // namespace hc
