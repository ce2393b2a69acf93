// Fetching what will be read ahead of its use.
#pragma once
#include "simd/kernels.h"
#include "simd/vec.h"

namespace hc {

// What will be read: `count` runs of `bytes`, `step` apart.
struct Segment {
    const uint8_t* at;
    int64_t bytes, step = 0, count = 1;
};

// How far a stream has come.
struct StreamState {
    const uint8_t *at = nullptr, *stop = nullptr;
    int64_t owed = 0;
    bool into_l2 = false;
    Segment segment{nullptr, 0, 0, 0};
    Segment *next = nullptr, *end = nullptr;
};

namespace {

// Brings into L1 or L2 what will be read. A stream walks segments in the order in which they will be read;
// whoever reads `bytes` now fetches as many ahead, so that memory stays busy while the vector units work.
// What nobody expected yet is fetched, as much as was owed, once it is.
class Stream : public StreamState {
  public:
    Stream() { owed = INT64_MIN / 2; }  // fetches nothing
    explicit Stream(const StreamState& state) : StreamState(state) {}
    explicit Stream(const Segment& one) {
        into_l2 = fetching.into_l2;
        segment = one;
    }
    explicit Stream(Segment* room) {
        into_l2 = fetching.into_l2;
        next = end = room;
    }

    // What will be read after all else; neighbours in memory become one.
    void expect(const uint8_t* from, int64_t bytes) {
        if (end != next && end[-1].at + end[-1].bytes == from)
            end[-1].bytes += bytes;
        else
            *end++ = {from, bytes};
    }
    // `bytes` were read without it.
    void pass(int64_t bytes) {
        while (bytes > 0 && (at < stop || advance())) {
            const int64_t part = bytes < stop - at ? bytes : stop - at;
            at += part;
            bytes -= part;
        }
    }
    // The level is asked for once a call: in the loop that costs more than a wrong level does (docs/log.md).
    HC_INLINE void fetch(int64_t bytes) {
        owed += bytes;
        if (into_l2)
            fetch_lines<true>();
        else
            fetch_lines<false>();
    }

  private:
    template <bool L2> HC_INLINE void fetch_lines() {
        for (; owed >= 64; owed -= 64, at += 64) {
            if (at >= stop && !advance()) return;
            L2 ? Vec::prefetch_l2(at) : Vec::prefetch(at);
        }
    }
    HC_NOINLINE bool advance() {
        if (segment.count == 0) {
            if (next == end) return false;
            segment = *next++;
        }
        at = segment.at;
        stop = at + segment.bytes;
        segment.at += segment.step;
        --segment.count;
        return true;
    }
};

}  // namespace
}  // namespace hc
