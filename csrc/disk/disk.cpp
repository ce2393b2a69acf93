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
    const int number = direct ? open_direct(file) : -1;
    if (number >= 0) {  // some file systems open the file and then refuse the read
        const AlignedBytes buffer = allocate_aligned(2 * kDiskBlock);
        if (read_at(number, first_block(buffer), kDiskBlock, 0) >= 0) return {number, true};
        close_file(number);
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

// Adds space for block ends on both sides and for alignment.
int64_t ReadBuffers::bytes(int64_t largest) { return up_to_block(std::max(largest, kRead)) + 3 * kDiskBlock; }

uint8_t* ReadBuffers::take(int64_t bytes, int& number) {
    bytes = up_to_block(bytes);  // the next read must start at a block
    ReadBuffer* best = nullptr;
    for (ReadBuffer& read_buffer : read_buffers_) {
        if (!read_buffer.reads) read_buffer.used = 0;
        const bool fits = !read_buffer.reads || read_buffer.used + bytes <= read_buffer.size;
        if (fits && (!best || read_buffer.reads))
            best = &read_buffer;  // prefer a buffer that is in use to an empty one
    }
    if (!best) return nullptr;
    if (!best->reads && best->size < bytes) {
        const int64_t all = std::max(this->bytes(0), bytes + kDiskBlock);
        best->size = 0;
        best->bytes = allocate_aligned(size_t(all));
        best->size = all - kDiskBlock;
    }
    uint8_t* buffer = first_block(best->bytes) + best->used;
    best->used += bytes;
    ++best->reads;
    number = int(best - read_buffers_.data());
    return buffer;
}

Disk::Packer::Packer(std::unique_ptr<Reader> file_reader, int count)
    : read_buffers(count), reader(std::move(file_reader)), pieces(size_t(reader->most())) {
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
        for (Packer& packer : threads_->packers)
            packer.thread = std::thread([this, &packer] { loop(packer); });
    } catch (...) {
        stop();
        throw;
    }
}

bool Disk::forked() const { return process_ != process_id(); }

