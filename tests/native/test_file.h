// A file that a native test writes and opens to be read; it goes with the object.
#pragma once
#include <chrono>
#include <filesystem>
#include <string>
#include <system_error>

#include "os/read_at.h"

// In a folder of its own; both have names beyond any code page.
class TestFile {
  public:
    // `write` makes the file of this path.
    template <class Write> explicit TestFile(Write write) {
        const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
        folder_ =
            std::filesystem::temp_directory_path() /
            std::filesystem::u8path("hotcold \xc3\xa9\xe6\xa8\xa1\xf0\x9f\xa6\x99 " + std::to_string(now));
        std::filesystem::create_directory(folder_);
        path_ = folder_ / std::filesystem::u8path("\xce\xbc\xe2\x9d\x84.gguf");
        write(path_);
#if defined(_WIN32)
        number_ = _wopen(path_.c_str(), _O_RDONLY | _O_BINARY);
#else
        number_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
#endif
    }
    ~TestFile() {
        hc::close_file(number_);
        std::error_code ignored;
        std::filesystem::remove_all(folder_, ignored);
    }
    TestFile(const TestFile&) = delete;
    TestFile& operator=(const TestFile&) = delete;

    int number() const { return number_; }
    const std::filesystem::path& path() const { return path_; }

  private:
    std::filesystem::path folder_, path_;
    int number_ = -1;
};
