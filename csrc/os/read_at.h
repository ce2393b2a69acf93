// Reads of an open file at a position: pread or its equivalent.
#pragma once
#include <cerrno>
#include <cstdint>
#if defined(_WIN32)
#include <fcntl.h>
#include <io.h>
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

constexpr int64_t kDiskBlock = 4096;  // alignment of direct reads in file and memory

#if defined(_WIN32)
// `file` is a descriptor of the C library that this code is linked with; also Python's if both use UCRT.
inline HANDLE handle_of(int file) { return file < 0 ? INVALID_HANDLE_VALUE : HANDLE(_get_osfhandle(file)); }
#endif

// Returns the bytes read, 0 at the end of the file, -1 with errno.
inline int64_t read_at(int file, uint8_t* to, int64_t bytes, int64_t offset) {
#if defined(_WIN32)
    OVERLAPPED at{};
    at.Offset = DWORD(offset);
    at.OffsetHigh = DWORD(offset >> 32);
    at.hEvent = CreateEventW(nullptr, TRUE, FALSE, nullptr);
    if (!at.hEvent) {
        errno = ENOMEM;
        return -1;
    }
    const HANDLE handle = handle_of(file);
    const auto most = DWORD(bytes < (1 << 30) ? bytes : 1 << 30);
    DWORD done = 0;
    const bool begun = ReadFile(handle, to, most, nullptr, &at) || GetLastError() == ERROR_IO_PENDING;
    const bool read = begun && GetOverlappedResult(handle, &at, &done, TRUE);
    const DWORD error = read ? 0 : GetLastError();
    CloseHandle(at.hEvent);
    if (read || error == ERROR_HANDLE_EOF) return int64_t(done);
    errno = error == ERROR_INVALID_HANDLE ? EBADF : EIO;
    return -1;
#else
    for (;;) {
        const auto n = pread(file, to, size_t(bytes), off_t(offset));
        if (n >= 0 || errno != EINTR) return int64_t(n);
    }
#endif
}

// Size and modification time: they show whether a file has changed.
struct FileState {
    int64_t bytes = -1, seconds = 0, nanoseconds = 0;
    bool operator==(const FileState& o) const {
        return bytes == o.bytes && seconds == o.seconds && nanoseconds == o.nanoseconds;
    }
};

inline FileState state_of(int file) {
#if defined(_WIN32)
    BY_HANDLE_FILE_INFORMATION s;
    if (!GetFileInformationByHandle(handle_of(file), &s)) return {};
    constexpr int64_t kTicks = 10'000'000;  // a second
    const int64_t written = int64_t(s.ftLastWriteTime.dwHighDateTime) << 32 | s.ftLastWriteTime.dwLowDateTime;
    return {int64_t(s.nFileSizeHigh) << 32 | s.nFileSizeLow, written / kTicks, written % kTicks * 100};
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

#if defined(_WIN32)
// Opens the same file again for concurrent reads: Windows allows only one read at a time of a file that was
// not opened as overlapped.
inline int reopen(int file, DWORD flags) {
    const DWORD share = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;
    const HANDLE again = ReOpenFile(handle_of(file), GENERIC_READ, share, flags | FILE_FLAG_OVERLAPPED);
    if (again == INVALID_HANDLE_VALUE) {
        errno = GetLastError() == ERROR_INVALID_HANDLE ? EBADF : EACCES;
        return -1;
    }
    const int descriptor = _open_osfhandle(intptr_t(again), _O_RDONLY | _O_NOINHERIT);
    if (descriptor < 0) CloseHandle(again);
    return descriptor;
}
#endif

// Opens the same file again; -1 with errno.
inline int duplicate(int file) {
#if defined(_WIN32)
    return reopen(file, 0);
#else
    return fcntl(file, F_DUPFD_CLOEXEC, 0);
#endif
}

// Opens the same file again for reads that bypass the page cache; -1 if that is not possible.
inline int open_direct(int file) {
#if defined(__linux__)
    const std::string same = "/proc/self/fd/" + std::to_string(file);
    return open(same.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
#elif defined(__APPLE__)
    const int copy = duplicate(file);
    if (copy >= 0) fcntl(copy, F_NOCACHE, 1);
    return copy;
#else
    return reopen(file, FILE_FLAG_NO_BUFFERING);
#endif
}

}  // namespace hc
