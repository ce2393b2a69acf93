#include "disk/disk.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>

#include "pool/local_bytes.h"
#include "pool/wait.h"

namespace hc {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kAskEvery(50);
constexpr int64_t kEnough = 256 << 10;  // bytes

int64_t down_to_block(int64_t n) { return n / kDiskBlock * kDiskBlock; }
int64_t up_to_block(int64_t n) { return down_to_block(n + kDiskBlock - 1); }

}  // namespace

uint8_t* first_block(const AlignedBytes& buffer) {
    return reinterpret_cast<uint8_t*>(up_to_block(int64_t(reinterpret_cast<uintptr_t>(buffer.get()))));
}

std::string why_not_read(int error) {
    if (error == kEnded) return "the file is shorter than it was when it was opened: load the model again";
    if (error == kChanged) return "the file has changed since it was opened: load the model again";
    return error > 0 ? std::strerror(error) : "the file ended";
}

OwnFile open_again(int file, bool direct) {
    const int own = direct ? open_direct(file) : -1;
    if (own >= 0) {  // some file systems open such a file and then refuse to read it
        const AlignedBytes buffer = allocate_aligned(2 * kDiskBlock);
        if (read_at(own, first_block(buffer), kDiskBlock, 0) >= 0) return {own, true};
        close_file(own);
    }
    return {duplicate(file), false};
}

int64_t Disk::rows_at_once(int64_t row_bytes, bool by_output) {
    const int64_t unit = by_output ? kGroup : 1;
    return std::max<int64_t>(1, kRead / (unit * row_bytes)) * unit;
}

int64_t Disk::staging_bytes(int64_t row_bytes, bool by_output) {
    return ReadBuffers::bytes(rows_at_once(row_bytes, by_output) * row_bytes) + int64_t(kLocalBytes);
}

int Disk::at_once(int pieces, int64_t bytes, bool rings) {
    if (!rings) return pieces;
    const int64_t of_read_buffer =
        std::max<int64_t>(1, ReadBuffers::bytes(0) / (up_to_block(bytes) + kDiskBlock));
    const int threads = std::min(pieces, kRings);
    return int(std::min<int64_t>(threads * kReadsOfRing, pieces * of_read_buffer));
}

// Block ends on both sides, and what an aligned address takes.
int64_t ReadBuffers::bytes(int64_t largest) { return up_to_block(std::max(largest, kRead)) + 3 * kDiskBlock; }

uint8_t* ReadBuffers::take(int64_t bytes, int& number) {
    bytes = up_to_block(bytes);  // the next read's room begins at a block, too
    ReadBuffer* found = nullptr;
    for (ReadBuffer& read_buffer : read_buffers_) {
        if (!read_buffer.reads) read_buffer.used = 0;
        const bool fits = !read_buffer.reads || read_buffer.used + bytes <= read_buffer.size;
        if (fits && (!found || read_buffer.reads)) found = &read_buffer;  // rather than an empty one
    }
    if (!found) return nullptr;
    if (!found->reads && found->size < bytes) {
        const int64_t all = std::max(this->bytes(0), bytes + kDiskBlock);
        found->size = 0;
        found->bytes = allocate_aligned(size_t(all));
        found->size = all - kDiskBlock;
    }
    uint8_t* buffer = first_block(found->bytes) + found->used;
    found->used += bytes;
    ++found->reads;
    number = int(found - read_buffers_.data());
    return buffer;
}

Disk::Packer::Packer(std::unique_ptr<Reader> own, int count)
    : read_buffers(count), reader(std::move(own)), pieces(size_t(reader->most())) {
    for (int name = reader->most(); name--;) free.push_back(name);
    begun.reserve(free.size());
    ended.reserve(free.size());
}

Disk::Disk(int pieces, bool direct, ReadWay way)
    : direct_(direct), process_(process_id()), threads_(std::make_unique<Threads>()) {
    if (pieces < 1) throw std::invalid_argument("a disk needs at least 1 thread");
    Readers readers = open_readers(pieces, way);
    rings_ = readers.rings;
    const int count = int(readers.each.size());
    for (int i = 0; i < count; ++i)
        threads_->packers.emplace_back(std::move(readers.each[size_t(i)]), (pieces + i) / count);
    try {
        for (Packer& each : threads_->packers) each.thread = std::thread([this, &each] { loop(each); });
    } catch (...) {
        stop();
        throw;
    }
}

bool Disk::forked() const { return process_ != process_id(); }

Disk::~Disk() {
    if (forked()) {
        for (Packer& each : threads_->packers) each.reader->leave();
        static_cast<void>(threads_.release());
    } else {
        stop();
    }
    for (const File& file : files_) close_file(file.number);
}

