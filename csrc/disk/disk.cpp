#include "disk/disk.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "pool/wait.h"
#include "simd/kernels.h"

namespace hc {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kAskEvery(50);

int64_t down_to_block(int64_t n) { return n / kDiskBlock * kDiskBlock; }
int64_t up_to_block(int64_t n) { return down_to_block(n + kDiskBlock - 1); }

}  // namespace

uint8_t* first_block(const AlignedBytes& room) {
    return reinterpret_cast<uint8_t*>(up_to_block(int64_t(reinterpret_cast<uintptr_t>(room.get()))));
}

std::string why_not_read(int error) {
    if (error == kEnded) return "the file is shorter than it was when it was opened: load the model again";
    if (error == kChanged) return "the file has changed since it was opened: load the model again";
    return error > 0 ? std::strerror(error) : "the file ended";
}

OwnFile open_again(int file, bool direct) {
    const int own = direct ? open_direct(file) : -1;
    if (own >= 0) {  // some file systems open such a file and then refuse to read it
        const AlignedBytes room = allocate_aligned(2 * kDiskBlock);
        if (read_at(own, first_block(room), kDiskBlock, 0) >= 0) return {own, true};
        close_file(own);
    }
    return {duplicate(file), false};
}

int64_t Disk::rows_at_once(int64_t row_bytes, bool by_output) {
    const int64_t unit = by_output ? kGroup : 1;
    return std::max<int64_t>(1, kRead / (unit * row_bytes)) * unit;
}

int64_t Disk::staging_bytes(int64_t row_bytes, bool by_output) {
    // Block ends on both sides, and what an aligned address takes.
    const int64_t staged = up_to_block(rows_at_once(row_bytes, by_output) * row_bytes) + 3 * kDiskBlock;
    return staged + int64_t(kLocalBytes);
}

Disk::Disk(int threads, bool direct)
    : direct_(direct), process_(process_id()), threads_(std::make_unique<Threads>()) {
    if (threads < 1) throw std::invalid_argument("a disk needs at least 1 thread");
    try {
        for (int i = 0; i < threads; ++i) threads_->started.emplace_back([this] { loop(); });
    } catch (...) {
        stop();
        throw;
    }
}

bool Disk::forked() const { return process_ != process_id(); }

Disk::~Disk() {
    if (forked())
        static_cast<void>(threads_.release());
    else
        stop();
    for (const File& file : files_) close_file(file.number);
}

void Disk::stop() {
    {
        std::lock_guard<std::mutex> lock(threads_->mutex);
        stop_ = true;
    }
    threads_->work.notify_all();
    for (std::thread& each : threads_->started) each.join();
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
            queue_.push_back(std::move(each));
        }
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
    const auto is_kept = [&](const DiskRead& each) {
        if (each.arrival.get() != &arrival) return true;
        --each.arrival->left;
        each.arrival->error = kDropped;
        return false;
    };
    queue_.erase(std::stable_partition(queue_.begin(), queue_.end(), is_kept), queue_.end());
    threads_->done.notify_all();
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
    }
    threads_->work.notify_all();
}

void Disk::loop() {
    Staging staging;
    std::unique_lock<std::mutex> lock(threads_->mutex);
    for (;;) {
        threads_->work.wait(lock, [&] { return stop_ || (!queue_.empty() && !holds_); });
        if (stop_) return;
        const DiskRead read = std::move(queue_.front());
        queue_.pop_front();
        int error = read.arrival->error;  // of another part: this one would not help
        int64_t bytes = 0;
        const auto start = Clock::now();
        if (!error) {
            lock.unlock();
            try {
                error = perform(read, staging, bytes);
            } catch (const std::bad_alloc&) {
                error = ENOMEM;
            } catch (...) {  // nothing may leave a thread
                error = EIO;
            }
            lock.lock();
        }
        counts_.bytes += bytes;
        ++counts_.reads;
        counts_.busy_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
        if (error && !read.arrival->error) read.arrival->error = error;
        if (--read.arrival->left == 0) threads_->done.notify_all();
    }
}

// Returns 0, or the error: errno's, kEnded or kChanged.
int Disk::perform(const DiskRead& read, Staging& staging, int64_t& bytes) const {
    const File* file = nullptr;
    {
        std::lock_guard<std::mutex> lock(threads_->mutex);
        file = &files_[size_t(read.from.file)];
    }
    const int64_t row = read.from.row_bytes, wanted = read.from.offset + read.first * row;
    const int64_t end = wanted + (read.end - read.first) * row;
    const int64_t begin = file->direct ? down_to_block(wanted) : wanted;
    const int64_t stop = file->direct ? up_to_block(end) : end;
    const int64_t room = up_to_block(stop - begin) + kDiskBlock;
    if (staging.size < room) {
        staging.bytes = allocate_aligned(size_t(room));
        staging.size = room;
    }
    if (!staging.local) staging.local = allocate_aligned(kLocalBytes);
    uint8_t* to = first_block(staging.bytes);
    for (int64_t at = begin; at < end;) {
        const int64_t n = read_at(file->number, to + (at - begin), stop - at, at);
        if (n < 0) return errno ? errno : EIO;
        // The last block of a file may be a part of one; what follows it cannot be read directly.
        if (n == 0 || (file->direct && n % kDiskBlock && at + n < end)) return kEnded;
        at += n;
        bytes += n;
    }
    if (!(state_of(file->number) == file->state)) return kChanged;
    Source from = read.from;
    from.data = to + (wanted - begin);
    from.first = read.first;
    fill_rows(read.to, from, read.end, staging.local.get());
    return 0;
}

}  // namespace hc
