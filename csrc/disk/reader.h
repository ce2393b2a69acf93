// Reads of open files that one thread begins and waits for: by pread, one at a time, or by Linux's io_uring,
// several at a time.
#pragma once
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

namespace hc {

// A file cannot be read (any more).
class DiskError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// What a thread that waits is told: a read has ended, or it was woken.
struct EndedRead {
    int name = -1;      // as it was begun; -1: woken
    int64_t bytes = 0;  // as read_at() gives them
    int error = 0;      // errno, where bytes are -1
};

// Of one thread, but for wake().
class Reader {
  public:
    Reader() = default;
    virtual ~Reader() = default;  // waits for reads that are under way: they write to memory
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

    virtual int most() const = 0;  // reads under way at once
    // Begins a read, under a name below most() that none under way has.
    virtual void begin(int name, int file, uint8_t* to, int64_t bytes, int64_t offset) = 0;
    // Waits until one has ended or wake() was called since the last wait; with `more` to be begun, looks
    // only. One is under way at least.
    virtual EndedRead wait(bool more = false) = 0;
    // Whether wait() would return at once.
    virtual bool ready() const = 0;
    virtual void wake() = 0;
    // In a forked process, in place of the destructor: closes what this one has of it, touches nothing else.
    virtual void leave() = 0;
};

enum class ReadWay { kBest, kRings, kThreads };

constexpr int kRings = 4;         // threads with a ring of their own: what is read must be packed, too
constexpr int kReadsOfRing = 16;  // under way at once

// Readers of as many threads, and how many reads are under way in all.
struct Readers {
    std::vector<std::unique_ptr<Reader>> each;
    bool rings = false;

    int most() const {
        int all = 0;
        for (const auto& reader : each) all += reader->most();
        return all;
    }
};

// Readers for so many reads of whole pieces at once: a few with a ring each, or as many as those, each of
// which reads by itself. DiskError: rings are wished and there are none.
Readers open_readers(int pieces, ReadWay);

// Why there are no rings: errno; 0: there are.
int why_no_rings();

}  // namespace hc