Disk::~Disk() {
    if (forked()) {
        for (Packer& packer : threads_->packers) packer.reader->leave();
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
    for (Packer& packer : threads_->packers) {
        packer.reader->wake();
        if (packer.thread.joinable()) packer.thread.join();
    }
}

int Disk::add(int file) {
    const FileState state = state_of(file);
    const OwnFile reopened = open_again(file, direct_);
    if (reopened.number < 0)
        throw DiskError(std::string("the model's file cannot be opened again: ") + strerror(errno));
    std::lock_guard<std::mutex> lock(threads_->mutex);
    files_.push_back({reopened.number, reopened.direct, state});
    return int(files_.size()) - 1;
}

void Disk::read(std::vector<DiskRead> reads) {
    {
        std::lock_guard<std::mutex> lock(threads_->mutex);
        for (DiskRead& read : reads) {
            ++read.arrival->left;
            (read.arrival->read_ahead ? reads_ahead_ : queue_).push_back(std::move(read));
        }
        wake_waiting_readers();
    }
    threads_->work.notify_all();
}

bool Disk::wait(const Arrival& arrival, const GiveUp& give_up) {
    std::unique_lock<std::mutex> lock(threads_->mutex);
    while (arrival.left) {
        threads_->done.wait_for(lock, kAskEvery, [&] { return arrival.left == 0; });
        if (!arrival.left) break;
        lock.unlock();  // give_up may take long
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

// Returns the bytes of the dropped reads.
int64_t Disk::drop(std::deque<DiskRead>& reads, const Arrival& arrival) {
    int64_t bytes = 0;
    const auto is_kept = [&](const DiskRead& read) {
        if (read.arrival.get() != &arrival) return true;
        bytes += (read.end - read.first) * read.from.row_bytes;
        --read.arrival->left;
        read.arrival->error = kDropped;
        return false;
    };
    reads.erase(std::stable_partition(reads.begin(), reads.end(), is_kept), reads.end());
    threads_->done.notify_all();
    return bytes;
}

void Disk::promote(const Arrival& arrival) {
    std::lock_guard<std::mutex> lock(threads_->mutex);
    const auto stays = [&](const DiskRead& read) { return read.arrival.get() != &arrival; };
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
        wake_waiting_readers();
    }
    threads_->work.notify_all();
}

void Disk::wake_waiting_readers() {
    for (Packer& packer : threads_->packers) {
        if (packer.waits) packer.reader->wake();
        packer.waits = false;
    }
}

void Disk::loop(Packer& packer) {
    std::unique_lock<std::mutex> lock(threads_->mutex);
    for (;;) {
        if (packer.idle()) threads_->work.wait(lock, [&] { return stop_ || (waiting() && !holds_); });
        take(packer);
        if (packer.idle()) {
            if (stop_) return;
            continue;
        }
        // Other threads take their share; if they wake slowly, this thread takes more.
        const bool takes_more = !packer.begun.empty() && waiting() && !packer.free.empty();
        packer.waits = !packer.free.empty();
        const auto start = Clock::now();
        lock.unlock();
        for (const int name : packer.begun) begin_read(packer, name);
        const int64_t bytes = wait(packer, takes_more);
        lock.lock();
        packer.waits = false;
        counts_.bytes += bytes;
        counts_.busy_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
        for (const auto& [name, error] : packer.ended) {
            Piece& piece = packer.pieces[size_t(name)];
            packer.read_buffers.give_back(piece.read_buffer);
            packer.free.push_back(name);
            const std::shared_ptr<Arrival> arrival = std::move(piece.read.arrival);
            if (piece.packing && --arrival->packing == 0) threads_->done.notify_all();
            settle(*arrival, error);
        }
    }
}

// Waits until a read has ended (with `poll_only`: does not wait) and packs what has ended. Stops after
// kEnough bytes, since another read can begin in the place of a packed one. Returns the bytes read.
int64_t Disk::wait(Packer& packer, bool poll_only) const {
    int64_t bytes = 0;
    packer.ended.clear();
    do {
        const EndedRead read = packer.reader->wait(poll_only);
        if (read.name < 0) continue;
        int error = 0;
        if (has_ended(packer, read, bytes, error)) packer.ended.emplace_back(read.name, error);
    } while (bytes < kEnough && packer.reader->ready());
    return bytes;
}

void Disk::settle(Arrival& arrival, int error) {
    ++counts_.reads;
    if (error && !arrival.error) arrival.error = error;
    if (--arrival.left == 0) threads_->done.notify_all();
}

// Takes this thread's share of the queued reads, as far as its buffers have space.
void Disk::take(Packer& packer) {
    packer.begun.clear();
    const size_t queued = queue_.size() + reads_ahead_.size(), threads = threads_->packers.size();
    const size_t share = (queued + threads - 1) / threads;
    while (!stop_ && !holds_ && waiting() && packer.begun.size() < share && !packer.free.empty()) {
        std::deque<DiskRead>& reads = queue_.empty() ? reads_ahead_ : queue_;
        const std::shared_ptr<Arrival> arrival = reads.front().arrival;
        int error = arrival->error;  // another part failed: this read would not help
        if (!error) {
            Piece piece = piece_of(reads.front());
            try {
                if (!packer.local) packer.local = allocate_aligned(kLocalBytes);
                piece.to = packer.read_buffers.take(piece.stop - piece.begin, piece.read_buffer);
                if (!piece.to) break;
                piece.read = std::move(reads.front());
                packer.pieces[size_t(packer.free.back())] = std::move(piece);
                packer.begun.push_back(packer.free.back());
                packer.free.pop_back();
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

void Disk::begin_read(Packer& packer, int name) const {
    const Piece& piece = packer.pieces[size_t(name)];
    uint8_t* to = piece.to + (piece.at - piece.begin);
    const int64_t bytes = std::min(piece.stop - piece.at, at_most_.load());
    packer.reader->begin(name, piece.file->number, to, bytes, piece.at);
}

// Returns true if a piece is done or failed (errno, kEnded or kChanged); otherwise requests the rest.
bool Disk::has_ended(Packer& packer, const EndedRead& read, int64_t& bytes, int& error) const {
    Piece& piece = packer.pieces[size_t(read.name)];
    const int64_t n = read.bytes;
    if (n < 0) {
        error = read.error;
        return true;
    }
    // The last block of a file may be partial; bytes after it cannot be read directly.
    if (n == 0 || (piece.file->direct && n % kDiskBlock && piece.at + n < piece.end)) {
        error = kEnded;
        return true;
    }
    piece.at += n;
    bytes += n;
    if (piece.at < piece.end) {
        begin_read(packer, read.name);
        return false;
    }
    if (!may_pack(piece)) {
        error = kDropped;
        return true;
    }
    try {
        error = pack(packer, piece);
    } catch (const std::bad_alloc&) {
        error = ENOMEM;
    } catch (...) {  // no exception may leave a thread
        error = EIO;
    }
    return true;
}

// Returns true if the target of a piece is still its own; it then stays so until the piece ends.
bool Disk::may_pack(Piece& piece) const {
    Arrival& arrival = *piece.read.arrival;
    if (!arrival.read_ahead) return true;
    std::lock_guard<std::mutex> lock(threads_->mutex);
    if (arrival.called_off) return false;
    piece.packing = true;
    ++arrival.packing;
    return true;
}

int Disk::pack(Packer& packer, const Piece& piece) const {
    if (!(state_of(piece.file->number) == piece.file->state)) return kChanged;
    Source from = piece.read.from;
    from.data = piece.to + (piece.wanted - piece.begin);
    from.first = piece.read.first;
    fill_rows(piece.read.to, from, piece.read.end, packer.local.get());
    return 0;
}

}  // namespace hc
