// Reads of an open file at a position: pread, or what a system has in its place.
#pragma once
#include <cerrno>
#include <cstdint>
#if defined(_WIN32)
#include <io.h>
#include <sys/stat.h>
#include <windows.h>
#else
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#endif
#if defined(__linux__)
#include <string>
#endif

namespace hc {

constexpr int64_t kDiskBlock = 4096;  // what direct reads begin, end and are put at

// Bytes read, 0 at the end of the file, -1 with errno.
inline int64_t read_at(int file, uint8_t* to, int64_t bytes, int64_t offset) {
#if defined(_WIN32)
    OVERLAPPED at{};
    at.Offset = DWORD(offset);
    at.OffsetHigh = DWORD(offset >> 32);
    DWORD done = 0;
    const auto most = DWORD(bytes < (1 << 30) ? bytes : 1 << 30);
    if (ReadFile(HANDLE(_get_osfhandle(file)), to, most, &done, &at)) return int64_t(done);
    if (GetLastError() == ERROR_HANDLE_EOF) return 0;
    errno = EIO;
    return -1;
#else
    for (;;) {
        const auto n = pread(file, to, size_t(bytes), off_t(offset));
        if (n >= 0 || errno != EINTR) return int64_t(n);
    }
#endif
}

// What tells that a file is not what it was.
struct FileState {
    int64_t bytes = -1, seconds = 0, nanoseconds = 0;
    bool operator==(const FileState& o) const {
        return bytes == o.bytes && seconds == o.seconds && nanoseconds == o.nanoseconds;
    }
};

inline FileState state_of(int file) {
#if defined(_WIN32)
    struct _stat64 s;
    if (_fstat64(file, &s)) return {};
    return {int64_t(s.st_size), int64_t(s.st_mtime), 0};
#else
    struct stat s;
    if (fstat(file, &s)) return {};
#if defined(__APPLE__)
    return {int64_t(s.st_size), int64_t(s.st_mtimespec.tv_sec), int64_t(s.st_mtimespec.tv_nsec)};
#else
    return {int64_t(s.st_size), int64_t(s.st_mtim.tv_sec), int64_t(s.st_mtim.tv_nsec)};
#endif
#endif
}

inline void close_file(int file) {
#if defined(_WIN32)
    _close(file);
#else
    close(file);
#endif
}

// The same file once more; -1 with errno.
inline int duplicate(int file) {
#if defined(_WIN32)
    return _dup(file);
#else
    return fcntl(file, F_DUPFD_CLOEXEC, 0);
#endif
}

// The same file once more, read past the system's cache; -1 where that cannot be.
inline int open_direct(int file) {
#if defined(__linux__)
    const std::string same = "/proc/self/fd/" + std::to_string(file);
    return open(same.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
#elif defined(__APPLE__)
    const int copy = duplicate(file);
    if (copy >= 0) fcntl(copy, F_NOCACHE, 1);
    return copy;
#else
    static_cast<void>(file);
    return -1;
#endif
}

}  // namespace hc