void Disk::stop() {
    {
        std::lock_guard<std::mutex> lock(threads_->mutex);
        stop_ = true;
    }
    threads_->work.notify_all();
    for (Packer& each : threads_->packers) {
        each.reader->wake();
        if (each.thread.joinable()) each.thread.join();
    }
}

int Disk::add(int file) {
    const FileState state = state_of(file);
    const OwnFile own = open_again(file, direct_);
    if (own.number < 0)
        throw DiskError(std::string("the model's file cannot be opened again: ") + strerror(errno));
    std::lock_guard<std::mutex> lock(threads_->mutex);
    files_.push_back({own.number, own.direct, state});
    return int(files_.size()) - 1;
}

void Disk::read(std::vector<DiskRead> reads) {
    {
        std::lock_guard<std::mutex> lock(threads_->mutex);
        for (DiskRead& each : reads) {
            ++each.arrival->left;
            (each.arrival->read_ahead ? reads_ahead_ : queue_).push_back(std::move(each));
        }
        wake_those_that_wait();
    }
    threads_->work.notify_all();
}

bool Disk::wait(const Arrival& arrival, const GiveUp& give_up) {
    std::unique_lock<std::mutex> lock(threads_->mutex);
    while (arrival.left) {
        threads_->done.wait_for(lock, kAskEvery, [&] { return arrival.left == 0; });
        if (!arrival.left) break;
        lock.unlock();  // whoever is asked may take long
        const bool gives_up = give_up && give_up();
        lock.lock();
        if (gives_up) return arrival.left == 0;
    }
    return true;
}

bool Disk::arrived(const Arrival& arrival) {
    std::lock_guard<std::mutex> lock(threads_->mutex);
    return arrival.left == 0;
}

void Disk::drop(const Arrival& arrival) {
    std::lock_guard<std::mutex> lock(threads_->mutex);
    drop(queue_, arrival);
}

// Returns the bytes of what it drops.
int64_t Disk::drop(std::deque<DiskRead>& reads, const Arrival& arrival) {
    int64_t bytes = 0;
    const auto is_kept = [&](const DiskRead& each) {
        if (each.arrival.get() != &arrival) return true;
        bytes += (each.end - each.first) * each.from.row_bytes;
        --each.arrival->left;
        each.arrival->error = kDropped;
        return false;
    };
    reads.erase(std::stable_partition(reads.begin(), reads.end(), is_kept), reads.end());
    threads_->done.notify_all();
    return bytes;
}

void Disk::promote(const Arrival& arrival) {
    std::lock_guard<std::mutex> lock(threads_->mutex);
    const auto stays = [&](const DiskRead& each) { return each.arrival.get() != &arrival; };
    const auto needed = std::stable_partition(reads_ahead_.begin(), reads_ahead_.end(), stays);
    queue_.insert(queue_.end(), std::make_move_iterator(needed), std::make_move_iterator(reads_ahead_.end()));
    reads_ahead_.erase(needed, reads_ahead_.end());
}

int64_t Disk::call_off(Arrival& arrival) {
    std::unique_lock<std::mutex> lock(threads_->mutex);
    const int64_t bytes = drop(reads_ahead_, arrival) + drop(queue_, arrival);
    arrival.called_off = true;
    threads_->done.wait(lock, [&] { return arrival.packing == 0; });
    return bytes;
}

int Disk::error_of(const Arrival& arrival) {
    std::lock_guard<std::mutex> lock(threads_->mutex);
    return arrival.error;
}

Disk::Counts Disk::counts() {
    std::lock_guard<std::mutex> lock(threads_->mutex);
    return counts_;
}

void Disk::hold(bool holds) {
    {
        std::lock_guard<std::mutex> lock(threads_->mutex);
        holds_ = holds;
        wake_those_that_wait();
    }
    threads_->work.notify_all();
}

void Disk::wake_those_that_wait() {
    for (Packer& each : threads_->packers) {
        if (each.waits) each.reader->wake();
        each.waits = false;
    }
}

void Disk::loop(Packer& own) {
    std::unique_lock<std::mutex> lock(threads_->mutex);
    for (;;) {
        if (own.idle()) threads_->work.wait(lock, [&] { return stop_ || (waiting() && !holds_); });
        take(own);
        if (own.idle()) {
            if (stop_) return;
            continue;
        }
        // Others take their share, and if they are slow to wake, this one takes another.
        const bool more = !own.begun.empty() && waiting() && !own.free.empty();
        own.waits = !own.free.empty();
        const auto start = Clock::now();
        lock.unlock();
        for (const int name : own.begun) ask(own, name);
        const int64_t bytes = wait(own, more);
        lock.lock();
        own.waits = false;
        counts_.bytes += bytes;
        counts_.busy_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
        for (const auto& [name, error] : own.ended) {
            Piece& piece = own.pieces[size_t(name)];
            own.read_buffers.give_back(piece.read_buffer);
            own.free.push_back(name);
            const std::shared_ptr<Arrival> arrival = std::move(piece.read.arrival);
            if (piece.packing && --arrival->packing == 0) threads_->done.notify_all();
            settle(*arrival, error);
        }
    }
}

