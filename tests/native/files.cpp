// Files and memory as a system has them, without kernels:
//     hotcold_files      exit 0: reads at any position are right, also past 4 GiB, from several threads and
//     past the system's cache; memory and locals lie where vectors need them; 1: something did not
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "disk/disk.h"
#include "disk/probe.h"
#include "expect.h"
#include "pack/memory.h"
#include "test_file.h"
#if defined(_WIN32)
#include <winioctl.h>
#endif

using namespace hc;

namespace {

constexpr int64_t kBytes = (int64_t(5) << 30) + 3 * kDiskBlock + 77;  // of the file, most of it a hole
constexpr int64_t kEnds = 16 * kDiskBlock;                            // what is written at each end of it

uint8_t value_at(int64_t at) {
    const auto n = uint64_t(at);
    return uint8_t((n * 2654435761u >> 7) ^ (n >> 32));
}

// Writes both ends of the file; what is between them is a hole.
void write_ends(const std::filesystem::path& path) {
    std::ofstream(path).flush();
#if defined(_WIN32)  // else the hole would be written
    const HANDLE made =
        CreateFileW(path.c_str(), GENERIC_WRITE, 0, nullptr, OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, nullptr);
    DWORD unused = 0;
    expect(DeviceIoControl(made, FSCTL_SET_SPARSE, nullptr, 0, nullptr, 0, &unused, nullptr), "no holes");
    CloseHandle(made);
#endif
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    for (const int64_t first : {int64_t(0), kBytes - kEnds}) {
        file.seekp(first);
        for (int64_t at = first; at < first + kEnds; ++at) file.put(char(value_at(at)));
    }
    expect(bool(file.flush()), "the file cannot be written");
}

// Where it is read on.
int64_t position_of(int number) {
#if defined(_WIN32)
    return _lseeki64(number, 0, SEEK_CUR);
#else
    return int64_t(lseek(number, 0, SEEK_CUR));
#endif
}

// Reads as the disk does: whole blocks to the first block of some room.
int64_t wrong_bytes(int number, int64_t at, int64_t bytes, int64_t wanted) {
    const AlignedBytes room = allocate_aligned(size_t(bytes + kDiskBlock));
    uint8_t* to = first_block(room);
    const int64_t n = read_at(number, to, bytes, at);
    if (n != wanted) return bytes;
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; ++i) wrong += to[i] != value_at(at + i);
    return wrong;
}

// Several threads at once, at both ends.
void test_reads(int number, const std::string& what) {
    constexpr int64_t kLast = kBytes / kDiskBlock * kDiskBlock;  // where the last block begins, of 77 bytes
    std::atomic<int64_t> wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
        threads.emplace_back([&, t] {
            for (int64_t block = t; block < 12; block += 4) {
                const int64_t tail = (kBytes - kEnds + kDiskBlock) / kDiskBlock * kDiskBlock;
                for (const int64_t at : {block * kDiskBlock, tail + block * kDiskBlock})
                    wrong += wrong_bytes(number, at, 2 * kDiskBlock, 2 * kDiskBlock);
                wrong += wrong_bytes(number, kLast, kDiskBlock, 77);
            }
        });
    for (std::thread& each : threads) each.join();
    expect(!wrong, what + ": " + std::to_string(wrong) + " bytes are wrong");
    const AlignedBytes room = allocate_aligned(2 * kDiskBlock);
    expect(read_at(number, first_block(room), kDiskBlock, kLast + kDiskBlock) == 0, what + ": past its end");
}

