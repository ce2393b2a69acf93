// Prefetching weights ahead of their use.
#pragma once
#include "simd/fetching.h"
#include "simd/types.h"
#include "simd/vec.h"

namespace hc {

// A part of the memory to read: `count` runs of `bytes`, `step` apart.
struct Segment {
    const uint8_t* at;
    int64_t bytes, step = 0, count = 1;
};

// Plans prefetches into L1 or L2. A stream walks segments in the order in which they are read. The reader of
// `bytes` prefetches as many bytes ahead, so that memory stays busy while the vector units work. If no
// segment is known yet, the bytes are owed and fetched later. Plain data, which the kernels of two
// instruction sets may share; functions that advance it are compiled for each.
struct Stream {
    HC_SMALL Stream() : owed(INT64_MIN / 2) {}  // fetches nothing
    HC_SMALL explicit Stream(const Segment& one) : segment(one) {}
    HC_SMALL explicit Stream(Segment* scratch) : next(scratch), end(scratch) {}

    const uint8_t *at = nullptr, *stop = nullptr;
    int64_t owed = 0;
    const bool into_l2 = fetching.into_l2;
    Segment segment{nullptr, 0, 0, 0};
    Segment *next = nullptr, *end = nullptr;
};

namespace {

// Appends memory to the stream; merges it with the last segment if adjacent.
inline void expect(Stream& s, const uint8_t* at, int64_t bytes) {
    if (s.end != s.next && s.end[-1].at + s.end[-1].bytes == at)
        s.end[-1].bytes += bytes;
    else
        *s.end++ = {at, bytes};
}

// Goes to the next run of bytes, if there is one.
HC_NOINLINE bool advance(Stream& s) {
    if (s.segment.count == 0) {
        if (s.next == s.end) return false;
        s.segment = *s.next++;
    }
    s.at = s.segment.at;
    s.stop = s.at + s.segment.bytes;
    s.segment.at += s.segment.step;
    --s.segment.count;
    return true;
}

// Skips `bytes` that were read without the stream.
inline void pass(Stream& s, int64_t bytes) {
    while (bytes > 0 && (s.at < s.stop || advance(s))) {
        const int64_t part = bytes < s.stop - s.at ? bytes : s.stop - s.at;
        s.at += part;
        bytes -= part;
    }
}

template <bool L2> HC_INLINE void fetch_lines(Stream& s) {
    for (; s.owed >= 64; s.owed -= 64, s.at += 64) {
        if (s.at >= s.stop && !advance(s)) return;
        L2 ? Vec::prefetch_l2(s.at) : Vec::prefetch(s.at);
    }
}

// Tests the level once a call: in the loop this costs more than a wrong level (docs/log.md).
HC_INLINE void fetch(Stream& s, int64_t bytes) {
    s.owed += bytes;
    if (s.into_l2)
        fetch_lines<true>(s);
    else
        fetch_lines<false>(s);
}

}  // namespace
}  // namespace hc
