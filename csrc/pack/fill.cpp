#include "pack/fill.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include "os/read_at.h"
#include "pack/pack.h"
#include "pool/local_bytes.h"

namespace hc {

namespace {

constexpr int64_t kPiece = 1 << 20;     // bytes that one thread fills before it takes the next piece
constexpr int64_t kStaged = 256 << 10;  // bytes a read: they stay in L2 while they are packed
constexpr int64_t kGap = 8 << 10;       // maximum bytes between wanted rows that are read with them
// Bytes of an output a read: an odd number of lines, so that the outputs do not share one cache set.
constexpr int64_t kPart = 63 * 64;
static_assert(kGroup * kPart <= int64_t(kLocalBytes), "a group of outputs does not fit the scratch");

// Reads a tensor's bytes; keeps the first error.
class Reader {
  public:
    explicit Reader(const Source& source) : source_(source) {}

    bool failed() const { return error_.load(std::memory_order_relaxed) != 0; }
    int error() const { return error_.load(); }

    void read(int64_t at, int64_t bytes, uint8_t* to) {
        if (source_.data) {
            std::memcpy(to, source_.data + at - source_.first * source_.row_bytes, size_t(bytes));
            return;
        }
        while (bytes > 0 && !failed()) {
            const int64_t n = read_at(source_.file, to, bytes, source_.offset + at);
            if (n <= 0) {
                int none = 0;
                error_.compare_exchange_strong(none, n ? errno : kEnded);
                return;
            }
            at += n;
            to += n;
            bytes -= n;
        }
    }

  private:
    const Source& source_;
    std::atomic<int> error_{0};
};

int64_t chosen(const Source& s, int64_t i) { return s.chosen ? s.chosen[i] : i; }

// Fills rows as they are: pieces of neighbouring rows.
class RowFiller {
  public:
    RowFiller(const Target& to, const Source& from) : to_(to), from_(from) {
        per_piece_ = std::max<int64_t>(1, kPiece / from.row_bytes);
    }
    int64_t pieces() const { return (to_.rows.count + per_piece_ - 1) / per_piece_; }

    void run(int64_t piece, Reader& reader, uint8_t* stage) const {
        const int64_t end = std::min((piece + 1) * per_piece_, to_.rows.count);
        int64_t next;
        for (int64_t i = piece * per_piece_; i < end && !reader.failed(); i = next) {
            next = run_of(i, end);
            const int64_t first = chosen(from_, i),
                          bytes = (chosen(from_, next - 1) + 1 - first) * from_.row_bytes;
            if (in_place()) {
                reader.read(first * from_.row_bytes, bytes, to_.base() + i * to_.rows.stride);
                continue;
            }
            const uint8_t* rows = from_.data ? from_.data + first * from_.row_bytes : stage;
            if (!from_.data) reader.read(first * from_.row_bytes, bytes, stage);
            for (int64_t r = i; r < next; ++r)
                pack_row(to_.rows.type, rows + (chosen(from_, r) - first) * from_.row_bytes, to_.rows.cols,
                         to_.base() + r * to_.rows.stride);
        }
    }

  private:
    bool in_place() const {
        return !from_.chosen && !is_quantised(to_.rows.type) && to_.rows.stride == from_.row_bytes;
    }
    // Returns the end of the rows from i on that are read together.
    int64_t run_of(int64_t i, int64_t end) const {
        if (in_place()) return end;
        int64_t j = i + 1;
        for (; j < end; ++j) {
            const int64_t gap = (chosen(from_, j) - chosen(from_, j - 1) - 1) * from_.row_bytes;
            const int64_t bytes = (chosen(from_, j) + 1 - chosen(from_, i)) * from_.row_bytes;
            if (gap > kGap || bytes > kStaged) break;
        }
        return j;
    }