// What both kinds of readers do with a file: blocks at its ends, its last bytes, and what cannot be read.
void test_readers(int number, ReadWay way) {
    constexpr int64_t kLast = kBytes / kDiskBlock * kDiskBlock;
    const std::string what = way == ReadWay::kRings ? "rings" : "threads";
    Readers readers = open_readers(3, way);
    for (std::unique_ptr<Reader>& reader : readers.each) {
        std::vector<AlignedBytes> rooms;
        std::vector<int64_t> offsets;
        for (int name = 0; name < reader->most(); ++name) {
            rooms.push_back(allocate_aligned(2 * kDiskBlock));
            offsets.push_back(name % 3 ? (name % 3 - 1) * kDiskBlock : kLast);
            reader->begin(name, number, first_block(rooms.back()), kDiskBlock, offsets.back());
        }
        for (int i = 0; i < reader->most(); ++i) {
            const EndedRead ended = reader->wait();
            expect(ended.name >= 0, what + ": nobody woke it");
            if (ended.name < 0) continue;
            const int64_t at = offsets[size_t(ended.name)];
            expect(ended.bytes == (at == kLast ? 77 : kDiskBlock), what + ": it read another number");
            int64_t wrong = 0;
            for (int64_t k = 0; k < ended.bytes; ++k)
                wrong += first_block(rooms[size_t(ended.name)])[k] != value_at(at + k);
            expect(!wrong, what + ": wrong bytes");
        }
        uint8_t* to = first_block(rooms.front());
        reader->begin(0, number, to, kDiskBlock, kLast + kDiskBlock);
        expect(reader->wait().bytes == 0, what + ": past its end");
        reader->begin(0, -1, to, kDiskBlock, 0);
        const EndedRead failed = reader->wait();
        expect(failed.name == 0 && failed.bytes == -1 && failed.error == EBADF,
               what + ": no file can be read");
        reader->wake();
        reader->begin(0, number, to, kDiskBlock, 0);
        while (reader->wait().name != 0) {
        }
        for (int name = 0; name < reader->most(); ++name)  // the destructor waits for these
            reader->begin(name, number, first_block(rooms[size_t(name)]), kDiskBlock, kDiskBlock);
        reader.reset();
        for (const AlignedBytes& room : rooms)
            expect(first_block(room)[5] == value_at(kDiskBlock + 5), what + ": it went too early");
    }
}

void test_file() {
    const TestFile file(write_ends);
    expect(file.number() >= 0, "the file cannot be opened");
    expect(state_of(file.number()).bytes == kBytes, "its size is wrong");
    test_reads(file.number(), "as it was opened");
    uint8_t some[100];
    expect(read_at(file.number(), some, 100, kBytes - 60) == 60 && some[59] == value_at(kBytes - 1),
           "its last bytes");
    for (const bool direct : {false, true}) {
        const int64_t before = position_of(file.number());
        const OwnFile own = open_again(file.number(), direct);
        const std::string what = own.direct ? "opened past the cache" : "opened again";
        if (direct && !own.direct) std::printf("no file here is read past the cache\n");
        expect(own.number >= 0, what + ": failed");
        test_reads(own.number, what);
        test_readers(own.number, ReadWay::kThreads);
        if (!why_no_rings()) test_readers(own.number, ReadWay::kRings);
        expect(position_of(file.number()) == before, what + ": it moves where the file is read on");
        expect(state_of(own.number) == state_of(file.number()), what + ": it is another file");
        close_file(own.number);
    }
    expect(read_at(-1, some, 1, 0) == -1 && errno == EBADF, "no file can be read");
    expect(duplicate(-1) < 0 && errno == EBADF, "no file is opened again");
    const DiskSpeed speed = probe_disk(file.number(), {kDiskBlock, 4, 0.0, false});
    expect(speed.bytes_per_s > 0, "the disk has no speed");
    const FileState before = state_of(file.number());
    std::ofstream(file.path(), std::ios::app | std::ios::binary).put('x').flush();
    expect(!(state_of(file.number()) == before), "a longer file is the same one");
}

bool is_aligned(const void* at, uintptr_t to) { return reinterpret_cast<uintptr_t>(at) % to == 0; }

void test_memory() {
    for (const size_t bytes : {size_t(0), size_t(1), size_t(100), size_t(3) << 20}) {
        const AlignedBytes one = allocate_aligned(bytes);
        expect(is_aligned(one.get(), 64), "scratch is not aligned");
        Arena arena;
        const auto first = arena.take(bytes), second = arena.take(bytes + 1);
        expect(is_aligned(first->data(), 64) && is_aligned(second->data(), 64), "weights are not aligned");
        if (bytes) std::memset(first->data(), 1, bytes);
        std::memset(second->data(), 2, bytes + 1);
        expect(!bytes || first->data()[bytes - 1] == 1, "weights share bytes");
    }
}

// Locals of threads, whose stacks begin anywhere.
void test_locals() {
    for (int i = 0; i < 20; ++i)
        std::thread([] {
            alignas(64) volatile uint8_t local[64];
            local[0] = 0;
            expect(is_aligned(const_cast<const uint8_t*>(local), 64), "a local is not aligned");
        }).join();
}

}  // namespace

int main() {
    test_memory();
    test_locals();
    test_file();
    std::printf("files: %d failed\n", failures);
    return failures ? 1 : 0;
}
