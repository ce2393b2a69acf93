#include "disk/reader.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "disk/uring.h"
#include "os/read_at.h"

namespace hc {

namespace {

class PlainReader : public Reader {
  public:
    int most() const override { return 1; }
    void begin(int name, int file, uint8_t* to, int64_t bytes, int64_t offset) override {
        ended_ = {name, read_at(file, to, bytes, offset), 0};
        if (ended_.bytes < 0) ended_.error = errno ? errno : EIO;
    }
    EndedRead wait(bool) override { return ended_; }
    bool ready() const override { return false; }  // begin() waits for its read
    void wake() override {}
    void leave() override {}

  private:
    EndedRead ended_;
};

}  // namespace

Readers open_readers(int pieces, ReadWay way) {
    Readers readers;
    if (way != ReadWay::kThreads) {
        const int rings = std::min(pieces, kRings);
        for (int i = 0; i < rings; ++i) {
            std::unique_ptr<Reader> ring = open_ring(kReadsOfRing);
            if (!ring) {
                if (way == ReadWay::kRings)
                    throw DiskError(std::string("there is no io_uring: ") + strerror(errno));
                readers.each.clear();
                break;
            }
            readers.each.push_back(std::move(ring));
        }
        readers.rings = !readers.each.empty();
    }
    if (readers.each.empty())
        for (int i = 0; i < pieces; ++i) readers.each.push_back(std::make_unique<PlainReader>());
    return readers;
}

int why_no_rings() { return open_ring(1) ? 0 : errno; }

}  // namespace hc