    const Target& to_;
    const Source& from_;
    int64_t per_piece_;
};

// Fills rows from columns: pieces of kGroup outputs and as many columns as fit the scratch. A column is one
// block wide: a panel, or one float.
class ColumnFiller {
  public:
    ColumnFiller(const Target& to, const Source& from) : to_(to), from_(from) {
        bytes_ = block_size(to.rows.type).bytes;
        const int64_t most = kPart / bytes_, columns = from.row_bytes / bytes_;
        parts_ = (columns + most - 1) / most;
        per_part_ = (columns + parts_ - 1) / parts_;
        stride_ = (per_part_ * bytes_ + 63) / 64 | 1;
        stride_ *= 64;
        groups_ = (from.rows + kGroup - 1) / kGroup;
        count_ = to.panels.neurons ? to.rows.count / to.panels.neurons : to.rows.count;
    }
    // Neighbouring pieces write to the same pages.
    int64_t pieces() const { return parts_ * groups_; }

    // Fills all parts of one group of outputs.
    void run_group(int64_t group, Reader& reader, uint8_t* stage) const {
        for (int64_t part = 0; part < parts_; ++part) run(part * groups_ + group, reader, stage);
    }

    void run(int64_t piece, Reader& reader, uint8_t* stage) const {
        const int64_t part = piece / groups_, group = piece % groups_ * kGroup;
        const int64_t begin = rank(part * per_part_), end = rank((part + 1) * per_part_);
        if (begin == end) return;
        const int64_t first = chosen(from_, begin), bytes = (chosen(from_, end - 1) + 1 - first) * bytes_;
        const int outputs = int(std::min<int64_t>(kGroup, from_.rows - group));
        const Outputs all{stage, stride_, group, outputs};
        for (int o = 0; o < outputs && !reader.failed(); ++o)
            reader.read((group + o) * from_.row_bytes + first * bytes_, bytes, stage + o * stride_);
        for (int o = outputs; o % kBlock; ++o) std::memset(stage + o * stride_, 0, size_t(bytes));
        for (int64_t i = begin, next; i < end && !reader.failed(); i = next) {
            next = i + 1;
            Outputs columns = all;
            columns.from += (chosen(from_, i) - first) * bytes_;
            if (to_.panels.neurons) {
                pack_panel(to_.rows.type, columns, from_.rows, to_.base() + i * to_.panels.bytes());
                continue;
            }
            while (next < end && chosen(from_, next) == chosen(from_, i) + next - i) ++next;
            transpose_floats(int(bytes_), columns, next - i,
                             to_.base() + i * to_.rows.stride + group * bytes_, to_.rows.stride);
        }
    }

  private:
    // Returns the number of wanted columns before this one.
    int64_t rank(int64_t column) const {
        if (!from_.chosen) return std::min(column, count_);
        return std::lower_bound(from_.chosen, from_.chosen + count_, column) - from_.chosen;
    }

    const Target& to_;
    const Source& from_;
    int64_t bytes_, parts_, per_part_, stride_, groups_, count_;
};

template <class Fn> auto with_filler(const Target& to, const Source& from, Fn&& fn) {
    if (to.by_output) return fn(ColumnFiller(to, from));
    return fn(RowFiller(to, from));
}

}  // namespace

int fill(const Target& to, const Source& from, Pool& pool, const std::function<void()>& check_interrupt) {
    if (from.row_bytes > int64_t(kLocalBytes) && !to.by_output)
        throw std::invalid_argument("a row of " + std::to_string(from.row_bytes) + " bytes: at most " +
                                    std::to_string(kLocalBytes) + " can be loaded");
    Reader reader(from);
    with_filler(to, from, [&](const auto& filler) {
        pool.run({Step{[&] { return filler.pieces(); },
                       [&](int64_t piece, const Scratch& scratch) {
                           if (!reader.failed()) filler.run(piece, reader, scratch.local);
                       }}},
                 nullptr, check_interrupt);
    });
    return reader.error();
}

void fill_rows(const Target& to, const Source& from, int64_t end, uint8_t* local) {
    if (!to.by_output) {
        for (int64_t r = from.first; r < end; ++r)
            pack_row(to.rows.type, from.data + (r - from.first) * from.row_bytes, to.rows.cols,
                     to.base() + r * to.rows.stride);
        return;
    }
    Reader reader(from);
    const ColumnFiller filler(to, from);
    for (int64_t group = from.first / kGroup; group * kGroup < end; ++group)
        filler.run_group(group, reader, local);
}

}  // namespace hc
