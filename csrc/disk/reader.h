// Reads of open files that one thread begins and waits for: with pread, one at a time, or with Linux's
// io_uring, several at a time.
#pragma once
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

namespace hc {

// A file cannot be read, or no longer.
class DiskError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// Result of Reader::wait(): a read has ended, or wake() was called.
struct EndedRead {
    int name = -1;      // as passed to begin(); -1: wake() was called
    int64_t bytes = 0;  // as read_at() returns them
    int error = 0;      // errno if bytes is -1
};

// Used by one thread, except wake().
class Reader {
  public:
    Reader() = default;
    virtual ~Reader() = default;  // waits for reads in flight: they write to memory
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

    virtual int most() const = 0;  // maximum number of reads in flight
    // Begins a read. `name` is below most() and not in use by a read in flight.
    virtual void begin(int name, int file, uint8_t* to, int64_t bytes, int64_t offset) = 0;
    // Waits until a read has ended or wake() was called since the last wait; with `poll_only` it does not
    // wait. At least one read is in flight.
    virtual EndedRead wait(bool poll_only = false) = 0;
    // Returns true if wait() would return at once.
    virtual bool ready() const = 0;
    virtual void wake() = 0;
    // Replaces the destructor in a forked process: closes this process's descriptors and touches nothing
    // else.
    virtual void leave() = 0;
};

enum class ReadWay { kBest, kRings, kThreads };

constexpr int kRings = 4;         // threads with a ring each: several, because the data must be packed too
constexpr int kReadsOfRing = 16;  // in flight at once

// One reader for each thread, and the total of reads in flight.
struct Readers {
    std::vector<std::unique_ptr<Reader>> each;
    bool rings = false;

    int most() const {
        int all = 0;
        for (const auto& reader : each) all += reader->most();
        return all;
    }
};

// Opens readers for `pieces` reads of whole pieces at once: a few with a ring each, or `pieces` plain ones
// with one read each. Throws DiskError if rings are requested and missing.
Readers open_readers(int pieces, ReadWay);

// Returns the errno why io_uring is unavailable; 0 if it is available.
int why_no_rings();

}  // namespace hc