// Waits until something has ended, or not with `more`, and packs that, and what else has; one large piece is
// enough, since another can be begun in its place. Returns the bytes that were read.
int64_t Disk::wait(Packer& own, bool more) const {
    int64_t bytes = 0;
    own.ended.clear();
    do {
        const EndedRead read = own.reader->wait(more);
        if (read.name < 0) continue;
        int error = 0;
        if (has_ended(own, read, bytes, error)) own.ended.emplace_back(read.name, error);
    } while (bytes < kEnough && own.reader->ready());
    return bytes;
}

void Disk::settle(Arrival& arrival, int error) {
    ++counts_.reads;
    if (error && !arrival.error) arrival.error = error;
    if (--arrival.left == 0) threads_->done.notify_all();
}

// Takes its share of what waits, as far as it has room.
void Disk::take(Packer& own) {
    own.begun.clear();
    const size_t all = queue_.size() + reads_ahead_.size(), threads = threads_->packers.size();
    const size_t share = (all + threads - 1) / threads;
    while (!stop_ && !holds_ && waiting() && own.begun.size() < share && !own.free.empty()) {
        std::deque<DiskRead>& reads = queue_.empty() ? reads_ahead_ : queue_;
        const std::shared_ptr<Arrival> arrival = reads.front().arrival;
        int error = arrival->error;  // of another part: this one would not help
        if (!error) {
            Piece piece = piece_of(reads.front());
            try {
                if (!own.local) own.local = allocate_aligned(kLocalBytes);
                piece.to = own.read_buffers.take(piece.stop - piece.begin, piece.read_buffer);
                if (!piece.to) break;
                piece.read = std::move(reads.front());
                own.pieces[size_t(own.free.back())] = std::move(piece);
                own.begun.push_back(own.free.back());
                own.free.pop_back();
            } catch (const std::bad_alloc&) {
                error = ENOMEM;
            }
        }
        reads.pop_front();
        if (error) settle(*arrival, error);
    }
}

Disk::Piece Disk::piece_of(const DiskRead& read) const {
    Piece piece{};
    piece.file = &files_[size_t(read.from.file)];
    const int64_t row = read.from.row_bytes;
    piece.wanted = read.from.offset + read.first * row;
    piece.end = piece.wanted + (read.end - read.first) * row;
    piece.begin = piece.file->direct ? down_to_block(piece.wanted) : piece.wanted;
    piece.stop = piece.file->direct ? up_to_block(piece.end) : piece.end;
    piece.at = piece.begin;
    return piece;
}

void Disk::ask(Packer& own, int name) const {
    const Piece& piece = own.pieces[size_t(name)];
    uint8_t* to = piece.to + (piece.at - piece.begin);
    const int64_t bytes = std::min(piece.stop - piece.at, at_most_.load());
    own.reader->begin(name, piece.file->number, to, bytes, piece.at);
}

// Whether a piece is done, or failed: errno, kEnded or kChanged. Else its rest was asked for.
bool Disk::has_ended(Packer& own, const EndedRead& read, int64_t& bytes, int& error) const {
    Piece& piece = own.pieces[size_t(read.name)];
    const int64_t n = read.bytes;
    if (n < 0) {
        error = read.error;
        return true;
    }
    // The last block of a file may be a part of one; what follows it cannot be read directly.
    if (n == 0 || (piece.file->direct && n % kDiskBlock && piece.at + n < piece.end)) {
        error = kEnded;
        return true;
    }
    piece.at += n;
    bytes += n;
    if (piece.at < piece.end) {
        ask(own, read.name);
        return false;
    }
    if (!may_pack(piece)) {
        error = kDropped;
        return true;
    }
    try {
        error = pack(own, piece);
    } catch (const std::bad_alloc&) {
        error = ENOMEM;
    } catch (...) {  // nothing may leave a thread
        error = EIO;
    }
    return true;
}

// Whether the place that a piece goes to is still its own, which it then is until the piece has ended.
bool Disk::may_pack(Piece& piece) const {
    Arrival& arrival = *piece.read.arrival;
    if (!arrival.read_ahead) return true;
    std::lock_guard<std::mutex> lock(threads_->mutex);
    if (arrival.called_off) return false;
    piece.packing = true;
    ++arrival.packing;
    return true;
}

int Disk::pack(Packer& own, const Piece& piece) const {
    if (!(state_of(piece.file->number) == piece.file->state)) return kChanged;
    Source from = piece.read.from;
    from.data = piece.to + (piece.wanted - piece.begin);
    from.first = piece.read.first;
    fill_rows(piece.read.to, from, piece.read.end, own.local.get());
    return 0;
}

}  // namespace hc
